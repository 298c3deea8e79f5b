"""Memory layout of K and V in a page, for each attention backend.

The rest of the code uses keys ``[N, Hkv, D, block_size]`` and values ``[N, Hkv, block_size, D]``.
If a backend's layout is a strided view of these shapes (`Strided`), ops read and write the cache
directly.

CPU_ATTN's kernels and their layouts depend on the processor, so `find_layout` determines the layout
by writing numbered tokens through vLLM's own kernel. The AMX kernels store tiles, in which a token
has no single stride. For a KV head in a page of bs tokens:

    K: offset(t, d) = (t // 16) * 16 * D  + (d // 2) * 32 + (t % 16) * 2 + d % 2
    V: offset(t, d) = (d // 16) * 16 * bs + (t // 2) * 32 + (d % 16) * 2 + t % 2

`Tiled` pages are unpacked before an op reads them and are written page by page; kept tokens are
read one by one. Elements that are adjacent on both sides are copied as one wider word.
benchmarks/results/layouts_cpu_6000.json has these costs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvcompress_kernels.packed_attention import Offsets
from vllm_kvcompress.errors import ConfigError

PageViews = tuple[torch.Tensor, torch.Tensor]


class ReadablePages(NamedTuple):
    """Pages in a form that ops can read."""

    keys: torch.Tensor
    """``[n, Hkv, D, bs]``."""
    values: torch.Tensor
    """``[n, Hkv, bs, D]``."""
    pages: torch.Tensor
    """Indices of the requested pages in `keys` and `values`."""
    offsets: Offsets | None = None
    """Where a page stores K, if `keys` only has the shape and the start of each head's keys."""


Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
Digits = tuple[tuple[int, int], ...]
"""An index in mixed radix, fastest digit first: ``(number of values, stride in elements)`` each."""

_RADIX, _FLOAT8_RADIX = 128, 8
"""Integers below the radix are exact in every cache dtype; below the second, also in float8."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Strided:
    """A layout in which K and V of all pages are two strided views.

    Args:
        views: maps pages ``[N, ...]``, any strides, to views of their keys and values.
        offsets: where the elements of a head lie in a page; None if a token's row is its key, then
            its value.
    """

    views: Callable[[torch.Tensor], PageViews]
    offsets: Offsets | None = None


def _halves_of_tokens(pages: torch.Tensor) -> PageViews:
    keys, values = pages.chunk(2, dim=-1)
    return keys.transpose(2, 3), values


INTERLEAVED = Strided(_halves_of_tokens)
"""Layout of FLASH_ATTN and TRITON_ATTN: pages ``[N, Hkv, block_size, 2 * D]``.

K is the first half of a token's row. Strides are arbitrary: heads or tokens may be outermost.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Memory layout of K or V of one KV head in a page.

    The offset of element (t, d) is `start` plus the sum of each digit times its stride.

    Args:
        start: offset of element (0, 0).
        tokens: digits of the token index t.
        dims: digits of the head dim index d.
    """

    start: int
    tokens: Digits
    dims: Digits

    @property
    def strided(self) -> bool:
        """Return whether the token and dim indices have one stride each."""
        return len(self.tokens) == len(self.dims) == 1

    @property
    def token_offsets(self) -> torch.Tensor:
        """Return ``[block_size]`` int32: the offset of each token's element 0."""
        return self.start + _sums(self.tokens)

    @property
    def dim_offsets(self) -> torch.Tensor:
        """Return ``[D]`` int32: the offset of each element from its token's element 0."""
        return _sums(self.dims)

    def view(self, pages: torch.Tensor) -> torch.Tensor:
        """Return a view ``[N, Hkv, block_size, D]`` of pages ``[N, Hkv, ...]``; needs `strided`."""
        (block, token_step), (dim, dim_step) = self.tokens[0], self.dims[0]
        return pages.as_strided(
            (*pages.shape[:2], block, dim),
            (*pages.stride()[:2], token_step, dim_step),
            pages.storage_offset() + self.start,
        )


def _sums(digits: Digits) -> torch.Tensor:
    """Return int32: for each index, the sum of its digits times their strides."""
    sums = torch.zeros(1, dtype=torch.int32)
    for count, step in digits:
        sums = (torch.arange(count, dtype=torch.int32)[:, None] * step + sums).flatten()
    return sums


def _offsets(keys: Elements, values: Elements) -> Offsets:
    return Offsets(keys.token_offsets, keys.dim_offsets, values.token_offsets, values.dim_offsets)


class _Tiles:
    """Copies pages or single tokens between a cache and ``[n, Hkv, block_size, D]``.

    Elements that are adjacent in memory on both sides are copied as one word.
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
        """Return the number of elements that are copied as one word."""
        run = next((n for n, step in self._digits if step == 1), 1)
        other_steps = [step for _, step in self._digits if step != 1]
        aligned = math.gcd(run, self._start, self._span, *other_steps, *pages.stride()[:2])
        aligned = math.gcd(aligned, pages.storage_offset())
        return math.gcd(aligned, 8 // pages.element_size())

    def _split(self, heads: torch.Tensor, word: int, digits: list[tuple[int, int]]) -> torch.Tensor:
        """Return a view of heads ``[n, Hkv, span]`` of words with one axis per digit."""
        sizes = [n // word if step == 1 else n for n, step in digits]
        steps = [1 if step == 1 else step // word for _, step in digits]
        return heads.as_strided(
            (*heads.shape[:2], *sizes), (*heads.stride()[:2], *steps), heads.storage_offset()
        )

    def _words(self, pages: torch.Tensor, word: int) -> torch.Tensor:
        """Return K or V of every page as words ``[N, Hkv, span]``."""
        part = pages.as_strided(
            (*pages.shape[:2], self._span),
            (*pages.stride()[:2], 1),
            pages.storage_offset() + self._start,
        )
        return part.view(_WORDS[word * pages.element_size()])

    def unpack(self, pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return a copy ``[n, Hkv, block_size, D]`` of the pages `ids`.

        One of the last two axes has stride 1.
        """
        word, shape = self._word(pages), (len(ids), pages.shape[1])
        tiles = self._split(self._words(pages, word)[ids], word, self._digits).contiguous()
        copy = tiles.view(pages.dtype).view(*shape, self._rows, self._columns)
        return copy if self._by_token else copy.mT

    def pack(self, pages: torch.Tensor, ids: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write the pages `ids`, the inverse of `unpack`; `tokens` may have any strides."""
        if not len(ids):
            return  # An empty tensor counts as contiguous with strides that break `view(dtype)`.
        word = self._word(pages)
        cache = self._split(self._words(pages, word), word, self._digits)
        rows = (tokens if self._by_token else tokens.mT).contiguous()
        cache[ids] = rows.view(cache.dtype).view(len(ids), *cache.shape[1:])

    def tokens(self, pages: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return a copy ``[Hkv, n, D]`` of the tokens in pages `ids`, slots `slots`.

        Both are ``[Hkv, n]`` int64.
        """
        word = self._word(pages) if self._by_token else 1
        cache = self._split(self._words(pages, word), word, self._tokens + self._dims)
        head = torch.arange(pages.shape[1])[:, None]
        place_value, digits = self._rows if self._by_token else self._columns, []
        for count, _ in self._tokens:
            place_value //= count
            digits.append(slots // place_value % count)
        return cache[ids, head, *digits].flatten(2).view(pages.dtype)


class Tiled:
    """A layout without a strided view, so pages are read and written by copy.

    Args:
        keys, values: layout of their elements.
    """

    def __init__(self, keys: Elements, values: Elements) -> None:
        self._keys, self._values = _Tiles(keys), _Tiles(values)
        self.offsets = _offsets(keys, values)

    def heads_of_keys(self, pages: torch.Tensor) -> torch.Tensor:
        """Return a view ``[N, Hkv, D, block_size]`` of K in the order of memory.

        `offsets` has the true place of each element.
        """
        block, width = pages.shape[2:]
        shape = *pages.shape[:2], width // 2, block
        return pages.as_strided(shape, (*pages.stride()[:2], block, 1), pages.storage_offset())

    def unpack_keys(self, pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return a copy ``[n, Hkv, D, block_size]`` of the keys in the pages `ids`.

        Args:
            pages: ``[N, Hkv, block_size, 2 * D]``, the last two axes contiguous.
            ids: ``[n]`` int64.
        """
        return self._keys.unpack(pages, ids).mT

    def unpack_values(self, pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return a copy ``[n, Hkv, block_size, D]`` of the values in the pages `ids`."""
        return self._values.unpack(pages, ids)

    def tokens(self, pages: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor) -> PageViews:
        """Return copies of the keys and values ``[Hkv, n, D]`` of single tokens.

        Args:
            pages: as in `unpack_keys`.
            ids, slots: ``[Hkv, n]`` int64, the page of each token and its slot in that page.
        """
        return self._keys.tokens(pages, ids, slots), self._values.tokens(pages, ids, slots)

    def pack(
        self, pages: torch.Tensor, ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write the pages `ids` from keys and values in the unpacked shapes, any strides."""
        self._keys.pack(pages, ids, keys.mT)
        self._values.pack(pages, ids, values)


Layout = Strided | Tiled


@dataclass(frozen=True, slots=True)
class _Probe:
    """Writes numbers into a page with `write` and reads where they were stored (`find_layout`).

    Args:
        write, dtype, stored: as in `find_layout`.
        shape: shape of the keys and of the values, ``(block_size, Hkv, D)``.
    """

    write: Write
    shape: tuple[int, int, int]
    dtype: torch.dtype
    stored: torch.dtype | None

    def written(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Write keys and values into a page of zeros and return it as ``[Hkv, elements]``."""
        block_size, kv_heads, head_dim = self.shape
        raw = self.dtype if self.stored is None else torch.uint8
        page = torch.zeros(1, kv_heads, block_size, 2 * head_dim, dtype=raw)
        tensors = [x.to(self.dtype).expand(self.shape).contiguous() for x in (keys, values)]
        self.write(tensors[0], tensors[1], page)
        return page.view(self.stored or self.dtype)[0].flatten(1)

    def stored_numbers(self, number: torch.Tensor) -> torch.Tensor:
        """Write `number` as keys and values, digit by digit, and read it back.

        Returns:
            ``[Hkv, elements]`` int64: the number stored at each element of the page.
        """
        radix = _RADIX if self.stored is None else _FLOAT8_RADIX
        numbers, place_value = torch.zeros_like(self.written(number, number), dtype=torch.int64), 1
        while place_value <= int(number.max()):
            digit = number // place_value % radix
            numbers += self.written(digit, digit).to(self.dtype).long() * place_value
            place_value *= radix
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
    """Return the layout in which `write` stores keys and values.

    Writes the token and dim index of each element as digits and reads back where they were stored.
    Then checks that the layout reproduces a page of random numbers exactly.

    Args:
        write: writes contiguous keys and values ``[block_size, Hkv, D]`` to the slots of one page
            ``[1, Hkv, block_size, 2 * D]``, in order. The page has dtype `dtype`, or uint8 if
            `stored` is given.
        block_size: tokens in a page.
        kv_heads: KV heads of a layer.
        head_dim: head dim D.
        dtype: dtype of the written keys and values.
        name: name of the kernels, for the error message.
        stored: the float8 dtype of a quantised cache, at a scale of 1; None if the cache has
            `dtype`.

    Raises:
        ConfigError: an element is missing, or its offset is no mixed-radix function of t and d.
    """
    shape = block_size, kv_heads, head_dim
    unknown_layout = ConfigError(
        f"--kv-compress does not know the layout in which the kernels {name!r} store keys and"
        f" values in a page of {block_size} tokens with head dim {head_dim} in {stored or dtype};"
        " serve without --kv-compress on this machine"
    )

    probe = _Probe(write, shape, dtype, stored)
    is_value = probe.written(torch.zeros(1), torch.ones(1)).to(dtype).long()
    token = probe.stored_numbers(torch.arange(block_size)[:, None, None])
    dim = probe.stored_numbers(torch.arange(head_dim))
    number = (is_value * block_size + token) * head_dim + dim
    offset = number[0].argsort()
    all_numbers = torch.arange(2 * block_size * head_dim)
    if not bool((number == number[0]).all()) or not torch.equal(number[0][offset], all_numbers):
        raise unknown_layout
    keys, values = (_elements(part) for part in offset.view(2, block_size, head_dim))
    if keys is None or values is None:
        raise unknown_layout
    layout: Layout = Tiled(keys, values)
    if keys.strided and values.strided:
        layout = Strided(
            lambda pages: (keys.view(pages).mT, values.view(pages)), _offsets(keys, values)
        )
    k, v = (
        torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(stored or dtype)
        for n in (0, 1)
    )
    page = probe.written(k, v).view(1, kv_heads, block_size, 2 * head_dim)
    if not _reads_back(layout, page, k, v, dtype):
        raise unknown_layout
    return layout


def _reads_back(
    layout: Layout, page: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> bool:
    """Return whether `layout` reads keys and values ``[block_size, Hkv, D]`` back from `page`."""
    keys, values = read(layout, page, torch.zeros(1, dtype=torch.int64))
    pairs = (keys, k.permute(1, 2, 0)), (values, v.permute(1, 0, 2))
    return all(torch.equal(actual[0].to(dtype), expected.to(dtype)) for actual, expected in pairs)


def read(layout: Layout, pages: torch.Tensor, ids: torch.Tensor) -> PageViews:
    """Return copies of the keys and values in the pages `ids`, for any layout."""
    if isinstance(layout, Strided):
        keys, values = layout.views(pages)
        return keys[ids], values[ids]
    return layout.unpack_keys(pages, ids), layout.unpack_values(pages, ids)


def _elements(offset: torch.Tensor) -> Elements | None:
    """Return the `Elements` that produce `offset` ``[block_size, D]``; None if none do."""
    start = int(offset[0, 0])
    tokens, dims = _digits(offset[:, 0] - start), _digits(offset[0] - start)
    if tokens is None or dims is None:
        return None
    if not torch.equal(offset, offset[:, :1] + offset[:1] - start):
        return None
    return Elements(start=start, tokens=tokens, dims=dims)


def _digits(offset: torch.Tensor) -> Digits | None:
    """Return the digits of i that produce ``offset[i]``, or None; ``offset[0]`` is 0."""
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
