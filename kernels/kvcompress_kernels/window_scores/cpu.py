"""Torch code of `window_scores` for a CPU: float32, tiled over columns. It reads K once.

Pass 1 computes the logits, one tile at a time, and each row's maximum and sum. Pass 2 reads the
stored logits, ``Hq * w * S`` float32, and reduces them over the window. Tiles keep temporaries in
the processor's cache.

On a processor with AMX, pass 1 multiplies a bfloat16 cache in bfloat16. Products are exact and sums
are float32, so this loses no precision.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import pad

from kvcompress_kernels.window_scores.result import Outputs, WindowScores

TILE = 512
"""Columns of the prompt in one tile of logits."""


def run_rows(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float | torch.Tensor,
    lengths: torch.Tensor | None,
    outputs: Outputs,
    sinks: torch.Tensor | None = None,
    row_log_sums: torch.Tensor | None = None,
) -> WindowScores:
    """Score one row at a time, and pad shorter rows with 0.

    `row_log_sums` is unused, because the CPU code reads K once without it.
    """
    kv_heads, block, count = key_pages.shape[1], key_pages.shape[3], len(query)
    row_lengths = [tokens] * count if lengths is None else lengths.tolist()
    factors = scale.tolist() if isinstance(scale, torch.Tensor) else [scale] * count
    row_sinks = [None] * count if sinks is None else list(sinks)
    all_scores: list[WindowScores] = []
    for row_query, row_pages, length, factor, sink in zip(
        query, pages, row_lengths, factors, row_sinks, strict=True
    ):
        used = row_pages[: -(-length // block)]
        scores = _of_row(row_query, key_pages, used, length, factor, outputs, sink)
        if outputs.grouped:
            scores = _grouped(scores, kv_heads)
        padded = {
            name: pad(x, (0, tokens - length))
            for name, x in scores._asdict().items()
            if x is not None and name in ("total", "variance", "last", "maximum")
        }
        all_scores.append(scores._replace(**padded))
    return WindowScores(*(_stacked(parts) for parts in zip(*all_scores, strict=True)))


def _stacked(parts: Sequence[torch.Tensor | None]) -> Any:
    """Return the rows of one result as one tensor; None if the result was not requested."""
    return None if parts[0] is None else torch.stack(parts)  # type: ignore[arg-type]


def _grouped(scores: WindowScores, kv_heads: int) -> WindowScores:
    """Return one line per KV head.

    Means are computed in float64, so that equal columns have equal means whatever the order.
    """
    lines = {
        name: x.view(kv_heads, -1, x.shape[1])
        for name, x in scores._asdict().items()
        if x is not None and name not in ("entropy", "shift")
    }
    return scores._replace(
        **{
            name: x.amax(1) if name == "maximum" else x.mean(1, dtype=torch.float64).float()
            for name, x in lines.items()
        }
    )


def _of_row(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    outputs: Outputs,
    sinks: torch.Tensor | None,
) -> WindowScores:
    """Return the scores of one row, with one line per query head."""
    w, heads, _ = query.shape
    kv_heads, block = key_pages.shape[1], key_pages.shape[3]
    group, past = heads // kv_heads, tokens - w

    logits = _logits(query, key_pages, pages, tokens, scale, max(TILE // block, 1))
    _mask_future(logits, group, w, past)
    sink = None if sinks is None else sinks.view(kv_heads, group, 1).expand(-1, -1, w)
    log_sum = _log_sum(logits, sink).view(heads, w, 1)
    return _reduced([tile.view(heads, w, -1) for tile in logits], log_sum, past, outputs)


def _log_sum(logits: list[torch.Tensor], sink: torch.Tensor | None) -> torch.Tensor:
    """Return the logsumexp of each row over all tiles and its sink, ``[Hkv, G * w, 1]``."""
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
    logits: list[torch.Tensor], log_sum: torch.Tensor, past: int, outputs: Outputs
) -> WindowScores:
    """Reduce tiles of logits ``[Hq, w, columns]`` over the window. Pooling overwrites them."""
    heads, w, _ = log_sum.shape
    total = log_sum.new_empty(heads, past)
    recent = log_sum.new_empty(heads, w)
    variances = torch.empty_like(total) if outputs.variance else None
    last_row = log_sum.new_empty(heads, past + w) if outputs.last else None
    highest = log_sum.new_empty(heads, past + w) if outputs.maximum else None
    entropy = log_sum.new_zeros(())
    attention: list[torch.Tensor] = []
    end = 0
    for tile in logits:
        start, end = end, end + tile.shape[-1]
        if last_row is not None:
            last_row[:, start:end] = (tile[:, -1] - log_sum[:, -1]).exp_()
        if end > past:
            inside = (tile[..., max(past - start, 0) :] - log_sum).exp_()
            recent[:, max(start - past, 0) : end - past] = _over_rows(inside)
            if highest is not None:
                highest[:, max(start, past) : end] = inside.amax(1)
        stop = min(end, past)
        if stop <= start:
            continue
        log_a = tile[..., : stop - start] - log_sum
        a = log_a.exp()
        entropy -= torch.dot(a.reshape(-1), log_a.reshape(-1))
        column = _over_rows(a)
        total[:, start:stop] = column
        if outputs.pooled:
            attention.append(tile[..., : stop - start].copy_(a))
        elif highest is not None:
            highest[:, start:stop] = a.amax(1)
        if variances is not None:
            a -= (column / w).unsqueeze(1)
            variances[:, start:stop] = _over_rows(a.square_())
    if highest is not None and outputs.pooled:
        _pooled_maximum(attention, highest[:, :past])
    shift = torch.zeros_like(entropy)
    if variances is not None:
        variances /= w - 1
        shift = variances.sum()
    return WindowScores(total, variances, entropy, shift, recent, last_row, highest)


def _over_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum ``[heads, w, n]`` over the rows in the same order for every column.

    Equal columns must have equal sums, so that their tie goes to the lower position. The order of
    `torch.sum` differs between columns. Adding the halves of the rows pairwise also rounds less
    than adding one row at a time, so float32 is enough.
    """
    while (rows := x.shape[1]) > 1:
        half = x[:, : rows // 2] + x[:, rows // 2 : rows // 2 * 2]
        if rows % 2:
            half[:, 0] += x[:, -1]
        x = half
    return x[:, 0]


def _pooled_maximum(tiles: list[torch.Tensor], out: torch.Tensor) -> None:
    """Write the maximum over the pooled rows to `out` ``[heads, P]``.

    Each column counts five times in the sum of a pooled row, and columns next to an end count fewer
    times. So the sum follows from the row's sum and its four outermost columns.

    Args:
        tiles: attention to the past, ``[heads, w, columns]`` each. All tiles except the last have
            at least two columns.
        out: ``[heads, P]``.
    """
    first = torch.cat([tile[..., :2] for tile in tiles[:2]], dim=-1)
    final = torch.cat([tile[..., -2:] for tile in tiles[-2:]], dim=-1)
    lost = 2 * (first[..., 0] + final[..., -1])
    if out.shape[1] > 1:
        lost += first[..., 1] + final[..., -2]
    mass = torch.stack([tile.sum(-1) for tile in tiles]).sum(0)
    # A row without attention to the past has mass 0, and its columns are 0.
    factor = (mass / (5 * mass - lost).clamp_min(torch.finfo(mass.dtype).tiny))[..., None]
    start = 0
    for i, tile in enumerate(tiles):
        size = tile.shape[-1]
        before = tiles[i - 1][..., -2:] if i else tile[..., :0]
        after = tiles[i + 1][..., :2] if i + 1 < len(tiles) else tile[..., :0]
        padded = torch.cat([before, tile, after], dim=-1)
        padded = pad(padded, (2 - before.shape[-1], 2 - after.shape[-1]))
        # Every column adds in this order, so that equal columns stay equal.
        total = padded[..., :size] + padded[..., 1 : size + 1]
        for shift in (2, 3, 4):
            total += padded[..., shift : size + shift]
        out[:, start : start + size] = (total * factor).amax(1)
        start += size


def _logits(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    step: int,
) -> list[torch.Tensor]:
    """Return the scaled logits, one tile ``[Hkv, G * w, columns]`` for every `step` pages."""
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
        # Scale the sums, because a bfloat16 cannot hold the scaled query exactly.
        with _products_in_bfloat16():
            return [torch.baddbmm(k.new_empty(()), q, k, beta=0, alpha=scale) for k in keys]
    q = q * scale
    return [torch.matmul(q, k) for k in keys]


def multiplies_bfloat16() -> bool:
    """Return whether oneDNN can use the processor's bfloat16 matrix instructions (AMX)."""
    return torch.cpu._is_amx_tile_supported()


@contextmanager
def _products_in_bfloat16() -> Iterator[None]:
    """Let oneDNN round the operands of float32 products to bfloat16.

    Torch has no CPU matrix product that reads bfloat16 and writes float32. The rounding changes
    nothing here, because the operands are bfloat16 values.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _mask_future(logits: list[torch.Tensor], group: int, w: int, past: int) -> None:
    """Apply the causal mask to the window's own columns, in place. The past needs no mask."""
    start = 0
    for tile in logits:
        stop = start + tile.shape[-1]
        if stop > past:
            key = torch.arange(start, stop, device=tile.device)
            row = torch.arange(past, past + w, device=tile.device)
            tile.masked_fill_((key > row[:, None]).repeat(group, 1), -torch.inf)
        start = stop
