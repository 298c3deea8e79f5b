"""CPU form of `window_scores`: float32, one pass over K, tiled over columns.

Pass 1 computes the logits tile by tile and each row's running maximum and sum; pass 2 reads the
stored logits, ``Hq * w * S`` float32, once more and reduces them over the window. Tiles keep the
temporaries inside the processor's cache.

Where the processor multiplies bfloat16 (AMX), pass 1 of a bfloat16 cache does: its products are
exact and its sums float32, so that nothing is rounded which float32 would keep.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.functional import pad

from kvcompress_kernels.window_scores.result import WindowScores

TILE = 512
"""AttentionStats of the prompt in one tile of logits."""


def run(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    variance: bool,
    maximum: bool = False,
    pooled: bool = False,
    sinks: torch.Tensor | None = None,
) -> WindowScores:
    w, heads, _ = query.shape
    kv_heads, block = key_pages.shape[1], key_pages.shape[3]
    group, past = heads // kv_heads, tokens - w

    logits = _logits(query, key_pages, pages, tokens, scale, max(TILE // block, 1))
    _mask_future(logits, group, w, past)
    sink = None if sinks is None else sinks.view(kv_heads, group, 1).expand(-1, -1, w)
    log_sum = _log_sum(logits, sink).view(heads, w, 1)
    every = [tile.view(heads, w, -1) for tile in logits]
    return _reduced(every, log_sum, past, variance, maximum, pooled)


def _log_sum(logits: list[torch.Tensor], sink: torch.Tensor | None) -> torch.Tensor:
    """Log of each row's sum of ``exp`` over all tiles and its sink: ``[Hkv, G * w, 1]``."""
    top = torch.full_like(logits[0][..., :1], -torch.inf)
    weight = torch.zeros_like(top)
    if sink is not None:
        top = sink.reshape_as(top)
        weight += 1
    for tile in logits:
        new_top = torch.maximum(top, tile.amax(-1, keepdim=True))
        weight *= (top - new_top).exp_()
        weight += (tile - new_top).exp_().sum(-1, keepdim=True)
        top = new_top
    return top + weight.log()


def _reduced(
    logits: list[torch.Tensor],
    log_sum: torch.Tensor,
    past: int,
    variance: bool,
    maximum: bool,
    pooled: bool,
) -> WindowScores:
    """Reduce tiles of logits ``[Hq, w, columns]`` over the window; where pooled, overwrite them."""
    heads, w, _ = log_sum.shape
    total = log_sum.new_empty(heads, past)
    recent = log_sum.new_empty(heads, w)
    last = log_sum.new_empty(heads, past + w)
    spread = torch.empty_like(total) if variance else None
    most = torch.empty_like(last) if maximum else None
    entropy = log_sum.new_zeros(())
    attention: list[torch.Tensor] = []
    end = 0
    for tile in logits:
        start, end = end, end + tile.shape[-1]
        last[:, start:end] = (tile[:, -1] - log_sum[:, -1]).exp_()
        if end > past:
            inside = (tile[..., max(past - start, 0) :] - log_sum).exp_()
            recent[:, max(start - past, 0) : end - past] = _over_rows(inside)
            if most is not None:
                most[:, max(start, past) : end] = inside.amax(1)
        stop = min(end, past)
        if stop <= start:
            continue
        log_a = tile[..., : stop - start] - log_sum
        a = log_a.exp()
        entropy -= torch.dot(a.reshape(-1), log_a.reshape(-1))
        column = _over_rows(a)
        total[:, start:stop] = column
        if pooled:
            attention.append(tile[..., : stop - start].copy_(a))
        elif most is not None:
            most[:, start:stop] = a.amax(1)
        if spread is not None:
            a -= (column / w).unsqueeze(1)
            spread[:, start:stop] = _over_rows(a.square_())
    if most is not None and pooled:
        _pooled_maximum(attention, most[:, :past])
    if spread is None:
        return WindowScores(total, None, entropy, torch.zeros_like(entropy), recent, last, most)
    spread /= w - 1
    return WindowScores(total, spread, entropy, spread.sum(), recent, last, most)


def run_rows(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float | torch.Tensor,
    lengths: torch.Tensor | None,
    variance: bool,
    maximum: bool,
    pooled: bool,
    sinks: torch.Tensor | None = None,
) -> WindowScores:
    """Row by row; what a shorter row has no token for is 0."""
    block = key_pages.shape[3]
    every = [tokens] * len(query) if lengths is None else lengths.tolist()
    factors = scale.tolist() if isinstance(scale, torch.Tensor) else [scale] * len(query)
    found: list[WindowScores] = []
    every_sink = [None] * len(query) if sinks is None else list(sinks)
    for asked, own, length, factor, sink in zip(
        query, pages, every, factors, every_sink, strict=True
    ):
        used = own[: -(-length // block)]
        scores = run(asked, key_pages, used, length, factor, variance, maximum, pooled, sink)
        behind = 0, tokens - length
        found.append(
            scores._replace(
                total=pad(scores.total, behind),
                variance=None if scores.variance is None else pad(scores.variance, behind),
                last=pad(scores.last, behind),
                maximum=None if scores.maximum is None else pad(scores.maximum, behind),
            )
        )
    return WindowScores(
        total=torch.stack([scores.total for scores in found]),
        variance=_stacked(scores.variance for scores in found),
        entropy=torch.stack([scores.entropy for scores in found]),
        shift=torch.stack([scores.shift for scores in found]),
        recent=torch.stack([scores.recent for scores in found]),
        last=torch.stack([scores.last for scores in found]),
        maximum=_stacked(scores.maximum for scores in found),
    )


def _stacked(parts: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.stack(present) if present else None


def _over_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum ``[heads, w, n]`` over the rows, halves onto each other: every column in one order.

    Equal columns must stay equal for their tie to go to the lower position, and a reduction's order
    differs between columns. Halves round less than one row after the other, and need no float64.
    """
    while (rows := x.shape[1]) > 1:
        half = x[:, : rows // 2] + x[:, rows // 2 : rows // 2 * 2]
        if rows % 2:
            half[:, 0] += x[:, -1]
        x = half
    return x[:, 0]


def _pooled_maximum(tiles: list[torch.Tensor], out: torch.Tensor) -> None:
    """The maximum over the pooled rows, ``[heads, P]`` into `out`.

    The sum of a pooled row follows from its four outermost columns: each column counts in five
    places, and those next to an end in fewer.

    Args:
        tiles: of ``[heads, w, columns]``, attention to the past; all but the last are wide.
    """
    first = torch.cat([tile[..., :2] for tile in tiles[:2]], dim=-1)
    final = torch.cat([tile[..., -2:] for tile in tiles[-2:]], dim=-1)
    lost = 2 * (first[..., 0] + final[..., -1])
    if out.shape[1] > 1:
        lost += first[..., 1] + final[..., -2]
    mass = torch.stack([tile.sum(-1) for tile in tiles]).sum(0)
    # of a row that attends to nothing of the past both are 0, and so are its columns
    share = (mass / (5 * mass - lost).clamp_min(torch.finfo(mass.dtype).tiny))[..., None]
    start = 0
    for i, tile in enumerate(tiles):
        size = tile.shape[-1]
        before = tiles[i - 1][..., -2:] if i else tile[..., :0]
        after = tiles[i + 1][..., :2] if i + 1 < len(tiles) else tile[..., :0]
        near = torch.cat([before, tile, after], dim=-1)
        near = pad(near, (2 - before.shape[-1], 2 - after.shape[-1]))
        # in this order everywhere, so that equal columns stay equal
        total = near[..., :size] + near[..., 1 : size + 1]
        for shift in (2, 3, 4):
            total += near[..., shift : size + shift]
        out[:, start : start + size] = (total * share).amax(1)
        start += size


def _logits(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    step: int,
) -> list[torch.Tensor]:
    """Scaled dot products ``[Hkv, G * w, columns]`` of each run of `step` pages."""
    w, heads, dim = query.shape
    kv_heads, block = key_pages.shape[1], key_pages.shape[3]
    q = query.float().view(w, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    q = q.reshape(kv_heads, -1, dim)
    keys = (
        key_pages[pages[first : first + step]]
        .permute(1, 2, 0, 3)
        .reshape(kv_heads, dim, -1)
        .float()[:, :, : tokens - first * block]
        for first in range(0, len(pages), step)
    )
    if query.dtype == key_pages.dtype == torch.bfloat16 and multiplies_bfloat16():
        # the scale multiplies the sums: a bfloat16 does not hold a query times its scale
        with _products_in_bfloat16():
            return [torch.baddbmm(k.new_empty(()), q, k, beta=0, alpha=scale) for k in keys]
    q = q * scale
    return [torch.matmul(q, k) for k in keys]


def multiplies_bfloat16() -> bool:
    """Whether oneDNN has the processor's own bfloat16 matrices."""
    return torch.cpu._is_amx_tile_supported()


@contextmanager
def _products_in_bfloat16() -> Iterator[None]:
    """Let oneDNN round the factors of float32 products to bfloat16, which leaves ours as they are.

    torch has no product on a CPU that reads bfloat16 and writes float32.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _mask_future(logits: list[torch.Tensor], group: int, w: int, past: int) -> None:
    """A window row sees no key after its own: the past needs no mask."""
    start = 0
    for tile in logits:
        stop = start + tile.shape[-1]
        if stop > past:
            key = torch.arange(start, stop, device=tile.device)
            row = torch.arange(past, past + w, device=tile.device)
            tile.masked_fill_((key > row[:, None]).repeat(group, 1), -torch.inf)
        start = stop
