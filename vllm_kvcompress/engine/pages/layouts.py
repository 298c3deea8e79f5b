"""How K and V lie inside a page, per attention backend.

Above this file, keys are ``[N, Hkv, D, block_size]`` and values ``[N, Hkv, block_size, D]``. Where
a backend's layout is a strided view of that shape (`Strided`), ops read and write the cache itself.

CPU_ATTN's kernels differ by processor, and so do their layouts: `find_layout` reads them off, by
writing numbered tokens through vLLM's own kernel. The AMX kernels store tiles, in which a token has
no single stride, per KV head and page of bs tokens:

    K: offset(t, d) = (t // 16) * 16 * D  + (d // 2) * 32 + (t % 16) * 2 + d % 2
    V: offset(t, d) = (d // 16) * 16 * bs + (t // 2) * 32 + (d % 16) * 2 + t % 2

Such pages (`Tiled`) are unpacked whole before an op reads them, and written whole; the tokens that
are kept are read one by one. Pairs of elements move as one where they can; what each costs is in
benchmarks/bench_layouts.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_kvcompress.errors import ConfigError

PageViews = tuple[torch.Tensor, torch.Tensor]


class Opened(NamedTuple):
    """Some pages of the pool as ops read them."""

    keys: torch.Tensor
    """``[n, Hkv, D, bs]``."""
    values: torch.Tensor
    """``[n, Hkv, bs, D]``."""
    pages: torch.Tensor
    """The pages that were asked for, as they are numbered there."""


Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
Digits = tuple[tuple[int, int], ...]
"""An index in mixed radix, the fastest digit first: ``(values, stride in elements)`` of each."""

_RADIX, _FLOAT8_RADIX = 128, 8
"""Whole numbers below it are exact in every dtype of a cache; in those of one byte."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Strided:
    """K and V of all pages as two views, which ops read and write.

    Args:
        views: from pages ``[N, ...]``, any strides, to keys and values.
    """

    views: Callable[[torch.Tensor], PageViews]


def _halves_of_tokens(pages: torch.Tensor) -> PageViews:
    keys, values = pages.chunk(2, dim=-1)
    return keys.transpose(2, 3), values


INTERLEAVED = Strided(_halves_of_tokens)
"""FLASH_ATTN and TRITON_ATTN: pages ``[N, Hkv, block_size, 2 * D]``, any strides, K in the first
half of a token's row; heads or tokens outermost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Where K, or V, of one KV head lies in its part of a page.

    Element (t, d) lies at `start` plus its digits' strides times their values.
    """

    start: int
    tokens: Digits
    dims: Digits

    @property
    def strided(self) -> bool:
        """Whether tokens and dims have one stride each."""
        return len(self.tokens) == len(self.dims) == 1

    def view(self, pages: torch.Tensor) -> torch.Tensor:
        """``[N, Hkv, block_size, D]`` of pages ``[N, Hkv, ...]``, where `strided`."""
        (block, token_step), (dim, dim_step) = self.tokens[0], self.dims[0]
        return pages.as_strided(
            (*pages.shape[:2], block, dim),
            (*pages.stride()[:2], token_step, dim_step),
            pages.storage_offset() + self.start,
        )


class _Tiles:
    """Copies between a cache and ``[n, Hkv, block_size, D]``, of whole pages or of single tokens.

    Elements that are neighbours in memory on both sides move as one word.
    """

    def __init__(self, elements: Elements) -> None:
        self._start = elements.start
        self._by_token = any(step == 1 for _, step in elements.dims)
        inner, outer = elements.dims, elements.tokens
        if not self._by_token:
            inner, outer = outer, inner
        self._rows, self._columns = (math.prod(n for n, _ in axis) for axis in (outer, inner))
        self._tokens, self._dims = [*reversed(elements.tokens)], [*reversed(elements.dims)]
        self._digits = [*reversed(outer), *reversed(inner)]
        self._span = 1 + sum((n - 1) * step for n, step in self._digits)

    def _word(self, pages: torch.Tensor) -> int:
        """Elements that move as one."""
        run = next((n for n, step in self._digits if step == 1), 1)
        others = [step for _, step in self._digits if step != 1]
        aligned = math.gcd(run, self._start, self._span, *others, *pages.stride()[:2])
        aligned = math.gcd(aligned, pages.storage_offset())
        return math.gcd(aligned, 8 // pages.element_size())

    def _split(self, heads: torch.Tensor, word: int, digits: list[tuple[int, int]]) -> torch.Tensor:
        """Heads ``[n, Hkv, span]`` of words, one axis per digit."""
        sizes = [n // word if step == 1 else n for n, step in digits]
        steps = [1 if step == 1 else step // word for _, step in digits]
        return heads.as_strided(
            (*heads.shape[:2], *sizes), (*heads.stride()[:2], *steps), heads.storage_offset()
        )

    def _words(self, pages: torch.Tensor, word: int) -> torch.Tensor:
        """``[N, Hkv, span]``: this part of every page."""
        part = pages.as_strided(
            (*pages.shape[:2], self._span),
            (*pages.stride()[:2], 1),
            pages.storage_offset() + self._start,
        )
        return part.view(_WORDS[word * pages.element_size()])

    def unpack(self, pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """A copy ``[n, Hkv, block_size, D]`` of the pages `ids`; one of the last axes is dense."""
        word, shape = self._word(pages), (len(ids), pages.shape[1])
        tiles = self._split(self._words(pages, word)[ids], word, self._digits).contiguous()
        copy = tiles.view(pages.dtype).view(*shape, self._rows, self._columns)
        return copy if self._by_token else copy.mT

    def pack(self, pages: torch.Tensor, ids: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write the pages `ids` whole: the inverse of `unpack`; `tokens` in any strides."""
        if not len(ids):
            return  # no elements are contiguous in any strides, and not a word's then
        word = self._word(pages)
        cache = self._split(self._words(pages, word), word, self._digits)
        rows = (tokens if self._by_token else tokens.mT).contiguous()
        cache[ids] = rows.view(cache.dtype).view(len(ids), *cache.shape[1:])

    def tokens(self, pages: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """A copy ``[Hkv, n, D]`` of single tokens: page and slot of each ``[Hkv, n]`` int64."""
        word = self._word(pages) if self._by_token else 1
        cache = self._split(self._words(pages, word), word, self._tokens + self._dims)
        head = torch.arange(pages.shape[1])[:, None]
        place, digits = self._rows if self._by_token else self._columns, []
        for count, _ in self._tokens:
            place //= count
            digits.append(slots // place % count)
        return cache[ids, head, *digits].flatten(2).view(pages.dtype)


class Tiled:
    """K and V that no strided view can name: whole pages are copied out and in.

    Args:
        keys, values: where their elements lie.
    """

    def __init__(self, keys: Elements, values: Elements) -> None:
        self._keys, self._values = _Tiles(keys), _Tiles(values)

    def unpack_keys(self, pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """A copy ``[n, Hkv, D, block_size]`` of the keys in some pages.

        Args:
            pages: ``[N, Hkv, block_size, 2 * D]``, the last two axes contiguous.
            ids: ``[n]`` int64.
        """
        return self._keys.unpack(pages, ids).mT

    def unpack_values(self, pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """A copy ``[n, Hkv, block_size, D]`` of the values in some pages."""
        return self._values.unpack(pages, ids)

    def tokens(self, pages: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor) -> PageViews:
        """A copy of the keys and values ``[Hkv, n, D]`` of single tokens.

        Args:
            pages: as in `unpack_keys`.
            ids, slots: ``[Hkv, n]`` int64: the page of each token, and its place there.
        """
        return self._keys.tokens(pages, ids, slots), self._values.tokens(pages, ids, slots)

    def pack(
        self, pages: torch.Tensor, ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write the pages `ids` from keys and values of the unpacked shapes, any strides."""
        self._keys.pack(pages, ids, keys.mT)
        self._values.pack(pages, ids, values)


Layout = Strided | Tiled


@dataclass(frozen=True, slots=True)
class _Probe:
    """Writes numbers into a page by `write`, and finds where they arrived (`find_layout`).

    Args:
        shape: of the keys and the values, ``block_size, Hkv, D``.
    """

    write: Write
    shape: tuple[int, int, int]
    dtype: torch.dtype
    stored: torch.dtype | None

    def written(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write these keys and values into a page of zeros; its ``[Hkv, elements]``."""
        block_size, kv_heads, head_dim = self.shape
        raw = self.dtype if self.stored is None else torch.uint8
        page = torch.zeros(1, kv_heads, block_size, 2 * head_dim, dtype=raw)
        tensors = [x.to(self.dtype).expand(self.shape).contiguous() for x in (keys, values)]
        self.write(tensors[0], tensors[1], page)
        return page.view(self.stored or self.dtype)[0].flatten(1)

    def arrived(self, number: torch.Tensor) -> torch.Tensor:
        """Where each element of a head with this number is, by digits."""
        radix = _RADIX if self.stored is None else _FLOAT8_RADIX
        numbers, place = torch.zeros_like(self.written(number, number), dtype=torch.int64), 1
        while place <= int(number.max()):
            digit = number // place % radix
            numbers += self.written(digit, digit).to(self.dtype).long() * place
            place *= radix
        return numbers


def find_layout(
    write: Write,
    *,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    name: str,
    stored: torch.dtype | None = None,
) -> Layout:
    """The layout in which `write` leaves its tokens.

    Each element's token and dim are written as digits, and read where they arrived; then a page of
    random numbers must be found again bit for bit.

    Args:
        write: puts keys and values ``[block_size, Hkv, D]``, contiguous, into the slots of one page
            ``[1, Hkv, block_size, 2 * D]`` in order: of `dtype`, or bytes that are `stored`.
        dtype: of the keys and values that are written.
        name: what the kernels are called, for an error.
        stored: the float8 that a quantised cache holds, at a scale of 1; None for `dtype`.

    Raises:
        ConfigError: elements are missing, or no digits of t and d say where they lie.
    """
    shape = block_size, kv_heads, head_dim
    refused = ConfigError(
        f"--kv-compress must know how the kernels {name!r} store keys and values, and found no"
        f" order in a page of {block_size} tokens with head dim {head_dim} in {stored or dtype};"
        " serve without --kv-compress on this machine"
    )

    probe = _Probe(write, shape, dtype, stored)
    is_value = probe.written(torch.zeros(1), torch.ones(1)).to(dtype).long()
    token = probe.arrived(torch.arange(block_size)[:, None, None])
    number = (is_value * block_size + token) * head_dim + probe.arrived(torch.arange(head_dim))
    offset = number[0].argsort()
    every = torch.arange(2 * block_size * head_dim)
    if not bool((number == number[0]).all()) or not torch.equal(number[0][offset], every):
        raise refused
    keys, values = (_elements(part) for part in offset.view(2, block_size, head_dim))
    if keys is None or values is None:
        raise refused
    layout: Layout = Tiled(keys, values)
    if keys.strided and values.strided:
        layout = Strided(lambda pages: (keys.view(pages).mT, values.view(pages)))
    k, v = (
        torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(stored or dtype)
        for n in (0, 1)
    )
    page = probe.written(k, v).view(1, kv_heads, block_size, 2 * head_dim)
    if not _finds(layout, page, k, v, dtype):
        raise refused
    return layout


def _finds(
    layout: Layout, page: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> bool:
    """Whether a layout reads the keys and values ``[block_size, Hkv, D]`` that a page holds."""
    keys, values = read(layout, page, torch.zeros(1, dtype=torch.int64))
    found = (keys, k.permute(1, 2, 0)), (values, v.permute(1, 0, 2))
    return all(torch.equal(own[0].to(dtype), wanted.to(dtype)) for own, wanted in found)


def read(layout: Layout, pages: torch.Tensor, ids: torch.Tensor) -> PageViews:
    """A copy of the keys and values in some pages, whatever the layout."""
    if isinstance(layout, Strided):
        keys, values = layout.views(pages)
        return keys[ids], values[ids]
    return layout.unpack_keys(pages, ids), layout.unpack_values(pages, ids)


def _elements(offset: torch.Tensor) -> Elements | None:
    """`Elements` of offsets ``[block_size, D]``, if digits of t and d explain them all."""
    start = int(offset[0, 0])
    tokens, dims = _digits(offset[:, 0] - start), _digits(offset[0] - start)
    if tokens is None or dims is None:
        return None
    if not torch.equal(offset, offset[:, :1] + offset[:1] - start):
        return None
    return Elements(start=start, tokens=tokens, dims=dims)


def _digits(offset: torch.Tensor) -> Digits | None:
    """The digits that make ``offset[i]`` of i; ``offset[0]`` is 0."""
    digits: list[tuple[int, int]] = []
    while len(offset) > 1:
        step = int(offset[1])
        in_step = offset == step * torch.arange(len(offset))
        run = len(offset) if bool(in_step.all()) else int((~in_step).int().argmax())
        if len(offset) % run or not torch.equal(
            offset.view(-1, run), offset[::run, None] + offset[:run]
        ):
            return None
        digits.append((run, step))
        offset = offset[::run]
    return tuple(digits) or ((1, 1),)
