"""Prompts in a page pool, as the engine's cache on a GPU holds them, for all kernels at once.

A row is one layer of one request: to a kernel, a layer is only other page ids. So a step that
compresses has ``layers * requests`` rows, and every kernel takes them in one call.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a problem; what is not given is that of Llama-3.1-8B.

    Args:
        tokens: of the longest prompt.
        chunk: last tokens whose queries `column_sums` gets.
        budget: share of a prompt that is kept, rounded down to pages.
        token_major: whether a block holds ``[block, Hkv, 2 D]``, vLLM's choice on CUDA, or
            ``[Hkv, block, 2 D]``.
        spare: pages before those of the problem; with many of them, offsets pass 2**31 elements.
        ragged: whether the prompts differ in length.
    """

    layers: int = 32
    requests: int
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 16
    window: int = 32
    chunk: int = 2048
    budget: float = 0.1
    dtype: torch.dtype = torch.bfloat16
    token_major: bool = True
    spare: int = 3
    ragged: bool = False

    @property
    def rows(self) -> int:
        return self.layers * self.requests

    @property
    def kept_pages(self) -> int:
        """Pages that the longest prompt keeps."""
        return self.pages_of(self.tokens)

    def pages_of(self, tokens: int) -> int:
        return max(int(self.budget * tokens) // self.block, 1)


# -- floors ------------------------------------------------------------------------------------


def once(shape: Shape) -> int:
    """Bytes of K, or of V, of all rows."""
    return shape.rows * shape.tokens * shape.kv_heads * shape.dim * shape.dtype.itemsize


def moved(shape: Shape) -> int:
    """Bytes of the kept pages, read and written."""
    page = shape.block * shape.kv_heads * 2 * shape.dim * shape.dtype.itemsize
    return 2 * shape.rows * shape.kept_pages * page


def ranked(shape: Shape) -> int:
    """Bytes of the scores."""
    return 4 * shape.rows * shape.kv_heads * shape.tokens


def tabled(shape: Shape) -> int:
    """Bytes of the columns that a compressed batch reads and writes, a page id in each."""
    return 2 * 4 * shape.rows * shape.kept_pages


def attended(shape: Shape) -> int:
    """Operations of one causal ``Q K^T``; sums of normalised rows need it twice, counted once."""
    count = min(shape.chunk, shape.tokens)
    seen = count * shape.tokens - count * (count - 1) // 2
    return 2 * shape.rows * shape.heads * shape.dim * seen


def compared(shape: Shape) -> int:
    """Operations of the cosines of every evicted key with every kept one."""
    kept = shape.kept_pages * shape.block
    return 2 * shape.rows * shape.kv_heads * shape.dim * kept * (shape.tokens - kept)


# -- inputs ------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """Arguments of `page_tables_into`, in its order."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    packed: torch.Tensor
    num_packed: torch.Tensor
    first_block: torch.Tensor
    layer_offset: torch.Tensor
    block_stride: int
    block_size: int
    slots: torch.Tensor
    live: torch.Tensor
    out_tables: torch.Tensor
    out_lengths: torch.Tensor


class Problem:
    """Random inputs of every kernel.

    Args:
        poison: fill everything that no kernel may read with NaN: pages of nobody, and the last
            page behind a prompt's end.
    """

    def __init__(self, shape: Shape, device: torch.device, seed: int, *, poison: bool) -> None:
        self.shape, self.device = shape, device
        self.scale = shape.dim**-0.5
        self._random = torch.Generator(device).manual_seed(seed)
        self.tokens = [shape.tokens - (37 * n if shape.ragged else 0) for n in range(shape.rows)]
        self.lengths = self._ints(self.tokens)
        self._lay_out(poison)
        self.query = self._normal(shape.rows, shape.window, shape.heads, shape.dim).mul_(1.5)
        self.weights = self._weights()
        self.chunks = [min(shape.chunk, tokens) for tokens in self.tokens]
        self.starts = self._ints([0, *torch.tensor(self.chunks).cumsum(0).tolist()])
        self.chunk_query = self._normal(sum(self.chunks), shape.heads, shape.dim)
        self.counts = self._ints([shape.pages_of(tokens) for tokens in self.tokens])
        self.kept = self._kept()
        self.scores = self._scores()
        self.columns = self.lengths.repeat_interleave(shape.kv_heads)
        self.keep = (self.counts * shape.block).repeat_interleave(shape.kv_heads)
        self.tables = self._tables()

    @property
    def keys(self) -> torch.Tensor:
        """``[pages, Hkv, D, block]``, a view of the pool, as the ops get it."""
        return self._per_head[..., : self.shape.dim].transpose(2, 3)

    @property
    def values(self) -> torch.Tensor:
        """``[pages, Hkv, block, D]``, likewise."""
        return self._per_head[..., self.shape.dim :]

    @property
    def _per_head(self) -> torch.Tensor:
        return self.pool.transpose(1, 2) if self.shape.token_major else self.pool

    def move(self, device: torch.device) -> None:
        """To another device."""
        self.device = device
        for name, x in vars(self).items():
            if isinstance(x, torch.Tensor):
                setattr(self, name, x.to(device))
        tables = (x.to(device) if isinstance(x, torch.Tensor) else x for x in self.tables)
        self.tables = Tables(*tables)

    def prompt_pages(self, row: int) -> torch.Tensor:
        return self.pages[row, : -(-self.tokens[row] // self.shape.block)]

    def kept_of(self, row: int) -> torch.Tensor:
        """``[Hkv, n]`` int64."""
        count = self.shape.pages_of(self.tokens[row]) * self.shape.block
        return self.kept[row, :, :count].long()

    def keys_of(self, row: int) -> torch.Tensor:
        """``[Hkv, S, D]`` float64."""
        keys = self.keys[self.prompt_pages(row)].permute(1, 0, 3, 2).flatten(1, 2)
        return keys[:, : self.tokens[row]].double()

    def values_of(self, row: int) -> torch.Tensor:
        """``[Hkv, S, D]`` float64."""
        values = self.values[self.prompt_pages(row)].permute(1, 0, 2, 3).flatten(1, 2)
        return values[:, : self.tokens[row]].double()

    # -- how it is made ------------------------------------------------------------------------

    def _ints(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def _normal(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        out = torch.empty(size, dtype=dtype or self.shape.dtype, device=self.device)
        return out.normal_(generator=self._random)

    def _lay_out(self, poison: bool) -> None:
        """The pool, and which pages of it are whose."""
        shape = self.shape
        width, most = -(-shape.tokens // shape.block), shape.kept_pages
        taken = shape.rows * (width + most)
        ids = torch.randperm(taken, generator=self._random, device=self.device) + shape.spare
        self.pages = ids[: shape.rows * width].view(shape.rows, width)
        self.destination = ids[shape.rows * width :].view(shape.rows, most)
        inner = (
            (shape.block, shape.kv_heads) if shape.token_major else (shape.kv_heads, shape.block)
        )
        size = (shape.spare + taken, *inner, 2 * shape.dim)
        self.pool = torch.empty(size, dtype=shape.dtype, device=self.device)
        if not poison:
            self.pool.normal_(generator=self._random)
            return
        self.pool.fill_(torch.nan)
        for row, tokens in enumerate(self.tokens):
            pages = self.prompt_pages(row)
            self.pool[pages] = self._normal(len(pages), *size[1:])
            used = tokens - (len(pages) - 1) * shape.block
            self.keys[pages[-1], :, :, used:] = torch.nan
            self.values[pages[-1], :, used:] = torch.nan
            self.pages[row, len(pages) :] = 0

    def _weights(self) -> torch.Tensor:
        """``[N, Hq, S]`` float32, rows of sum 1 over each prompt's tokens."""
        shape = self.shape
        logits = self._normal(shape.rows, shape.heads, shape.tokens, dtype=torch.float32)
        for row, tokens in enumerate(self.tokens):
            logits[row] *= 1.5
            logits[row, :, tokens:] = -torch.inf
            logits[row] = logits[row].softmax(-1)
        return logits

    def _kept(self) -> torch.Tensor:
        """``[N, Hkv, most]`` int32 random positions, ascending, other ones for each head."""
        shape = self.shape
        kept = torch.zeros(
            *(shape.rows, shape.kv_heads, shape.kept_pages * shape.block),
            dtype=torch.int32,
            device=self.device,
        )
        for row, tokens in enumerate(self.tokens):
            count = shape.pages_of(tokens) * shape.block
            luck = self._normal(shape.kv_heads, tokens, dtype=torch.float32)
            kept[row, :, :count] = luck.topk(count).indices.sort().values
        return kept

    def _scores(self) -> torch.Tensor:
        """``[N * Hkv, S]`` float32 with many ties, sums of which are exact."""
        rows = self.shape.rows * self.shape.kv_heads
        return self._normal(rows, self.shape.tokens, dtype=torch.float32).mul_(64).round_().div_(64)

    def _tables(self) -> Tables:
        """A decode step: all requests but each fourth are compressed, and have 5 more tokens."""
        shape = self.shape
        new = 5
        width = -(-(shape.tokens + new) // shape.block)
        blocks = shape.requests * width + 1  # block 0 is nobody's
        ids = torch.randperm(blocks - 1, generator=self._random, device=self.device) + 1
        first = [0 if r % 4 == 3 else shape.tokens // shape.block for r in range(shape.requests)]
        most = shape.kept_pages
        packed = (shape.requests, shape.layers, most)
        counts = torch.randint(
            max(most // 2, 1), most + 1, packed[:2], generator=self._random, device=self.device
        )
        counts *= (self._ints(first) > 0)[:, None]
        out = torch.zeros(
            shape.layers, shape.requests, width, dtype=torch.int32, device=self.device
        )
        return Tables(
            block_table=ids.int().view(shape.requests, width),
            seq_lens=self._ints([shape.tokens + new] * shape.requests),
            packed=torch.randint(
                shape.layers * blocks, packed, generator=self._random, device=self.device
            ).int(),
            num_packed=counts.int(),
            first_block=self._ints(first),
            layer_offset=self._ints([layer * blocks for layer in range(shape.layers)]),
            block_stride=1,
            block_size=shape.block,
            slots=self._ints(list(range(shape.requests))),
            live=self._ints([shape.requests]).view(()),
            out_tables=out,
            out_lengths=out.new_zeros(shape.layers, shape.requests),
        )
