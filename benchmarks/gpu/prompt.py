"""Inputs for the op benchmarks: a prompt in a page pool as on a GPU, and a decode step.

Layers share one pool and differ only in their page ids. Each layer keeps a different number of
tokens, as with an allocator that gives the first layers more.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a prompt and its model. Defaults are those of Llama-3.1-8B.

    Args:
        tokens: prompt length in tokens.
        longest: maximum prompt length of the server in tokens.
        chunk: tokens of the last prefill chunk, whose queries `column_sums` gets.
        budget: share of the prompt that layers keep on average.
        token_major: True for blocks of ``[block, Hkv, 2 D]``, vLLM's layout on CUDA; False for
            ``[Hkv, block, 2 D]``.
        decoding: number of requests in a decode step, for the page tables.
    """

    layers: int = 32
    tokens: int
    longest: int = 131072
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 16
    window: int = 32
    chunk: int = 2048
    budget: float = 0.1
    dtype: torch.dtype = torch.bfloat16
    token_major: bool = True
    decoding: int = 64

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.block)

    @property
    def counts(self) -> list[int]:
        """Pages kept per layer: linear from 1.5 times the budget to 0.5 times."""
        steps = max(self.layers - 1, 1)
        shares = [self.budget * (1.5 - layer / steps) for layer in range(self.layers)]
        full = self.tokens // self.block
        return [min(max(int(share * self.tokens) // self.block, 1), full) for share in shares]

    @property
    def bytes(self) -> int:
        """Return the bytes of the prompt's pages and of the pages that kept tokens are moved to."""
        page = self.block * self.kv_heads * 2 * self.dim * self.dtype.itemsize
        return page * (self.layers * self.blocks + sum(self.counts))


# -- floors: minimum work of any implementation, for all layers of the prompt ------------------


def keys_once(shape: Shape) -> int:
    """Return the bytes of K, which are also the bytes of V."""
    return shape.layers * shape.tokens * shape.kv_heads * shape.dim * shape.dtype.itemsize


def kept_twice(shape: Shape) -> int:
    """Return the bytes of the kept pages, read and written."""
    page = shape.block * shape.kv_heads * 2 * shape.dim * shape.dtype.itemsize
    return 2 * sum(shape.counts) * page


def scores_once(shape: Shape) -> int:
    return 4 * shape.layers * shape.kv_heads * shape.tokens


def tables_twice(shape: Shape) -> int:
    """Return the bytes of page ids that a decode step of compressed requests reads and writes."""
    return 2 * 4 * shape.decoding * sum(shape.counts)


def causal_product(shape: Shape) -> int:
    """Return the operations of the chunk's causal ``Q K^T``.

    Column sums of the softmax compute it twice; the floor counts it once.
    """
    queries = min(shape.chunk, shape.tokens)
    pairs = queries * shape.tokens - queries * (queries - 1) // 2
    return 2 * shape.layers * shape.heads * shape.dim * pairs


def cosines(shape: Shape) -> int:
    """Return the operations of the cosines of every dropped key with every kept key."""
    kept = [count * shape.block for count in shape.counts]
    pairs = sum(n * (shape.tokens - n) for n in kept)
    return 2 * shape.kv_heads * shape.dim * pairs


# -- inputs ------------------------------------------------------------------------------------


class Prompt:
    """Random inputs for every op, with NaN after the prompt's end and in unused pages.

    Attributes:
        pages: ``[L, F]`` int64 page ids of the prompt's blocks.
        counts: ``[L]`` int32, pages that each layer keeps.
        max_pages: the maximum of `counts`.
        targets: ``[L, max_pages]`` int64 page ids that kept tokens are moved to.
        kept: ``[L, Hkv, max_pages * block]`` int32 kept positions, ascending, different per head.
        query: ``[L, w, Hq, D]`` queries of the observation window.
        chunk_query: ``[T, Hq, D]`` queries of the last chunk, the same for all layers.
        weights: ``[Hq, S]`` float32, each row sums to 1.
        scores: ``[L, Hkv, W]`` float32 with many ties, W a multiple of 16; NaN from S on.
        prompt_scores: ``[L, Hkv * S]``, the scores without the columns from S on.
    """

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        self.shape, self.device, self.scale = shape, device, shape.dim**-0.5
        self._random = torch.Generator(device).manual_seed(seed)
        self.counts = self.ints(shape.counts)
        self.max_pages = max(shape.counts)
        self._lay_out()
        self.query = self._normal(shape.layers, shape.window, shape.heads, shape.dim).mul_(1.5)
        queries = min(shape.chunk, shape.tokens)
        self.chunk_query = self._normal(queries, shape.heads, shape.dim)
        logits = self._normal(shape.heads, shape.tokens, dtype=torch.float32)
        self.weights = logits.mul_(1.5).softmax(-1)
        self.kept = self._kept()
        self.scores = self._scores()
        self.prompt_scores = self.scores[..., : shape.tokens].flatten(1).contiguous()

    @property
    def keys(self) -> torch.Tensor:
        """Return the key view ``[pages, Hkv, D, block]`` of the pool, as ops get it."""
        return self._per_head[..., : self.shape.dim].mT

    @property
    def values(self) -> torch.Tensor:
        """Return the value view ``[pages, Hkv, block, D]`` of the pool, as ops get it."""
        return self._per_head[..., self.shape.dim :]

    @property
    def _per_head(self) -> torch.Tensor:
        return self.pool.transpose(1, 2) if self.shape.token_major else self.pool

    def ints(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def _normal(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        out = torch.empty(size, dtype=dtype or self.shape.dtype, device=self.device)
        return out.normal_(generator=self._random)

    def _lay_out(self) -> None:
        """Create the pool and assign its pages to the prompt's blocks and to the targets."""
        shape, unused = self.shape, 3
        sources, targets = shape.layers * shape.blocks, shape.layers * self.max_pages
        order = torch.randperm(sources + targets, generator=self._random, device=self.device)
        order += unused
        self.pages = order[:sources].view(shape.layers, shape.blocks)
        self.targets = order[sources:].view(shape.layers, self.max_pages)
        inner = (shape.block, shape.kv_heads)
        inner = inner if shape.token_major else inner[::-1]
        size = (unused + len(order), *inner, 2 * shape.dim)
        self.pool = torch.full(size, torch.nan, dtype=shape.dtype, device=self.device)
        used = shape.tokens - (shape.blocks - 1) * shape.block
        for pages in self.pages:
            self.pool[pages] = self._normal(len(pages), *size[1:])
            self.keys[pages[-1], :, :, used:] = torch.nan
            self.values[pages[-1], :, used:] = torch.nan

    def _kept(self) -> torch.Tensor:
        shape = self.shape
        kept = self.ints([]).new_zeros(shape.layers, shape.kv_heads, self.max_pages * shape.block)
        for layer_kept, pages in zip(kept, shape.counts, strict=True):
            random_scores = self._normal(shape.kv_heads, shape.tokens, dtype=torch.float32)
            best = random_scores.topk(pages * shape.block).indices.sort().values
            layer_kept[:, : best.shape[1]] = best
        return kept

    def _scores(self) -> torch.Tensor:
        shape = self.shape
        width = -(-shape.tokens // 16) * 16
        scores = self._normal(shape.layers, shape.kv_heads, width, dtype=torch.float32)
        scores.mul_(64).round_().div_(64)
        scores[..., shape.tokens :] = torch.nan
        return scores


class DecodeStep:
    """Arguments of `page_tables` for `decoding` requests; every fourth one is not compressed."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        random = torch.Generator(device).manual_seed(seed)
        requests, width, new = shape.decoding, shape.blocks + 1, 5
        self.block = shape.block

        def ints(numbers: list[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        blocks = requests * width + 1  # block 0 is unused
        ids = torch.randperm(blocks - 1, generator=random, device=device).int() + 1
        first = [0 if r % 4 == 3 else shape.tokens // shape.block for r in range(requests)]
        size = (requests, shape.layers, max(shape.counts))
        packed = torch.randint(shape.layers * blocks, size, generator=random, device=device)
        layers = [layer * blocks for layer in range(shape.layers)]
        self.tables = ints([]).new_zeros(shape.layers, requests, width)
        self.lengths = self.tables.new_zeros(shape.layers, requests)
        self.block_args = (
            ids.view(requests, width),
            ints([shape.tokens + new] * requests),
            packed.int(),
            ints(shape.counts).expand(requests, -1) * (ints(first) > 0)[:, None],
            ints(first),
            ints(layers),
            1,
            shape.block,
        )
        self.request_args = ints(list(range(requests))), ints([requests]).view(())
