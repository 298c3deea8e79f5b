"""Memory layouts of CPU_ATTN's kernels: detection, packing, and an engine on tiles."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops

from amx_layout import offsets, pretend_amx, pretend_no_amx
from checkpoints import tokens
from engines import BLOCK, engine, settings
from kvcompress_kernels.window_scores import window_scores_of_rows
from kvcompress_kernels.window_scores.kernel_numba import key_reader, score_worker
from processor import needs_avx512
from quantised import FLOAT8
from vllm_kvcompress.engine.compression.tiled_mover import TiledMover
from vllm_kvcompress.engine.pages.layouts import Strided, Tiled, find_layout, read
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads

HEADS = 3


def kernels(isa: str, stored: str = "auto"):
    """Return a writer that calls vLLM's kernel; its page has uint8 elements if it stores float8."""

    def write(keys, values, page):
        _, heads, block, width = page.shape
        halves = page.view(1, heads, 2 * block, width // 2).chunk(2, dim=2)
        slots = torch.arange(block)
        ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa, kv_cache_dtype=stored)

    return write


def table_writer(keys_at: torch.Tensor, values_at: torch.Tensor):
    """Return a writer that stores element (t, d) at the offsets in the tables ``[block, D]``."""

    def write(keys, values, page):
        for head, elements in enumerate(page[0].flatten(1)):
            elements[keys_at], elements[values_at] = keys[:, head], values[:, head]

    return write


def detect(write, block, dim, dtype=torch.float32, stored=None):
    return find_layout(
        write,
        block_size=block,
        kv_heads=HEADS,
        head_dim=dim,
        dtype=dtype,
        name="test",
        stored=stored,
    )


def check_round_trip(layout, write, block, dim, dtype) -> None:
    """Check that `layout` reads pages written by `write`, and packs pages as `write` does."""
    tokens = torch.randn(5, 2, block, HEADS, dim).to(dtype)
    # the pool's pages are not contiguous
    pool = torch.full((9, HEADS + 1, block, 2 * dim), torch.nan, dtype=dtype)[:, 1:]
    pages = torch.tensor([7, 0, 3, 8, 4])
    for (keys, values), page in zip(tokens, pages, strict=True):
        part = torch.zeros(1, HEADS, block, 2 * dim, dtype=dtype)
        write(keys, values, part)
        pool[page] = part[0]
    keys, values = read(layout, pool, pages)
    assert torch.equal(keys, tokens[:, 0].permute(0, 2, 3, 1))
    assert torch.equal(values, tokens[:, 1].transpose(1, 2))
    if isinstance(layout, Tiled):
        index, slot = (torch.randint(n, (HEADS, 41)) for n in (len(pages), block))
        head = torch.arange(HEADS)[:, None]
        single_tokens = layout.tokens(pool, pages[index], slot)
        for actual, part in zip(single_tokens, (keys.mT, values), strict=True):
            assert torch.equal(actual, part[index, head, slot])
        targets = torch.tensor([2, 6, 1, 5])
        layout.pack(pool, targets, keys[1:], values[1:].mT.contiguous().mT)
        assert torch.equal(pool[targets], pool[pages[1:]])
        empty = torch.empty(HEADS, 0, dim, dtype=dtype).unflatten(1, (0, block)).transpose(0, 1)
        layout.pack(pool, pages[:0], empty.mT, empty)
        layout.pack(pool, pages[:0], *read(layout, pool, pages[:0]))
        assert not pool.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("block", "dim"), [(32, 32), (128, 64), (96, 96), (512, 128)])
@pytest.mark.parametrize("isa", ["vec", "vec16", pytest.param("amx", marks=needs_avx512)])
def test_layout_of_vllms_kernels(isa, block, dim, dtype):
    layout = detect(kernels(isa), block, dim, dtype)
    assert isinstance(layout, Tiled if isa == "amx" else Strided)
    check_round_trip(layout, kernels(isa), block, dim, dtype)


@needs_avx512
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("block", "dim"), [(32, 32), (128, 64), (512, 128)])
@pytest.mark.parametrize("name", FLOAT8)
@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_layout_of_vllms_float8_kernels(isa, name, block, dim, dtype):
    stored = FLOAT8[name]
    layout = detect(kernels(isa, name), block, dim, dtype, stored)
    assert isinstance(layout, Tiled if isa == "amx" else Strided)
    tokens = torch.randn(2, block, HEADS, dim).to(stored)
    pages = torch.zeros(3, HEADS, block, 2 * dim, dtype=torch.uint8)
    keys, values = tokens.to(dtype)
    kernels(isa, name)(keys, values, pages[1:2])
    keys, values = read(layout, pages.view(stored), torch.tensor([1]))
    for part, expected in zip((keys[0].mT, values[0]), tokens.transpose(1, 2), strict=True):
        assert torch.equal(part.to(dtype), expected.to(dtype))


def test_windows_are_scored_in_tiles_like_in_copies_of_their_keys():
    """Only methods that read no more than the window leave the keys in their tiles."""
    block, dim = 32, 16
    keys_at, values_at = offsets(block, dim)
    write = table_writer(keys_at, block * dim + values_at)
    layout = detect(write, block, dim, torch.bfloat16)
    assert isinstance(layout, Tiled)
    caches = torch.zeros(2, 6, HEADS, block, 2 * dim, dtype=torch.bfloat16)
    for page in caches.flatten(0, 1):
        write(*torch.randn(2, block, HEADS, dim).bfloat16(), page[None])
    pool = PagePool([*caches], max_requests=1, max_rows=1, max_blocks=6, block_size=block)
    mover, pages = TiledMover(pool, layout), torch.tensor([[3, 0, 5], [7, 10, 6]])
    query, results = torch.randn(2, 4, 2 * HEADS, dim), []
    for reads in (Reads.WINDOW, Reads.WINDOW | Reads.KEYS):
        keys, _, indices, places = mover.open(pages, reads)
        assert (places is None) == (Reads.KEYS in reads)
        options = {"variance": True, "maximum": True, "offsets": places}
        results.append(window_scores_of_rows(query, keys, indices, 90, 0.3, **options))
    for in_tiles, in_copies in zip(*results, strict=True):
        assert torch.equal(in_tiles, in_copies)


def test_no_request_waits_for_the_compiler(model):
    """The engine compiles the scoring code when it starts, or loads it from numba's cache."""
    functions = key_reader, score_worker
    for function in functions:
        function.cache_clear()
    with engine(model, additional_config=settings("cake", 0.3)) as llm:
        assert [function.cache_info().misses for function in functions] == [1, 1]
        packed = llm.watch_packing(lambda done: done.pack_request.tokens)
        llm.generate([tokens(300, seed=1)], 2)
        assert packed == [300]
        assert [function.cache_info().misses for function in functions] == [1, 1]
        assert all(function.cache_info().hits for function in functions)


@needs_avx512
def test_amx_pages_follow_the_documented_formulas():
    block, dim, page = 64, 96, torch.zeros(1, 1, 64, 192, dtype=torch.bfloat16)
    keys, values = torch.randn(2, block, 1, dim, dtype=torch.bfloat16)
    kernels("amx")(keys, values, page)
    keys_at, values_at = offsets(block, dim)
    elements = page.flatten()
    assert torch.equal(elements[keys_at], keys[:, 0])
    assert torch.equal(elements[block * dim :][values_at], values[:, 0])


@st.composite
def products(draw):
    """Draw a layout of K and V as digits of t and d in any order in memory."""
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
def test_any_mixed_radix_layout_is_detected(product, dtype):
    block, dim, tables = product
    write = table_writer(*tables)
    check_round_trip(detect(write, block, dim, dtype), write, block, dim, dtype)


def random_offsets():
    places = torch.randperm(32 * 8, generator=torch.Generator().manual_seed(5)).view(2, 16, 8)
    return table_writer(*places)


def overlapping_values():
    keys, values = torch.arange(2 * 16 * 8).view(2, 16, 8)
    return table_writer(keys, values // 2 * 2)


def different_heads():
    keys, values = torch.arange(2 * 16 * 8).view(2, 16, 8)
    same = table_writer(keys, values)

    def write(k, v, page):
        same(k, v, page)
        page[0, 1] = page[0, 1].roll(1)

    return write


def rounded_keys():
    keys, values = torch.arange(2 * 16 * 8).view(2, 16, 8)
    same = table_writer(keys, values)
    return lambda k, v, page: same((k * 128).round() / 128, v, page)


@pytest.mark.parametrize(
    "writer", [random_offsets, overlapping_values, different_heads, rounded_keys]
)
def test_unknown_layout_is_rejected(writer):
    """Also if the kernel changes elements, as a scale or a smaller dtype would."""
    message = r"the layout in which the kernels 'test' store .* page of 16 tokens"
    with pytest.raises(ConfigError, match=message):
        detect(writer(), 16, 8)


PROMPTS = [tokens(n, seed=n) for n in (700, 333, 161)]
# These methods read or move tokens in different ways. The engine's default, tova, merges values.
# The pool "in place" only fits one prompt.
METHODS = ("cake", "d2o", "h2o", "caote", "chunkkv", "keydiff", "tova")
LONGEST = len(PROMPTS[0]) + 8
POOLS = {
    "fresh": (METHODS, PROMPTS, 80),
    "in place": (
        ("cake", "d2o", "tova"),
        PROMPTS[:1],
        1 + -(-LONGEST // BLOCK),
    ),
}


@needs_avx512
@pytest.mark.parametrize("pool", POOLS)
def test_tiled_and_strided_layouts_generate_the_same_outputs(pool, model, monkeypatch):
    """With chunked prefill and the prefix cache; packs in place if the pool fits one prompt."""
    methods, prompts, blocks = POOLS[pool]
    outputs = {}
    for kind, pretend in (("vectors", pretend_no_amx), ("tiles", pretend_amx)):
        pretend(monkeypatch)
        with engine(
            model,
            blocks=blocks,
            dtype="bfloat16",
            additional_config=settings("tova", 0.4, allow_override="all", merge="values"),
            max_num_batched_tokens=150,
            max_num_seqs=4,
            max_model_len=LONGEST,
        ) as llm:
            assert isinstance(llm.compressor.packer.mover, TiledMover) == (kind == "tiles")
            in_place = llm.watch_packing(lambda done: done.pack_request.in_place)
            outputs[kind] = [
                llm.generate(prompts, 6, extra_args={"kv_compress": name} if name else None)
                for name in methods
            ]
            # With this budget the tail contains the window, so no layer keeps a page.
            outputs[kind] += [llm.generate(prompts[-1:], 6, extra_args={"kv_budget": 0.01})]
            num_requests = len(prompts) * len(methods)
            assert in_place == [*[pool == "in place"] * num_requests, False]
    assert outputs["tiles"] == outputs["vectors"]


@needs_avx512
def test_repacking_generates_the_same_outputs_on_tiled_and_strided_layouts(model, monkeypatch):
    """Packs outputs, and a prompt in pieces whose last piece has a tail."""
    outputs, overrides = {}, [{"kv_compress": name} for name in ("cake-chunk", "d2o")]
    bounds = {"decode_budget": 64, "decode_interval": BLOCK, "max_whole": 350, "piece": 4 * BLOCK}
    config = settings("cake-chunk", 0.3, allow_override="d2o", **bounds)
    for kind, pretend in (("vectors", pretend_no_amx), ("tiles", pretend_amx)):
        pretend(monkeypatch)
        with engine(
            model,
            blocks=1 + 64,  # few, because the AMX stand-in copies all pages for each layer
            dtype="bfloat16",
            additional_config=config,
            max_num_seqs=4,
            max_model_len=512,
        ) as llm:
            packed = llm.watch_repacking()
            prompts = [PROMPTS[1][:300], PROMPTS[2][:20], PROMPTS[0][:405]]
            outputs[kind] = [llm.generate(prompts, 80, extra_args=method) for method in overrides]
            assert len({name.split("-")[0] for name in packed}) == 6
    assert outputs["tiles"] == outputs["vectors"]
