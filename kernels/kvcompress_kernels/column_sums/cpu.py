"""Torch code of `column_sums` for a CPU: float32, blocks of rows times all keys they can see.

The exponentials of a block stay in its buffer until the row sums are known. The column sums are
then one product with the reciprocal row sums. ``exp`` runs without subtracting the row maximum; a
block whose sums over- or underflow is repeated with it.

Keys of more than `KEYS` bytes are read in spans, in two passes: the first computes each row's LSE,
the second repeats QK^T for the sums. This bounds the memory for any prompt length.

Even and odd positions are separate batches, so that there are two per KV head. A model with three
KV heads would otherwise run three products and leave one of two threads idle a quarter of the time.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

ROWS = 32
"""Maximum number of query positions in a block."""
LOGITS = 8 << 20
"""Maximum bytes of one block's logits, unless 8 rows need more."""
KEYS = 24 << 20
"""Maximum bytes of float32 keys in memory."""
SAFE = 1e-20, 1e30
"""Row sums in this range are far from overflow and have lost no significant term."""


class _Tile(NamedTuple):
    """A block of R query rows and n key columns of each parity: ``[2, Hq, R, n]`` logits.

    Args:
        rows: query rows.
        columns: columns of the sums.
        q: queries ``[2 * Hkv, G * R, D]``.
        k: scaled keys ``[2 * Hkv, D, n]``.
        future: ``[2, 1, R, m]``, causal mask of the last m columns: True if the key is after the
            row.
        buffer: memory for the logits ``[2 * Hkv, G * R, n]``.
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
    # Without sinks, exp(-inf) adds nothing to the row sums.
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
            tile_lse = lse[:, tile.rows]
            tile_lse.copy_(torch.logaddexp(tile_lse, _log_sum(tile)))
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
    """Yield the tiles in which every row sees at least one key."""
    count, heads, dim = query.shape
    kv_heads, block = key_pages.shape[1], key_pages.shape[3]
    past, group = tokens - count, heads // kv_heads
    half = min(span, tokens + tokens % 2) // 2
    rows = min(max(LOGITS // (8 * heads * half), 8), ROWS, count)
    for start in range(0, tokens, span):
        at = start + torch.arange(2 * half, device=query.device).view(half, 2).T  # [2, half]
        # Columns past the prompt are masked in every row, so they may read any token.
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
    """Return ``exp`` of the logits, up to one factor per row, and the row sums ``[Hq, R]``.

    Args:
        tile: block of rows and keys.
        sink: ``[Hq, 1]`` sink logits, which the sums include.
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
    """Return the logsumexp of each row over the tile's keys, ``[Hq, R, 1]``."""
    x = tile.logits()
    tile.fill_future(x, -torch.inf)
    top = x.amax(-1, keepdim=True).amax(0)
    return top + x.sub_(top).exp_().sum(-1, keepdim=True).sum(0).log_()
