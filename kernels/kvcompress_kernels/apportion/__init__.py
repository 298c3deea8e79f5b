"""Integer budgets of layers: proportional shares that sum to exactly a total (docs/methods.md 2.0).

Layers are the last dimension; leading dimensions are batch dimensions. On a GPU each op is one
launch, and the host reads no value. Shares are computed in float64 and int64.
"""

import torch

from kvcompress_kernels import contract
from kvcompress_kernels.contract import require


def apportion(
    weights: torch.Tensor,
    total: int | torch.Tensor,
    caps: int | torch.Tensor,
    floor: int = 0,
) -> torch.Tensor:
    """Return integers proportional to `weights` with sum exactly ``min(total, sum(caps))``.

    Every layer first gets ``min(floor, cap)``. The rest is divided in proportion to the weights; a
    full layer's excess goes to the other layers. Shares are rounded by largest remainder, ties to
    the lower layer. Layers of weight 0 get tokens, evenly, only when all weighted layers are full.

    Args:
        weights: ``[..., N]`` finite numbers >= 0. Only ratios matter. NaN counts as 0.
        total: tokens to distribute: an int, or an int64 tensor of one element or ``[..., 1]``. At
            least the sum of the floors (not checked, since it may be on a device).
        caps: maximum of each layer, >= 0: one int, or ``[..., N]`` int64.
        floor: minimum of each layer, where its cap allows it.

    Returns:
        ``[..., N]`` int64.

    Raises:
        ValueError: Shapes or dtypes disagree.
    """
    _check("apportion", weights, total, caps)
    if contract.runs_triton(weights):
        from kvcompress_kernels.apportion.triton import run
    else:
        from kvcompress_kernels.apportion.cpu import run

    return run(weights, total, caps, floor)


def apportion_by_preference(
    entropy: torch.Tensor,
    shift: torch.Tensor,
    total: int | torch.Tensor,
    caps: int | torch.Tensor,
    *,
    tau1: float,
    tau2: float,
) -> torch.Tensor:
    """Return `apportion` with CAKE's preferences as weights (docs/methods.md 2.3).

    Preferences are ``entropy ** (1 / tau1) * shift ** (1 / tau2)``, computed in logarithms. A layer
    without entropy or shift has weight 0.

    Args:
        entropy: ``[..., N]`` floats.
        shift: ``[..., N]`` floats.
        total: as in `apportion`.
        caps: as in `apportion`.
        tau1: temperature of the entropy, > 0.
        tau2: temperature of the shift, > 0.

    Returns:
        ``[..., N]`` int64.

    Raises:
        ValueError: Shapes or dtypes disagree, or a temperature is not positive.
    """
    name = "apportion_by_preference"
    _check(name, entropy, total, caps, ("entropy", "total", "caps"))
    rule = f"shift must be {list(entropy.shape)}"
    require(shift.shape == entropy.shape, name, rule, tuple(shift.shape))
    require(tau1 > 0 and tau2 > 0, name, "temperatures must be positive", (tau1, tau2))
    if contract.runs_triton(entropy):
        from kvcompress_kernels.apportion.triton import run_preferences
    else:
        from kvcompress_kernels.apportion.cpu import run_preferences

    return run_preferences(entropy, shift, total, caps, tau1, tau2)


def round_to_pages(
    tokens: torch.Tensor,
    *,
    pages: int,
    page_tokens: int,
    tail: int,
    floor_pages: int,
    max_pages: int | torch.Tensor,
) -> torch.Tensor:
    """Return the pages per layer for token budgets, with sum exactly `pages`.

    Rounds ``(n_l - tail) / page_tokens`` by largest remainder, in integers, between `floor_pages`
    and `max_pages`; ties to the lower layer. A layer is less than a page from its token budget,
    unless the minimum takes pages from other layers.

    Args:
        tokens: ``[..., N]`` int64, tokens per layer n_l.
        pages: pages over all layers; between the sums of the minimums and of the maximums.
        page_tokens: tokens in a page.
        tail: tokens to subtract from each budget before it is divided into pages: the layer's
            tokens outside pages, less its paged tokens that `tokens` leaves out. May be negative.
        floor_pages: minimum pages of a layer, where its maximum allows them.
        max_pages: maximum pages of each layer, >= 0: one int, or ``[..., N]`` int64.

    Returns:
        ``[..., N]`` int64.

    Raises:
        ValueError: Shapes or dtypes disagree, or `page_tokens` is not positive.
    """
    name = "round_to_pages"
    require(tokens.dtype == torch.int64, name, "tokens must be int64", tokens.dtype)
    require(page_tokens > 0, name, "page_tokens must be positive", page_tokens)
    _check(name, tokens, pages, max_pages, ("tokens", "pages", "max_pages"))
    if contract.runs_triton(tokens):
        from kvcompress_kernels.apportion.triton import run_pages
    else:
        from kvcompress_kernels.apportion.cpu import run_pages

    return run_pages(tokens, pages, page_tokens, tail, floor_pages, max_pages)


def _check(
    op: str,
    weights: torch.Tensor,
    total: int | torch.Tensor,
    caps: int | torch.Tensor,
    arguments: tuple[str, str, str] = ("weights", "total", "caps"),
) -> None:
    weights_name, total_name, caps_name = arguments
    shape = tuple(weights.shape)
    rule = f"{weights_name} must be [..., N] with N > 0"
    require(len(shape) > 0 and shape[-1] > 0, op, rule, shape)
    for name, x in ((total_name, total), (caps_name, caps)):
        if isinstance(x, torch.Tensor):
            require(x.dtype == torch.int64, op, f"{name} must be int64", x.dtype)
    if isinstance(caps, torch.Tensor):
        require(caps.shape == shape, op, f"{caps_name} must be {list(shape)}", tuple(caps.shape))
    if isinstance(total, torch.Tensor):
        ok = total.numel() == 1 or total.shape == (*shape[:-1], 1)
        rule = f"{total_name} must have one element or be {[*shape[:-1], 1]}"
        require(ok, op, rule, tuple(total.shape))
