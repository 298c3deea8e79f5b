"""How CPU_ATTN's kernels store keys and values: found, unpacked, packed; an engine on tiles."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops

from amx_layout import offsets, pretend_amx, pretend_no_amx
from checkpoints import make, tokens
from engines import BLOCK, engine, settings
from processor import needs_avx512
from quantised import FLOAT8
from vllm_kvcompress.engine.compression.tiled_mover import TiledMover
from vllm_kvcompress.engine.pages.layouts import Strided, Tiled, find_layout, read
from vllm_kvcompress.errors import ConfigError

HEADS = 3


def kernels(isa: str, stored: str = "auto"):
    """vLLM's own kernel that writes tokens into a page, of bytes if it stores float8."""

    def write(keys, values, page):
        _, heads, block, width = page.shape
        halves = page.view(1, heads, 2 * block, width // 2).chunk(2, dim=2)
        where = *halves, torch.arange(block), isa
        ops.cpu_attn_reshape_and_cache(keys, values, *where, kv_cache_dtype=stored)

    return write


def by_table(keys_at: torch.Tensor, values_at: torch.Tensor):
    """A writer that puts element (t, d) where the tables ``[block, D]`` say."""

    def write(keys, values, page):
        for head, elements in enumerate(page[0].flatten(1)):
            elements[keys_at], elements[values_at] = keys[:, head], values[:, head]

    return write


def found(write, block, dim, dtype=torch.float32, stored=None):
    return find_layout(
        write,
        block_size=block,
        kv_heads=HEADS,
        head_dim=dim,
        dtype=dtype,
        name="test",
        stored=stored,
    )


def comes_back(layout, write, block, dim, dtype) -> None:
    """What `write` left is read; what is packed lies as `write` would have left it."""
    given = torch.randn(5, 2, block, HEADS, dim).to(dtype)
    # pages of a pool have whatever strides the pool's layout gives them
    pool = torch.full((9, HEADS + 1, block, 2 * dim), torch.nan, dtype=dtype)[:, 1:]
    where = torch.tensor([7, 0, 3, 8, 4])
    for (keys, values), page in zip(given, where, strict=True):
        part = torch.zeros(1, HEADS, block, 2 * dim, dtype=dtype)
        write(keys, values, part)
        pool[page] = part[0]
    keys, values = read(layout, pool, where)
    assert torch.equal(keys, given[:, 0].permute(0, 2, 3, 1))
    assert torch.equal(values, given[:, 1].transpose(1, 2))
    if isinstance(layout, Tiled):
        at, slot = (torch.randint(n, (HEADS, 41)) for n in (len(where), block))
        head = torch.arange(HEADS)[:, None]
        for got, x in zip(layout.tokens(pool, where[at], slot), (keys.mT, values), strict=True):
            assert torch.equal(got, x[at, head, slot])
        to = torch.tensor([2, 6, 1, 5])
        layout.pack(pool, to, keys[1:], values[1:].mT.contiguous().mT)
        assert torch.equal(pool[to], pool[where[1:]])
        none = torch.empty(HEADS, 0, dim, dtype=dtype).unflatten(1, (0, block)).transpose(0, 1)
        layout.pack(pool, where[:0], none.mT, none)
        layout.pack(pool, where[:0], *read(layout, pool, where[:0]))
        assert not pool.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("block", "dim"), [(32, 32), (128, 64), (96, 96), (512, 128)])
@pytest.mark.parametrize("isa", ["vec", "vec16", pytest.param("amx", marks=needs_avx512)])
def test_vllms_own_kernels(isa, block, dim, dtype):
    layout = found(kernels(isa), block, dim, dtype)
    assert isinstance(layout, Tiled if isa == "amx" else Strided)
    comes_back(layout, kernels(isa), block, dim, dtype)


@needs_avx512
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("block", "dim"), [(32, 32), (128, 64), (512, 128)])
@pytest.mark.parametrize("name", FLOAT8)
@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_vllms_own_kernels_of_bytes(isa, name, block, dim, dtype):
    stored = FLOAT8[name]
    layout = found(kernels(isa, name), block, dim, dtype, stored)
    assert isinstance(layout, Tiled if isa == "amx" else Strided)
    given = torch.randn(2, block, HEADS, dim).to(stored)
    pages = torch.zeros(3, HEADS, block, 2 * dim, dtype=torch.uint8)
    keys, values = given.to(dtype)
    kernels(isa, name)(keys, values, pages[1:2])
    got = read(layout, pages.view(stored), torch.tensor([1]))
    for part, want in zip((got[0][0].mT, got[1][0]), given.transpose(1, 2), strict=True):
        assert torch.equal(part.to(dtype), want.to(dtype))


@needs_avx512
def test_amx_pages_are_the_tiles_of_the_formulas():
    block, dim, page = 64, 96, torch.zeros(1, 1, 64, 192, dtype=torch.bfloat16)
    keys, values = torch.randn(2, block, 1, dim, dtype=torch.bfloat16)
    kernels("amx")(keys, values, page)
    keys_at, values_at = offsets(block, dim)
    elements = page.flatten()
    assert torch.equal(elements[keys_at], keys[:, 0])
    assert torch.equal(elements[block * dim :][values_at], values[:, 0])


@st.composite
def products(draw):
    """Digits of t and d of K and V, in any order in memory."""
    axes = []
    for axis in ("kt", "kd", "vt", "vd"):
        lengths = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3))
        axes.append([(axis, n) for n in lengths])
    block, dim = (math.prod(n for _, n in axis) for axis in axes[:2])
    for i, size in ((2, block), (3, dim)):
        axes[i] = [("vt" if i == 2 else "vd", size)]
    orders = [draw(st.permutations(a + b)) for a, b in (axes[:2], axes[2:])]
    tables = []
    for start, order in zip((0, block * dim), orders, strict=True):
        table, step = torch.full((block, dim), start), 1
        index = {"t": torch.arange(block)[:, None], "d": torch.arange(dim)}
        for axis, n in order:
            table = table + index[axis[1]] % n * step
            index[axis[1]] = index[axis[1]] // n
            step *= n
        tables.append(table)
    return block, dim, tables


@given(products(), st.sampled_from([torch.bfloat16, torch.float32]))
@hypothesis_settings(max_examples=60, derandomize=True, deadline=None)
def test_any_product_of_digits_is_found(product, dtype):
    block, dim, tables = product
    write = by_table(*tables)
    comes_back(found(write, block, dim, dtype), write, block, dim, dtype)


def no_order():
    places = torch.randperm(32 * 8, generator=torch.Generator().manual_seed(5)).view(2, 16, 8)
    return by_table(*places)


def lost():
    keys, values = torch.arange(2 * 16 * 8).view(2, 16, 8)
    return by_table(keys, values // 2 * 2)


def heads_that_differ():
    keys, values = torch.arange(2 * 16 * 8).view(2, 16, 8)
    same = by_table(keys, values)

    def write(k, v, page):
        same(k, v, page)
        page[0, 1] = page[0, 1].roll(1)

    return write


def rounded():
    keys, values = torch.arange(2 * 16 * 8).view(2, 16, 8)
    same = by_table(keys, values)
    return lambda k, v, page: same((k * 128).round() / 128, v, page)


@pytest.mark.parametrize("writer", [no_order, lost, heads_that_differ, rounded])
def test_what_has_no_order_is_refused(writer):
    """Elements that arrive changed too: a scale, a smaller dtype."""
    with pytest.raises(ConfigError, match=r"how the kernels 'test' store .* page of 16 tokens"):
        found(writer(), 16, 8)


PROMPTS = [tokens(n, seed=n) for n in (700, 333, 161)]
# each reads or moves in its own way; the engine's own is tova, and merges values alone
METHODS = ("cake", "d2o", "h2o", "caote", "chunkkv", "keydiff", "tova")
LONGEST = len(PROMPTS[0]) + 8
POOLS = {
    "fresh": (METHODS, PROMPTS, 80),
    "in place": (("cake", "d2o", "tova"), PROMPTS[:1], 1 + -(-LONGEST // BLOCK)),  # it just fits
}


@needs_avx512
@pytest.mark.parametrize("pool", POOLS)
def test_an_engine_on_tiles_answers_as_one_on_vectors(pool, checkpoints_folder, monkeypatch):
    """Chunked, with the prefix cache; in place where the pool holds one prompt."""
    methods, prompts, blocks = POOLS[pool]
    answers = {}
    for kind, pretend in (("vectors", pretend_no_amx), ("tiles", pretend_amx)):
        pretend(monkeypatch)
        with engine(
            make("llama-gqa", checkpoints_folder),
            blocks=blocks,
            dtype="bfloat16",
            additional_config=settings("tova", 0.4, allow_override="all", merge="values"),
            max_num_batched_tokens=150,
            max_num_seqs=4,
            max_model_len=LONGEST,
        ) as llm:
            assert isinstance(llm.compressor.packer.mover, TiledMover) == (kind == "tiles")
            moved = llm.watch_packing(lambda done: done.pack_request.in_place)
            answers[kind] = [
                llm.generate(prompts, 6, extra_args={"kv_compress": name} if name else None)
                for name in methods
            ]
            # its tail holds the window: no layer keeps a page
            answers[kind] += [llm.generate(prompts[-1:], 6, extra_args={"kv_budget": 0.01})]
            asked = len(prompts) * len(methods)
            assert moved == [*[pool == "in place"] * asked, False]
    assert answers["tiles"] == answers["vectors"]


@needs_avx512
def test_what_is_packed_again_on_tiles_is_as_on_vectors(checkpoints_folder, monkeypatch):
    """Answers, and a prompt in pieces, the last of which has a tail."""
    answers, asked = {}, [{"kv_compress": name} for name in ("cake-chunk", "d2o")]
    bounds = {"decode_budget": 64, "decode_interval": BLOCK, "max_whole": 350, "piece": 4 * BLOCK}
    config = settings("cake-chunk", 0.3, allow_override="d2o", **bounds)
    for kind, pretend in (("vectors", pretend_no_amx), ("tiles", pretend_amx)):
        pretend(monkeypatch)
        with engine(
            make("llama-gqa", checkpoints_folder),
            blocks=1 + 64,  # all of whose pages the stand-in copies for each layer
            dtype="bfloat16",
            additional_config=config,
            max_num_seqs=4,
            max_model_len=512,
        ) as llm:
            packed = llm.watch_repacking()
            prompts = [PROMPTS[1][:300], PROMPTS[2][:20], PROMPTS[0][:405]]
            answers[kind] = [llm.generate(prompts, 80, extra_args=method) for method in asked]
            assert len({name.split("-")[0] for name in packed}) == 6
    assert answers["tiles"] == answers["vectors"]
