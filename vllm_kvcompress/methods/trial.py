"""Check a part of another package: what it declares, and what it returns for a tiny random prompt.

The trial shows mistakes that would otherwise appear while a request is compressed, or as wrong
tokens. It does not replace the part's own tests: its formula, its results on a GPU, and that it
never waits for one.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad

from kvcompress_kernels.window_scores import WindowScores, reference
from vllm_kvcompress.errors import ConfigError, shorten
from vllm_kvcompress.methods.base import Allocator, Reads, Scorer, ScoreUse, Selector, build
from vllm_kvcompress.methods.budget_spec import BudgetSpec, LayerStats
from vllm_kvcompress.methods.method import Method
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.methods.parts.allocators import Uniform
from vllm_kvcompress.methods.parts.topk import TopK
from vllm_kvcompress.methods.preset import min_window

_METHODS: Mapping[str, tuple[str, ...]] = {
    "allocator": ("allocate",),
    "scorer": ("score",),
    "selector": ("source", "protect", "select"),
}
_NEEDED_READS = {
    Reads.VARIANCE: Reads.WINDOW,
    Reads.LAST: Reads.WINDOW,
    Reads.MAXIMUM: Reads.WINDOW,
    Reads.KV_HEADS: Reads.WINDOW,
    Reads.PROMPT_MAXIMUM: Reads.MAXIMUM,
    Reads.POOLED: Reads.MAXIMUM,
    Reads.COLUMN_MEANS: Reads.COLUMN_SUMS,
}
_ALLOCATOR_READS = (
    Reads.WINDOW | Reads.VARIANCE | Reads.COLUMN_SUMS | Reads.COLUMN_MEANS | Reads.SCORES
)
_READS = {"allocator": _ALLOCATOR_READS, "scorer": ~(Reads.COLUMN_MEANS | Reads.SCORES)}
"""Statistics that a part of each kind can get."""
_DECLARED: Mapping[str, type] = {
    "exact_ratio": bool,
    "equal_shares": bool,
    "needs_whole_prompt": str,
}
_NOT_REPEATABLE = (
    "`{0}` must leave its inputs unchanged and return the same {1} for the same inputs, but a"
    " second call returned others; write to copies, and seed what is random"
)
_LAYERS, _HEADS, _KV_HEADS, _TOKENS, _DIM, _BLOCK = 2, 4, 2, 100, 16, 16


def check_part(kind: str, name: str, part_type: Any) -> None:
    """Check the class of a part, and run it once with its default parameters, on the CPU.

    Args:
        kind: "allocator", "scorer" or "selector".
        name: the part's name, for messages.

    Raises:
        ConfigError: the class breaks a rule of `base.Allocator`, `base.Scorer` or `base.Selector`.
        Exception: whatever the part raises.
    """
    is_class = dataclasses.is_dataclass(part_type) and isinstance(part_type, type)
    if not (is_class and part_type.__dataclass_params__.frozen):
        raise ConfigError(
            "a part must be a frozen dataclass, because settings are compared and cached; got"
            f" {shorten(part_type)}; decorate the class with @dataclass(frozen=True, kw_only=True)"
        )
    missing = [each for each in _METHODS[kind] if not callable(getattr(part_type, each, None))]
    if missing:
        raise ConfigError(
            f"every {kind} must have the methods {list(_METHODS[kind])}; add {missing}"
        )
    part = build(kind, {name: part_type}, name, {}, ())
    if kind in _READS:
        _check_reads(kind, getattr(part, "reads", None))
    _check_declarations(kind, part)
    with _repeatable_torch():
        if kind == "allocator":
            _try_allocator(part)
        elif kind == "scorer":
            _try_scorer(part)
        else:
            _try_selector(part)


@contextmanager
def _repeatable_torch() -> Iterator[None]:
    """Run the body on the CPU in float32 with seeded random numbers, whatever the process has set.

    vLLM sets another device and dtype while it loads a model.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(dtype)


def _check_reads(kind: str, reads: object) -> None:
    if not isinstance(reads, Reads):
        raise ConfigError(f"`reads` must be of type Reads, got {reads!r}; declare it")
    if unavailable := reads & ~_READS[kind]:
        raise ConfigError(f"a part of kind {kind} cannot read {unavailable!r}; remove it")
    for flag, needed in _NEEDED_READS.items():
        if flag in reads and needed not in reads:
            raise ConfigError(f"{flag!r} is computed only together with {needed!r}; add that")


def _check_declarations(kind: str, part: Any) -> None:
    """Check the attributes that only describe the part."""
    types = _DECLARED if kind == "allocator" else {}
    if hasattr(part, "needs_whole_prompt"):
        types = {**types, "needs_whole_prompt": str}
    for name, expected in types.items():
        value = getattr(part, name, None)
        if not isinstance(value, expected):
            raise ConfigError(
                f"every {kind} must declare `{name}` as a {expected.__name__}, got {value!r};"
                " correct it"
            )
    uses = (*getattr(part, "uses", ()), *getattr(part, "unfit", {}))
    if wrong := [use for use in uses if not isinstance(use, ScoreUse)]:
        raise ConfigError(f"`uses` and `unfit` must name members of ScoreUse, got {wrong}")


def _try_scorer(scorer: Scorer) -> None:
    """Score two layers together and each alone, once more if lengths may differ."""
    window = max(min_window(scorer.reads), 4)
    method = Method(allocator=Uniform(), scorer=scorer, selector=TopK(), merge=False)
    _compare_with_single_layers(method, _random_layers(), window)
    if getattr(scorer, "needs_whole_prompt", None) == "":
        lengths = torch.tensor([_TOKENS, _TOKENS - 37], dtype=torch.int32)
        layers = dataclasses.replace(_random_layers(), lengths=lengths)
        _compare_with_single_layers(method, layers, window)


def _compare_with_single_layers(method: Method, layers: PagedLayers, window: int) -> None:
    """Check that scores do not depend on other layers, and are the same when computed again."""
    query = torch.randn(_LAYERS, window, _HEADS, _DIM)
    heads = _HEADS if layers.lengths is None else _KV_HEADS
    sums = torch.rand(_LAYERS, heads, _TOKENS)
    counts = [_TOKENS] * _LAYERS if layers.lengths is None else layers.lengths.tolist()
    for layer, count in enumerate(counts):
        sums[layer, :, count:] = 0
    together = _scores(method, layers, query, sums, window)
    for layer, count in enumerate(counts):
        part = slice(layer, layer + 1)
        one = layers.subset(part)
        one = dataclasses.replace(one, max_tokens=count, pages=one.pages[:, : -(-count // _BLOCK)])
        alone = _scores(method, one, query[part], sums[part, :, :count], window)[0]
        if not _equal(together[layer, :, : count - window], alone):
            lengths = "" if layers.lengths is None else " of another length"
            raise ConfigError(
                f"a layer's scores must not depend on the other layers of `AttentionStats`, but"
                f" layer {layer} is scored differently beside a layer{lengths}; score each layer"
                " on its own"
            )


def _scores(
    method: Method, layers: PagedLayers, query: torch.Tensor, sums: torch.Tensor, window: int
) -> torch.Tensor:
    """Return the ``[N, Hkv, max_tokens - w]`` scores, after computing them twice."""
    reads = method.scorer.reads
    attention = _attention(layers, query, reads) if Reads.WINDOW in reads else None
    given_sums = sums.clone() if Reads.COLUMN_SUMS in reads else None
    scores = []
    for _ in range(2):
        observed = method.observe(layers, window, attention, given_sums).scores
        assert observed is not None
        scores.append(observed.clone())
    if not _equal(*scores):
        raise ConfigError(_NOT_REPEATABLE.format("score", "scores"))
    return scores[0]


def _attention(layers: PagedLayers, query: torch.Tensor, reads: Reads) -> WindowScores:
    """Return the attention of each layer's queries, from the definition of the kernel.

    The kernel's CPU code needs numba, and compiling it takes seconds.
    """
    counts = [layers.max_tokens] * len(layers) if layers.lengths is None else layers.lengths
    by_layer = []
    for layer, count in enumerate(map(int, counts)):
        pages = layers.pages[layer, : -(-count // _BLOCK)]
        scores = reference.run(
            query[layer],
            layers.key_pages,
            pages,
            count,
            _DIM**-0.5,
            Reads.VARIANCE in reads,
            Reads.MAXIMUM in reads,
            Reads.POOLED in reads,
            last=Reads.LAST in reads,
        )
        fields = {
            name: pad(x, (0, layers.max_tokens - count)) if name != "recent" else x
            for name, x in scores._asdict().items()
            if x is not None and x.dim()
        }
        if Reads.KV_HEADS in reads:
            lines = {name: x.unflatten(0, (_KV_HEADS, -1)) for name, x in fields.items()}
            fields = {
                name: x.amax(1) if name == "maximum" else x.mean(1) for name, x in lines.items()
            }
        by_layer.append(scores._replace(**fields))
    stacked: list[Any] = [
        None if parts[0] is None else torch.stack(parts) for parts in zip(*by_layer, strict=True)
    ]
    return WindowScores(*stacked)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def _random_layers() -> PagedLayers:
    """Return layers of random keys and values, each in its own pages."""
    width = -(-_TOKENS // _BLOCK)
    pages = torch.arange(_LAYERS * width).view(_LAYERS, width)
    return PagedLayers(
        key_pages=torch.randn(_LAYERS * width, _KV_HEADS, _DIM, _BLOCK),
        value_pages=torch.randn(_LAYERS * width, _KV_HEADS, _BLOCK, _DIM),
        pages=pages,
        lengths=None,
        max_tokens=_TOKENS,
        scale=_DIM**-0.5,
        layers=range(_LAYERS),
    )


def _try_allocator(allocator: Allocator) -> None:
    """Divide a budget of 24 past tokens per layer among one layer and among three."""
    hash(allocator)
    for layers in (1, 3):
        spec = BudgetSpec(num_layers=layers, tokens=_TOKENS, window=4, budget=28)
        stats = LayerStats(
            entropy=torch.rand(layers) + 1,
            shift=torch.rand(layers) + 1,
            column_variance=torch.rand(layers, _HEADS),
            scores=torch.rand(layers, _KV_HEADS, spec.past),
        )
        first, second = (
            allocator.allocate(spec, stats if allocator.reads else None) for _ in range(2)
        )
        if first.dtype != torch.int64 or first.shape != (layers,):
            raise ConfigError(
                f"`allocate` must return [{layers}] int64 for {layers} layers, got"
                f" {list(first.shape)} {first.dtype}; return one number per layer"
            )
        if not torch.equal(first, second):
            raise ConfigError(_NOT_REPEATABLE.format("allocate", "budgets"))
        if first.min() < 0 or first.max() > spec.past or first.sum() > spec.past_total:
            raise ConfigError(
                f"`allocate` must return numbers in [0, {spec.past}] whose sum is"
                f" at most {spec.past_total}, which is `spec.past_total`; got {first.tolist()}; use"
                " kvcompress_kernels.apportion"
            )


def _try_selector(selector: Selector) -> None:
    """Select from three layers, of one length and of different lengths."""
    sources = [selector.source(layer) for layer in range(8)]
    if any(not 0 <= source <= layer for layer, source in enumerate(sources)):
        raise ConfigError(
            f"`source` must return the layer itself or an earlier layer, got {sources} for layers"
            " 0 to 7; correct it"
        )
    scores, keep = torch.rand(3, _KV_HEADS, 96), torch.tensor([5, 20, 41], dtype=torch.int32)
    of_each = torch.tensor([90, 60, 41], dtype=torch.int32)
    for past in (None, of_each):
        kept = selector.select(scores.clone(), 90 if past is None else past, keep, 4, 48)
        if kept.dtype != torch.int32 or kept.shape != (3, _KV_HEADS, 48):
            raise ConfigError(
                f"`select` must return [3, {_KV_HEADS}, 48] int32 for 3 layers and a width of 48,"
                f" got {list(kept.shape)} {kept.dtype}; correct it"
            )
        lengths = [90] * 3 if past is None else past.tolist()
        for layer, (length, count) in enumerate(zip(lengths, keep.tolist(), strict=True)):
            for row in kept[layer].tolist():
                ascending = row[:count] == sorted({*row[:count]} & {*range(length)})
                if not ascending or row[count:] != [-1] * (48 - count):
                    raise ConfigError(
                        f"`select` must return {count} positions below {length} in ascending order,"
                        f" then -1, where keep is {count} and past {length}; got {shorten(row)};"
                        " correct it"
                    )
    shown = selector.protect(scores[..., :90].clone(), keep, 4)
    if shown.shape != (3, _KV_HEADS, 90):
        raise ConfigError(
            f"`protect` must return its scores' shape [3, {_KV_HEADS}, 90], got"
            f" {list(shown.shape)}; return the scores, with +inf where a token is always kept"
        )
