"""Triton kernels of `count_highest`: radix search for the threshold of every update at once.

Scores become unsigned integers of the same order. The search finds the lowest score that an update
counts, one 8-bit digit at a time from the top. For each of the four digits:

1. `_histogram_kernel`, per tile of scores of a layer: the histogram of the digit, for each update
   that knows the layer, over the scores that match the update's digits so far. Histograms of tiles
   are added to those of their layer by atomics. The first histogram is the same for all updates.
2. `_narrow_kernel`, per update: finds the digit of the lowest counted score, and adds the scores
   with a higher digit to their layers' counts. The kernel also clears the histograms of the next
   digit.

The scores are read four times, however many updates there are. All numbers are integers, so the
result does not depend on the order of additions. 32 layers of 8 heads and 8,192 tokens make 512
programs, and their 8 MiB of scores are read from L2 after the first time.
"""

import torch
import triton
import triton.language as tl

from kvcompress_kernels.builds import Build
from kvcompress_kernels.radix_triton import BINS, BITS, digit_at, matches_prefix, sortable_bits32

TILE = 4096
"""Scores per program of `_histogram_kernel`."""
WARPS = 8
"""Warps per program of `_histogram_kernel`."""
ROWS = 16
"""Histograms that `_narrow_kernel` loads at a time."""
TOP = 32 - BITS.value
"""Shift of the first digit."""
_VARY = ["columns", "layers", "layers_per_update", "updates", "shift"]
"""Integers that differ by prompt, model or launch. Triton would specialise for some values."""


@triton.jit(do_not_specialize=_VARY)  # type: ignore[untyped-decorator]
def _histogram_kernel(  # type: ignore[no-untyped-def]
    scores,
    prefixes,
    histograms,
    columns,
    layers,
    layers_per_update,
    updates,
    shift,
    TILE: tl.constexpr,
):
    """Add the histograms of one tile to ``histograms [U, N, BINS]`` int32.

    `prefixes` holds the digits that each update has found so far. They have no effect on the first
    digit.
    """
    layer = tl.program_id(1)
    shift = shift.to(tl.uint32)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    live = column < columns
    scores += layer.to(tl.int64) * columns
    key = sortable_bits32(tl.load(scores + column, mask=live, other=0.0))
    digit = digit_at(key, shift)
    histograms += layer * BINS + tl.arange(0, BINS)
    s_update = layers.to(tl.int64) * BINS
    for update in range(layer // layers_per_update, updates):
        prefix = tl.load(prefixes + update).to(tl.uint32)
        found = tl.histogram(digit, BINS, mask=live & matches_prefix(key, prefix, shift))
        tl.atomic_add(histograms + update * s_update, found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=["keep", "rows", *_VARY])  # type: ignore[untyped-decorator]
def _narrow_kernel(  # type: ignore[no-untyped-def]
    histograms,
    next_histograms,
    prefixes,
    remaining,
    counts,
    keep,
    layers,
    layers_per_update,
    shift,
    rows,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find the next digit of one update, and add the scores above it to ``counts [U, N]``.

    `rows` is the distance between the histograms of two updates, in histograms: N, or 0 if all
    updates share theirs. `next_histograms` ``[U, N, BINS]`` becomes 0.

    `remaining` holds the number of scores that each update must still count, among the scores that
    match its digits so far. The last digit completes the threshold. Scores that equal it are
    counted from the first layer on until none is left to count.
    """
    update = tl.program_id(0).to(tl.int64)
    known = tl.minimum((update + 1) * layers_per_update, layers)
    histograms += update * rows * BINS
    next_histograms += update * layers * BINS
    counts += update * layers
    is_first, is_last = shift == TOP, shift == 0
    prefix = tl.where(is_first, 0, tl.load(prefixes + update))
    to_count = tl.where(is_first, keep.to(tl.int64) * known // layers, tl.load(remaining + update))
    bins = tl.arange(0, BINS)

    total = tl.zeros([BINS], tl.int64)
    for start in range(0, known, ROWS):
        layer = start + tl.arange(0, ROWS)
        at = layer[:, None] * BINS + bins[None, :]
        found = tl.load(histograms + at, mask=(layer < known)[:, None], other=0)
        total += tl.sum(found.to(tl.int64), 0)
    # Scores in each bin and above. If nothing remains to be counted, the top digit is chosen, and
    # no score exceeds it.
    reached = tl.cumsum(total, 0, reverse=True) >= to_count
    digit = tl.sum(reached.to(tl.int32), 0) - 1
    to_count -= tl.sum(tl.where(bins > digit, total, 0), 0)

    ties_left = to_count
    for start in range(0, layers, ROWS):
        layer = start + tl.arange(0, ROWS)
        at = layer[:, None] * BINS + bins[None, :]
        found = tl.load(histograms + at, mask=(layer < known)[:, None], other=0)
        tl.store(next_histograms + at, tl.zeros_like(found), mask=(layer < layers)[:, None])
        above = tl.sum(tl.where((bins > digit)[None, :], found, 0), 1).to(tl.int64)
        tied = tl.sum(tl.where((bins == digit)[None, :] & is_last, found, 0), 1).to(tl.int64)
        ties_before = tl.cumsum(tied, 0) - tied
        counted_ties = tl.minimum(tied, tl.maximum(ties_left - ties_before, 0))
        before = tl.load(counts + layer, mask=(layer < layers) & (is_first == 0), other=0)
        tl.store(counts + layer, before + above + counted_ties, mask=layer < layers)
        ties_left -= tl.sum(tied, 0)
    tl.store(prefixes + update, prefix | (digit.to(tl.int64) << shift))
    tl.store(remaining + update, to_count)


def run(scores: torch.Tensor, keep: int, layers_per_update: int) -> torch.Tensor:
    layers, columns = scores.shape
    updates = triton.cdiv(layers, layers_per_update)
    counts = torch.empty(updates, layers, dtype=torch.int64, device=scores.device)
    if not scores.numel():
        return counts.zero_()
    prefixes, remaining = counts.new_empty(updates), counts.new_empty(updates)
    size = (2, updates, layers, BINS.value)
    histograms, next_histograms = counts.new_empty(size, dtype=torch.int32)
    # All updates share the first histograms, as one update that knows all layers.
    histograms[0].zero_()
    rows, steps = 0, (layers, layers, 1)
    for shift in range(TOP, -1, -BITS.value):
        _histogram_kernel[triton.cdiv(columns, TILE), layers](
            scores, prefixes, histograms, columns, *steps, shift, TILE, num_warps=WARPS
        )
        arrays = histograms, next_histograms, prefixes, remaining, counts
        _narrow_kernel[(updates,)](*arrays, keep, layers, layers_per_update, shift, rows, TOP, ROWS)
        histograms, next_histograms = next_histograms, histograms
        rows, steps = layers, (layers, layers_per_update, updates)
    return counts


def builds(sm: int) -> list[Build]:
    """Return the builds of both kernels."""
    types = dict(scores="*fp32", histograms="*i32", next_histograms="*i32")
    types |= dict(prefixes="*i64", remaining="*i64", counts="*i64")
    return [
        Build(
            name=f"count_highest {step}",
            kernel=kernel,
            config=config,
            types=types,
            # A layer may have an odd number of scores, so the next layer is not aligned.
            wide_loads=kernel is _narrow_kernel,
        )
        for step, kernel, config in (
            ("histogram", _histogram_kernel, dict(TILE=TILE, num_warps=WARPS)),
            ("narrow", _narrow_kernel, dict(TOP=TOP, ROWS=ROWS)),
        )
    ]
