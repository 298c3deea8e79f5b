"""Every op as the engine launches it, with its torch reference and its floor.

How the engine launches the ops for the layers of a prompt:

* Window scores: several layers share a launch, and more layers for shorter prompts
  (`Packer._observe`).
* Column sums (`PromptCompressor.after_attention`), scores from keys or values alone, and merging:
  one launch per layer.
* Counting, selecting and moving: one launch for all layers (`Packer.run`).
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
from kvcompress_kernels.count_highest import count_highest
from kvcompress_kernels.count_highest import cpu as count_highest_cpu
from kvcompress_kernels.key_cosines import cpu as key_cosines_cpu
from kvcompress_kernels.key_cosines import key_cosines_of_rows
from kvcompress_kernels.lag_scores import cpu as lag_scores_cpu
from kvcompress_kernels.lag_scores import lag_scores_of_rows
from kvcompress_kernels.merge_evicted import Merged, merge_evicted
from kvcompress_kernels.merge_evicted import cpu as merge_evicted_cpu
from kvcompress_kernels.move_kept import cpu as move_kept_cpu
from kvcompress_kernels.move_kept import move_kept
from kvcompress_kernels.page_tables import cpu as page_tables_cpu
from kvcompress_kernels.page_tables import page_tables
from kvcompress_kernels.select import cpu as select_cpu
from kvcompress_kernels.select import select, select_chunks
from kvcompress_kernels.value_norms import cpu as value_norms_cpu
from kvcompress_kernels.value_norms import value_norms_of_rows
from kvcompress_kernels.value_scores import cpu as value_scores_cpu
from kvcompress_kernels.value_scores import value_scores_of_rows
from kvcompress_kernels.window_scores import cpu as window_scores_cpu
from kvcompress_kernels.window_scores import window_scores_of_rows
from kvcompress_kernels.window_scores.result import Outputs
from vllm_kvcompress.planning.memory import layers_per_batch

CHUNK = 10  # tokens per ChunkKV chunk
EVERY = 4  # layers between two of DynamicKV's updates
RTOL, ATOL = 1e-4, 1e-6  # float tolerance against the reference, as in the kernel tests
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op with inputs from a prompt or a decode step.

    Args:
        launch: runs the op for the layers of one launch and returns its outputs.
        read_outputs: returns the outputs of an op that writes to memory it was given.
        reference: returns the outputs of the op's `cpu.py`; `reference.py` would take days here.
        layers_per_launch: number of layers that one launch takes.
        exact: True if every bit must equal the reference's.
        inputs: the type of the inputs.
        floor_bytes: bytes that all layers must move; 0 if arithmetic is the floor.
        floor_flops: tensor-core operations that all layers must do; 0 if bytes are the floor.
        goal: minimum ratio of floor time to measured time.
        tie_share: share of outputs that may differ because rounding decides ties.
    """

    name: str
    launch: Callable[[Any, range], Tensors]
    reference: Callable[[Any, range], Tensors]
    layers_per_launch: Callable[[Shape], int]
    read_outputs: Callable[[Any], Tensors] | None = None
    exact: bool = False
    inputs: type[Prompt] | type[DecodeStep] = Prompt
    floor_bytes: Callable[[Shape], int] = lambda shape: 0
    floor_flops: Callable[[Shape], int] = lambda shape: 0
    goal: float | None = None
    tie_share: float = 0.0

    def launches(self, shape: Shape) -> list[range]:
        """Return the layers of each launch."""
        num_layers, per_launch = shape.layers, self.layers_per_launch(shape)
        starts = range(0, num_layers, per_launch)
        return [range(start, min(start + per_launch, num_layers)) for start in starts]


def tensors(outputs: Any) -> Tensors:
    """Return the tensors of an op's result, without the optional outputs that are None."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [x for x in outputs if x is not None]


def layer_op(name: str, op: Any, reference: Any, args: Any, **more: Any) -> Op:
    """Return an op with one launch per layer; its reference takes the same positional arguments."""
    options = more.pop("options", {})
    return Op(
        name=name,
        launch=lambda p, layers: tensors(op(*args(p, layers[0]), **options)),
        reference=lambda p, layers: tensors(reference(*args(p, layers[0]), *options.values())),
        layers_per_launch=lambda shape: 1,
        **more,
    )


def window_op(
    name: str, *, variance: bool = False, maximum: bool = False, pooled: bool = False
) -> Op:
    """Return a window-score op whose launches share as many layers as the engine's do."""
    outputs = Outputs(variance, maximum, pooled)

    def inputs(p: Prompt, layers: range) -> tuple[Any, ...]:
        queries, pages = (x[layers.start : layers.stop] for x in (p.query, p.pages))
        return queries, p.keys, pages, p.shape.tokens, p.scale

    def launch(p: Prompt, layers: range) -> Tensors:
        return tensors(window_scores_of_rows(*inputs(p, layers), **outputs._asdict()))

    def reference(p: Prompt, layers: range) -> Tensors:
        query, keys, pages, tokens, scale = inputs(p, layers)
        read, index = pages.unique(return_inverse=True)
        arguments = query.cpu(), keys[read].cpu(), index.cpu(), tokens, scale, None, outputs
        return [x.to(query.device) for x in tensors(window_scores_cpu.run_rows(*arguments))]

    return Op(
        name=name,
        launch=launch,
        reference=reference,
        layers_per_launch=lambda shape: layers_per_batch(shape.longest, shape.tokens),
        **_ONCE,
    )


_ONCE: dict[str, Any] = {"floor_bytes": keys_once, "goal": 0.8}


def prompt_op(name: str, launch: Any, reference: Any, **more: Any) -> Op:
    """Return an op that takes all layers in one launch and must match its reference bit for bit."""
    common: dict[str, Any] = {"layers_per_launch": lambda shape: shape.layers, "exact": True}
    return Op(name=name, launch=launch, reference=reference, **common, **more)


# -- one launch per layer ----------------------------------------------------------------------


def one(layer: int) -> slice:
    """Return the row of one layer."""
    return slice(layer, layer + 1)


def value_args(p: Prompt, layer: int) -> tuple[Any, ...]:
    return p.weights[None], p.values, p.pages[one(layer)], p.shape.tokens


def value_reference(*arguments: Any) -> torch.Tensor:
    *inputs, fast, reduce = arguments
    no_lengths = None
    return value_scores_cpu.run_rows(*(*inputs, no_lengths, fast, reduce))


def norm_args(p: Prompt, layer: int) -> tuple[Any, ...]:
    return p.values, p.pages[one(layer)], p.shape.tokens


def cosine_args(p: Prompt, layer: int) -> tuple[Any, ...]:
    return p.keys, p.pages[one(layer)], p.shape.tokens


def lag_op(name: str, sinks: int, lag: int) -> Op:
    def fitting_lag(tokens: int) -> int:
        """Return `lag`, or less if a dry run's prompt is too short for two partitions."""
        return min(lag, (tokens - sinks) // 4)

    def launch(p: Prompt, layers: range) -> Tensors:
        inputs = p.keys, p.values, p.pages[one(layers[0])], p.shape.tokens
        return [lag_scores_of_rows(*inputs, sinks=sinks, lag=fitting_lag(p.shape.tokens))]

    def reference(p: Prompt, layers: range) -> Tensors:
        size = fitting_lag(p.shape.tokens)
        parts = (p.shape.tokens - sinks) // size - 1
        inputs = p.keys, p.values, p.pages[one(layers[0])]
        return [lag_scores_cpu.run_rows(*inputs, parts, sinks, size)]

    floor: dict[str, Any] = {"floor_bytes": lambda shape: 2 * keys_once(shape)}
    return Op(
        name=name, launch=launch, reference=reference, layers_per_launch=lambda shape: 1, **floor
    )


def column_args(p: Prompt, layer: int) -> tuple[Any, ...]:
    return p.chunk_query, p.keys, p.pages[layer], p.shape.tokens, p.scale


def merge_args(p: Prompt, layer: int) -> tuple[Any, ...]:
    row, block = one(layer), p.shape.block
    # The engine always keeps the window, so this is the minimum of every layer.
    kept_tokens, min_kept = p.counts[row] * block, -(-p.shape.window // block) * block
    return p.keys, p.values, p.pages[row], p.shape.tokens, p.kept[row], kept_tokens, min_kept


# -- one launch for all layers -----------------------------------------------------------------


def ranked(p: Prompt) -> tuple[torch.Tensor, int, torch.Tensor, int]:
    """Return scores as rows, their valid columns, and kept tokens: per layer, and the maximum."""
    return p.scores.flatten(0, 1), p.shape.tokens, p.counts * p.shape.block, p.kept.shape[2]


def select_launch(p: Prompt, _: range) -> Tensors:
    scores, columns, keep, max_kept = ranked(p)
    return [select(scores, columns, keep.repeat_interleave(p.shape.kv_heads), max_kept)]


def select_reference(p: Prompt, _: range) -> Tensors:
    scores, columns, keep, max_kept = ranked(p)
    keep = keep.repeat_interleave(p.shape.kv_heads)
    none = torch.zeros_like(keep)
    return [select_cpu.run(scores, none + columns, keep, max_kept, none, none)]


def chunks_launch(p: Prompt, _: range) -> Tensors:
    return [select_chunks(*ranked(p), size=CHUNK, heads=p.shape.kv_heads)]


def chunks_reference(p: Prompt, _: range) -> Tensors:
    scores, columns, keep, max_kept = ranked(p)
    lengths = torch.full_like(keep, columns)
    return [select_cpu.chunks(scores, lengths, keep, max_kept, CHUNK, p.shape.kv_heads)]


def counted(p: Prompt) -> tuple[torch.Tensor, int, int]:
    """Return the scores, how many of them all layers keep, and the layers between two updates."""
    return p.prompt_scores, p.shape.kv_heads * p.shape.block * sum(p.shape.counts), EVERY


def move_launch(p: Prompt, _: range) -> Tensors:
    cache = p.keys, p.values
    move_kept(*cache, p.pages, p.kept, p.counts, p.targets, into=cache)
    return []


def moved(p: Prompt) -> Tensors:
    """Return the contents of the target pages."""
    pages = filled(p, p.targets)
    return p.keys[pages], p.values[pages]


def move_reference(p: Prompt, _: range) -> Tensors:
    """Return the target pages' expected contents, moved to a separate pool."""
    targets = torch.arange(p.targets.numel(), device=p.device).view_as(p.targets)
    pools = tuple(x.new_empty(targets.numel(), *x.shape[1:]) for x in (p.keys, p.values))
    move_kept_cpu.run(p.keys, p.values, p.pages, p.kept, p.counts, targets, *pools)
    pages = filled(p, targets)
    return [x[pages] for x in pools]


def filled(p: Prompt, pages: torch.Tensor) -> torch.Tensor:
    """Return the pages of ``[L, max_kept]`` that the layers fill, as one tensor."""
    return torch.cat([row[:n] for row, n in zip(pages, p.shape.counts, strict=True)])


def tables_launch(step: DecodeStep, _: range) -> Tensors:
    page_tables(*step.block_args, *step.request_args, step.tables, step.lengths)
    return []


def read_tables(step: DecodeStep) -> Tensors:
    return covered(step, step.tables, step.lengths)


def tables_reference(step: DecodeStep, _: range) -> Tensors:
    tables, lengths = torch.zeros_like(step.tables), torch.zeros_like(step.lengths)
    page_tables_cpu.run(*step.block_args, *step.request_args, tables, lengths)
    return covered(step, tables, lengths)


def covered(step: DecodeStep, tables: torch.Tensor, lengths: torch.Tensor) -> Tensors:
    """Return the page ids within each length, and the lengths; later entries are not defined."""
    column = torch.arange(tables.shape[2], device=tables.device)
    return tables.where(column * step.block < lengths[..., None], -1), lengths


# -- the list ----------------------------------------------------------------------------------

_VALUES = value_scores_of_rows, value_reference, value_args
_NORMS = value_norms_of_rows, value_norms_cpu.run_rows, norm_args
_COSINES = key_cosines_of_rows, key_cosines_cpu.run_rows, cosine_args
_COLUMNS = column_sums, column_sums_cpu.run, column_args


def merged(
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    kept: torch.Tensor,
    counts: torch.Tensor,
    min_kept: int,
) -> Merged:
    """Run `cpu.py` of `merge_evicted` for a prompt without earlier evictions."""
    lengths, beta = torch.full_like(counts, tokens), 0.7
    threshold = torch.full(kept.shape[:2], torch.nan, device=kept.device)
    arguments = keys, values, pages, tokens, kept, counts, min_kept
    return merge_evicted_cpu.run(*arguments, False, lengths, threshold, beta)


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
    prompt_op("select", select_launch, select_reference, floor_bytes=scores_once),
    prompt_op("select_chunks", chunks_launch, chunks_reference, floor_bytes=scores_once),
    prompt_op(
        "count_highest",
        lambda p, _: [count_highest(*counted(p))],
        lambda p, _: [count_highest_cpu.run(*counted(p))],
        floor_bytes=scores_once,
    ),
    prompt_op(
        "move_kept",
        move_launch,
        move_reference,
        read_outputs=moved,
        floor_bytes=kept_twice,
        goal=0.8,
    ),
    layer_op("merge_evicted", *_MERGE, floor_flops=cosines, tie_share=1e-3),
    prompt_op(
        "page_tables, a decode step",
        tables_launch,
        tables_reference,
        read_outputs=read_tables,
        inputs=DecodeStep,
        floor_bytes=tables_twice,
    ),
)


def mismatch(op: Op, got: Tensors, expected: Tensors) -> float:
    """Return the share of elements that differ from the reference, for the worst output."""
    if [x.shape for x in got] != [x.shape for x in expected]:
        return 1.0
    shares = [0.0]
    for a, b in zip(got, expected, strict=True):
        same = a == b if op.exact else torch.isclose(a, b, rtol=RTOL, atol=ATOL)
        shares.append(1.0 - float(same.double().mean()) if same.numel() else 0.0)
    return max(shares)
