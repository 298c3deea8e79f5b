"""Every op, launched as the engine launches it, beside its form in torch and its floor.

The window scores of several layers share a launch, the more the shorter the prompt
(`Packer._observe`); column sums (`PromptCompressor.after_attention`), what is read of keys and
values alone, and merging are launched layer by layer; ranking and moving take all layers of a
prompt at once (`Packer.run`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.prompt import (
    DecodeStep,
    Prompt,
    Shape,
    causal_product,
    cosines,
    kept_twice,
    keys_once,
    scores_once,
    tables_twice,
)
from kvcompress_kernels.column_sums import column_sums
from kvcompress_kernels.column_sums import cpu as column_sums_cpu
from kvcompress_kernels.key_cosines import cpu as key_cosines_cpu
from kvcompress_kernels.key_cosines import key_cosines
from kvcompress_kernels.lag_scores import cpu as lag_scores_cpu
from kvcompress_kernels.lag_scores import lag_scores
from kvcompress_kernels.merge_evicted import Merged, merge_evicted
from kvcompress_kernels.merge_evicted import cpu as merge_evicted_cpu
from kvcompress_kernels.move_kept import cpu as move_kept_cpu
from kvcompress_kernels.move_kept import move_kept
from kvcompress_kernels.page_tables import cpu as page_tables_cpu
from kvcompress_kernels.page_tables import page_tables
from kvcompress_kernels.select import cpu as select_cpu
from kvcompress_kernels.select import select, select_chunks
from kvcompress_kernels.value_norms import cpu as value_norms_cpu
from kvcompress_kernels.value_norms import value_norms
from kvcompress_kernels.value_scores import cpu as value_scores_cpu
from kvcompress_kernels.value_scores import value_scores
from kvcompress_kernels.window_scores import cpu as window_scores_cpu
from kvcompress_kernels.window_scores import window_scores_of_layers
from vllm_kvcompress.planning.memory import layers_at_once

CHUNK = 10  # tokens of ChunkKV's chunks
RTOL, ATOL = 1e-4, 1e-6  # of floats against `plain`, as in the kernels' tests
Outputs = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op at work on a prompt, or on a decode step.

    Args:
        launch: the layers of one launch.
        left: what it left in memory that it was given, where those are its outputs.
        plain: what the op's `cpu.py` returns for the same; `reference.py` would take days here.
        at_once: layers of a launch.
        exact: whether every bit must be that of `plain`.
        of: what it works on.
        floor_bytes: bytes that must move for all layers; 0 if arithmetic is the floor.
        floor_flops: operations that must be done on the tensor cores.
        goal: least share of the copy bandwidth, by the floor.
        undecided: share of the outputs that rounding may decide either way.
    """

    name: str
    launch: Callable[[Any, range], Outputs]
    plain: Callable[[Any, range], Outputs]
    at_once: Callable[[Shape], int]
    left: Callable[[Any], Outputs] | None = None
    exact: bool = False
    of: type[Prompt] | type[DecodeStep] = Prompt
    floor_bytes: Callable[[Shape], int] = lambda shape: 0
    floor_flops: Callable[[Shape], int] = lambda shape: 0
    goal: float | None = None
    undecided: float = 0.0

    def launches(self, shape: Shape) -> list[range]:
        """The layers of each launch."""
        layers, at_once = shape.layers, self.at_once(shape)
        starts = range(0, layers, at_once)
        return [range(start, min(start + at_once, layers)) for start in starts]


def some(outputs: Any) -> Outputs:
    """The tensors of what an op returns, one or several, without those that were not asked for."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [x for x in outputs if x is not None]


def layer_op(name: str, op: Any, plain: Any, args: Any, **more: Any) -> Op:
    """An op that is launched layer by layer; plain forms take the same arguments by position."""
    options = more.pop("options", {})
    return Op(
        name=name,
        launch=lambda p, layers: some(op(*args(p, layers[0]), **options)),
        plain=lambda p, layers: some(plain(*args(p, layers[0]), *options.values())),
        at_once=lambda shape: 1,
        **more,
    )


def window_op(
    name: str, *, variance: bool = False, maximum: bool = False, pooled: bool = False
) -> Op:
    """As many layers share a launch as the engine lets share one."""
    asked: dict[str, Any] = {"variance": variance, "maximum": maximum, "pooled": pooled}

    def launch(p: Prompt, layers: range) -> Outputs:
        queries, pages = [p.query[layer] for layer in layers], p.pages[layers.start : layers.stop]
        what = queries, p.keys, pages, p.shape.tokens, p.scale
        found = window_scores_of_layers(*what, **asked)
        return [x for scores in found for x in some(scores)]

    def plain(p: Prompt, layers: range) -> Outputs:
        run, tokens = window_scores_cpu.run, p.shape.tokens
        rows = ((p.query[layer], p.keys, p.pages[layer], tokens, p.scale) for layer in layers)
        return [x for row in rows for x in some(run(*row, **asked))]

    return Op(
        name=name,
        launch=launch,
        plain=plain,
        at_once=lambda shape: layers_at_once(shape.longest, shape.tokens),
        **_ONCE,
    )


_ONCE: dict[str, Any] = {"floor_bytes": keys_once, "goal": 0.8}


def prompt_op(name: str, launch: Any, plain: Any, **more: Any) -> Op:
    """An op that takes all layers at once, and decides or moves: every bit is the plain form's."""
    layers: dict[str, Any] = {"at_once": lambda shape: shape.layers, "exact": True}
    return Op(name=name, launch=launch, plain=plain, **layers, **more)


# -- layer by layer ----------------------------------------------------------------------------


def value_args(p: Prompt, layer: int) -> tuple[Any, ...]:
    return p.weights, p.values, p.pages[layer], p.shape.tokens


def norm_args(p: Prompt, layer: int) -> tuple[Any, ...]:
    return p.values, p.pages[layer], p.shape.tokens


def cosine_args(p: Prompt, layer: int) -> tuple[Any, ...]:
    return p.keys, p.pages[layer], p.shape.tokens


def lag_op(name: str, sinks: int, lag: int) -> Op:
    def fitting(tokens: int) -> int:
        """`lag`, or less where a dry run's prompt would have no partition that another follows."""
        return min(lag, (tokens - sinks) // 4)

    def launch(p: Prompt, layers: range) -> Outputs:
        what = p.keys, p.values, p.pages[layers[0]], p.shape.tokens
        return [lag_scores(*what, sinks=sinks, lag=fitting(p.shape.tokens))]

    def plain(p: Prompt, layers: range) -> Outputs:
        size = fitting(p.shape.tokens)
        parts = (p.shape.tokens - sinks) // size - 1
        what = p.keys, p.values, p.pages[layers[0]]
        return [lag_scores_cpu.run(*what, parts, sinks, size)]

    floor: dict[str, Any] = {"floor_bytes": lambda shape: 2 * keys_once(shape)}
    return Op(name=name, launch=launch, plain=plain, at_once=lambda shape: 1, **floor)


def column_args(p: Prompt, layer: int) -> tuple[Any, ...]:
    return p.chunk_query, p.keys, p.pages[layer], p.shape.tokens, p.scale


def merge_args(p: Prompt, layer: int) -> tuple[Any, ...]:
    one, block = slice(layer, layer + 1), p.shape.block
    # what the engine knows of every layer beforehand: the window is kept
    held, least = p.counts[one] * block, -(-p.shape.window // block) * block
    return p.keys, p.values, p.pages[one], p.shape.tokens, p.kept[one], held, least


# -- all layers at once ------------------------------------------------------------------------


def ranked(p: Prompt) -> tuple[torch.Tensor, int, torch.Tensor, int]:
    """Scores by rows, columns, what each layer keeps, and the most."""
    return p.scores.flatten(0, 1), p.shape.tokens, p.counts * p.shape.block, p.kept.shape[2]


def select_launch(p: Prompt, _: range) -> Outputs:
    scores, columns, keep, most = ranked(p)
    return [select(scores, columns, keep.repeat_interleave(p.shape.kv_heads), most)]


def select_plain(p: Prompt, _: range) -> Outputs:
    scores, columns, keep, most = ranked(p)
    keep = keep.repeat_interleave(p.shape.kv_heads)
    none = torch.zeros_like(keep)
    return [select_cpu.run(scores, none + columns, keep, most, none, none)]


def chunks_launch(p: Prompt, _: range) -> Outputs:
    return [select_chunks(*ranked(p), size=CHUNK, heads=p.shape.kv_heads)]


def chunks_plain(p: Prompt, _: range) -> Outputs:
    scores, columns, keep, most = ranked(p)
    lengths = torch.full_like(keep, columns)
    return [select_cpu.chunks(scores, lengths, keep, most, CHUNK, p.shape.kv_heads)]


def move_launch(p: Prompt, _: range) -> Outputs:
    cache = p.keys, p.values
    move_kept(*cache, p.pages, p.kept, p.counts, p.targets, into=cache)
    return []


def moved(p: Prompt) -> Outputs:
    """What lies in the pages that were to be filled."""
    pages = filled(p, p.targets)
    return p.keys[pages], p.values[pages]


def move_plain(p: Prompt, _: range) -> Outputs:
    """The same tokens in pages of their own."""
    where = torch.arange(p.targets.numel(), device=p.device).view_as(p.targets)
    to = tuple(x.new_empty(where.numel(), *x.shape[1:]) for x in (p.keys, p.values))
    move_kept_cpu.run(p.keys, p.values, p.pages, p.kept, p.counts, where, *to)
    pages = filled(p, where)
    return [x[pages] for x in to]


def filled(p: Prompt, pages: torch.Tensor) -> torch.Tensor:
    """Of ``[L, most]`` pages those that the layers fill."""
    return torch.cat([row[:n] for row, n in zip(pages, p.shape.counts, strict=True)])


def tables_launch(step: DecodeStep, _: range) -> Outputs:
    page_tables(*step.where, *step.rows, step.tables, step.lengths)
    return []


def read_tables(step: DecodeStep) -> Outputs:
    return covered(step, step.tables, step.lengths)


def tables_plain(step: DecodeStep, _: range) -> Outputs:
    tables, lengths = torch.zeros_like(step.tables), torch.zeros_like(step.lengths)
    page_tables_cpu.run(*step.where, *step.rows, tables, lengths)
    return covered(step, tables, lengths)


def covered(step: DecodeStep, tables: torch.Tensor, lengths: torch.Tensor) -> Outputs:
    """Page ids that a length covers; behind them a table may hold what it held."""
    column = torch.arange(tables.shape[2], device=tables.device)
    return tables.where(column * step.block < lengths[..., None], -1), lengths


# -- the list ----------------------------------------------------------------------------------

_VALUES = value_scores, value_scores_cpu.run, value_args
_NORMS = value_norms, value_norms_cpu.run, norm_args
_COSINES = key_cosines, key_cosines_cpu.run, cosine_args
_COLUMNS = column_sums, column_sums_cpu.run, column_args


def merged(
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    kept: torch.Tensor,
    counts: torch.Tensor,
    least: int,
) -> Merged:
    """`cpu.py` of `merge_evicted`, for a prompt: nothing was evicted before."""
    lengths, beta = torch.full_like(counts, tokens), 0.7
    threshold = torch.full(kept.shape[:2], torch.nan, device=kept.device)
    given = keys, values, pages, tokens, kept, counts, least
    return merge_evicted_cpu.run(*given, False, lengths, threshold, beta)


_MERGE = merge_evicted, merged, merge_args

OPS = (
    window_op("window_scores"),
    window_op("window_scores, variance", variance=True),
    window_op("window_scores, variance and maximum", variance=True, maximum=True),
    window_op("window_scores, pooled maximum", maximum=True, pooled=True),
    layer_op("value_scores", *_VALUES, options={"fast": False, "reduce": "mean"}, **_ONCE),
    layer_op("value_scores, fast", *_VALUES, options={"fast": True, "reduce": "l2"}, **_ONCE),
    layer_op("value_norms", *_NORMS, floor_bytes=keys_once),
    layer_op("key_cosines", *_COSINES, floor_bytes=keys_once),
    lag_op("lag_scores", sinks=4, lag=128),
    layer_op("column_sums, last chunk", *_COLUMNS, floor_flops=causal_product),
    prompt_op("select", select_launch, select_plain, floor_bytes=scores_once),
    prompt_op("select_chunks", chunks_launch, chunks_plain, floor_bytes=scores_once),
    prompt_op("move_kept", move_launch, move_plain, left=moved, floor_bytes=kept_twice, goal=0.8),
    layer_op("merge_evicted", *_MERGE, floor_flops=cosines, undecided=1e-3),
    prompt_op(
        "page_tables, a decode step",
        tables_launch,
        tables_plain,
        left=read_tables,
        of=DecodeStep,
        floor_bytes=tables_twice,
    ),
)


def wrong(op: Op, got: Outputs, want: Outputs) -> float:
    """The worst output's share of elements that are not the plain form's."""
    if [x.shape for x in got] != [x.shape for x in want]:
        return 1.0
    shares = [0.0]
    for a, b in zip(got, want, strict=True):
        same = a == b if op.exact else torch.isclose(a, b, rtol=RTOL, atol=ATOL)
        shares.append(1.0 - float(same.double().mean()) if same.numel() else 0.0)
    return max(shares)
