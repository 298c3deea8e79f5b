"""CPU form of `column_sums`: float32, blocks of rows against all the keys they can see.

The exponentials of a block stay in its buffer until their row sums are known; the columns' shares
are then one product with the reciprocal sums. ``exp`` needs no row maximum unless a sum over- or
underflows: such a block is done again with it. Keys that outgrow `KEYS` are read span by span,
after a pass of their own for each row's LSE: a second QK^T, and memory bounded for any prompt.

Even and odd positions are separate batches, two per KV head: three products would leave one of two
threads idle for a quarter of the time.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

ROWS = 32
"""Query positions in a block, at most."""
LOGITS = 8 << 20
"""Bytes of one block's logits, unless 8 rows take more."""
KEYS = 24 << 20
"""Bytes of float32 keys."""
SAFE = 1e-20, 1e30
"""Row sums in between lost no term that matters and are far from overflow."""


class _Tile(NamedTuple):
    """A block of R rows and its n key columns of either parity: ``[2, Hq, R, n]`` logits.

    Args:
        rows: of the query.
        columns: of the sums.
        q: ``[2 * Hkv, G * R, D]``.
        k: ``[2 * Hkv, D, n]``, scaled.
        future: ``[2, 1, R, m]``, whether the key is after the row, for the last m columns.
        buffer: ``[2 * Hkv, G * R, n]``.
    """

    rows: slice
    columns: slice
    q: torch.Tensor
    k: torch.Tensor
    future: torch.Tensor
    buffer: torch.Tensor

    def logits(self) -> torch.Tensor:
        x = torch.bmm(self.q, self.k, out=self.buffer)
        return x.view(2, -1, self.future.shape[2], x.shape[-1])

    def fill_future(self, x: torch.Tensor, value: float) -> None:
        x[..., x.shape[-1] - self.future.shape[-1] :].masked_fill_(self.future, value)


def run(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    count, heads, dim = query.shape
    # the logit of a sink that is not there
    sink = query.new_full((heads, 1), -torch.inf, dtype=torch.float32)
    sink = sink if sinks is None else sinks[:, None]
    span = 2 * max(KEYS // (8 * key_pages.shape[1] * dim), 1)

    def tiles() -> Iterator[_Tile]:
        return _tiles(query, key_pages, pages, tokens, scale, span)

    sums = query.new_zeros(2, heads, -(-tokens // 2), dtype=torch.float32)
    if tokens <= span:
        for tile in tiles():
            x, total = _exponentials(tile, sink)
            sums[..., tile.columns] += (total.reciprocal().unsqueeze(1) @ x).squeeze(2)
    else:
        lse = sink[:, None].repeat(1, count, 1)
        for tile in tiles():
            of = lse[:, tile.rows]
            of.copy_(torch.logaddexp(of, _log_sum(tile)))
        for tile in tiles():
            x = tile.logits().sub_(lse[:, tile.rows]).exp_()
            tile.fill_future(x, 0.0)
            sums[..., tile.columns] += x.sum(2)
    return sums.permute(1, 2, 0).flatten(1)[:, :tokens].contiguous()


def _tiles(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    pages: torch.Tensor,
    tokens: int,
    scale: float,
    span: int,
) -> Iterator[_Tile]:
    """Every tile that holds a key some row can see; every row of a tile sees one of its keys."""
    count, heads, dim = query.shape
    kv_heads, block = key_pages.shape[1], key_pages.shape[3]
    past, group = tokens - count, heads // kv_heads
    half = min(span, tokens + tokens % 2) // 2
    rows = min(max(LOGITS // (8 * heads * half), 8), ROWS, count)
    for start in range(0, tokens, span):
        at = start + torch.arange(2 * half, device=query.device).view(half, 2).T  # [2, half]
        # AttentionStats past the prompt are in every row's future, so any token may stand for them.
        token = at.clamp_max(tokens - 1)
        k = key_pages[pages[token // block], :, :, token % block].permute(0, 2, 3, 1)
        k = k.float().contiguous().mul_(scale).view(2 * kv_heads, dim, half)
        buffer = query.new_empty(2 * heads * rows * half, dtype=torch.float32)
        for row in range(max(past, start), tokens, rows):
            stop = min(row + rows, tokens)
            n = min((stop - start + 1) // 2, half)
            first = min((row - start) // 2, n)
            q = query[row - past : stop - past].float().view(-1, kv_heads, group, dim)
            q = q.permute(1, 2, 0, 3).expand(2, -1, -1, -1, -1).reshape(2 * kv_heads, -1, dim)
            future = at[:, None, first:n] > torch.arange(row, stop, device=at.device)[:, None]
            yield _Tile(
                slice(row - past, stop - past),
                slice(start // 2, start // 2 + n),
                q,
                k[..., :n],
                future[:, None],
                buffer[: q[..., 0].numel() * n].view(2 * kv_heads, -1, n),
            )


def _exponentials(tile: _Tile, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``exp`` of the logits times a factor per row, and the row sums ``[Hq, R]``.

    Args:
        sink: ``[Hq, 1]`` logits that the sums include.
    """
    x = tile.logits().exp_()
    tile.fill_future(x, 0.0)
    total = x.sum(-1).sum(0) + sink.exp()
    low, high = total.aminmax()
    if not (low >= SAFE[0] and high <= SAFE[1]):
        x = tile.logits()
        tile.fill_future(x, -torch.inf)
        top = torch.maximum(x.amax(-1).amax(0), sink)
        x.sub_(top[..., None]).exp_()
        total = x.sum(-1).sum(0) + (sink - top).exp()
    return x, total


def _log_sum(tile: _Tile) -> torch.Tensor:
    """Log of the row sums ``[Hq, R, 1]`` of ``exp``."""
    x = tile.logits()
    tile.fill_future(x, -torch.inf)
    top = x.amax(-1, keepdim=True).amax(0)
    return top + x.sub_(top).exp_().sum(-1, keepdim=True).sum(0).log_()
