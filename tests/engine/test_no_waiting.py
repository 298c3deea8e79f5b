"""The step that ends a prefill launches its kernels and goes on: the host waits for nothing."""

import os

import pytest
import torch

from vllm_kvcompress.engine.compression import warm_up
from vllm_kvcompress.engine.compression.attention_adder import AttentionAdder
from vllm_kvcompress.engine.compression.compressor import PromptCompressor
from vllm_kvcompress.engine.compression.mover import StridedMover
from vllm_kvcompress.engine.compression.packer import Packer
from vllm_kvcompress.engine.compression.stages import Stages
from vllm_kvcompress.engine.pages import layouts as kv_layouts
from vllm_kvcompress.engine.pages import pool as page_pool
from vllm_kvcompress.engine.pages import query_ring, remembered
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.methods import attention as attention_module
from vllm_kvcompress.methods import method as method_module
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.presets import PRESETS
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import (
    adds_up,
    allocator_rows,
    merges,
    method_of,
    probe_tokens,
    ring_window,
)
from waits import launches, nothing_uploaded_or_read

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="nothing is computed")

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 5, 4, 2, 64, 16


def scales_on(device: str) -> Scales:
    """No two layers' are alike, as those of a quantised cache."""
    return Scales([0.1 + 0.01 * layer for layer in range(LAYERS)], [1.0] * LAYERS, device)


def pool_on(device: str) -> PagePool:
    store = torch.zeros(LAYERS, 200, KV_HEADS, BLOCK, 2 * DIM, dtype=torch.bfloat16, device=device)
    return PagePool([*store], max_requests=3, max_rows=4, max_blocks=80, block_size=BLOCK)


def warming_up(pool: PagePool, settings: CompressionConfig) -> warm_up.WarmUp:
    mover = StridedMover(pool, kv_layouts.INTERLEAVED)
    packer = Packer(mover, scales=scales_on(pool.pages.device.type), num_layers=LAYERS)
    asked = HEADS, DIM, torch.bfloat16
    return warm_up.WarmUp(packer, AttentionAdder(packer), settings, asked)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"random"}))
def test_a_prefill_that_ends(preset, in_place, monkeypatch):
    """Budgets of lengths alone are uploaded, from pinned memory; so are destination blocks."""
    names, pack = launches(monkeypatch), warm_up.PackRequest

    def uploaded(values, dtype, device):
        return torch.empty(len(values), dtype=dtype, device="meta")

    monkeypatch.setattr(
        page_pool, "async_tensor_h2d", lambda values, device, dtype: uploaded(values, dtype, device)
    )
    monkeypatch.setattr(
        warm_up, "PackRequest", lambda **given: pack(**{**given, "in_place": in_place})
    )
    settings = CompressionConfig.parse({"compress": preset, "budget": 0.3, "min_prompt": 200})
    compressor = PromptCompressor(
        settings,
        pool_on("meta"),
        kv_layouts.INTERLEAVED,
        scales=scales_on("meta"),
        stages=Stages([range(LAYERS)]),
        queries=(HEADS, DIM, torch.bfloat16),
    )
    if not method_of(settings).allocator.reads:
        pages = uploaded(range(LAYERS), torch.int64, "meta")
        monkeypatch.setattr("vllm_kvcompress.methods.method.layer_pages", lambda *_: pages)
    with nothing_uploaded_or_read():
        compressor.warm_up(1000)
    assert names.count("_move_kernel") >= 1 + in_place


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"compress": "cake", "lookahead": 20, "window": 40}, 20),
        ({"compress": "cake-chunk", "window": 48, "max_whole": 4096}, 32),
        ({"compress": "cake-chunk"}, 32),
    ],
)
def test_shares_by_an_answer_of_any_length_are_warmed_up(given, most, monkeypatch):
    """As long as requests may choose: no step compiles a kernel for one of them."""
    made, score = set(), method_module.window_scores_of_rows

    def scoring(query, *where, lengths, variance, maximum=False, **more):
        made.add((lengths is None, power_of_two(query.shape[1]), variance, maximum))
        return score(query, *where, lengths=lengths, variance=variance, maximum=maximum, **more)

    for module in (method_module, attention_module):
        monkeypatch.setattr(module, "window_scores_of_rows", scoring)
    settings = CompressionConfig.parse({**given, "min_prompt": 200, "budget": 0.3})
    pool = pool_on("cpu")
    warming_up(pool, settings).run(1000)
    shares = {(whole, rows) for whole, rows, variance, maximum in made if variance and not maximum}
    # of which nothing was dropped, and of which a cut to half or pieces dropped some
    whole = [True, False]
    assert shares >= {(each, power_of_two(m)) for each in whole for m in range(2, most + 1)}
    if not settings.parts.answer_scorer:
        return
    # the prompt's last queries, beside an answer's of any length
    window, beside = settings.resolved_window, settings.parts.prompt_window
    others = {power_of_two(beside or window - m) for m in range(2, most + 1)}
    apart = {(whole, rows) for whole, rows, variance, maximum in made if maximum and not variance}
    assert apart >= {(each, rows) for each in whole for rows in others}


def power_of_two(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


BOUNDING = [
    "cake",
    "cake-chunk",
    "chunkkv",
    "pyramidkv",
    "snapkv",
    "streamingllm",
    "tova",
    "caote",
    "fastcaote",
    "h2o",
    "d2o",
]


@pytest.mark.parametrize("preset", BOUNDING)
def test_warming_up_writes_nothing_but_the_null_block(preset):
    """With real tensors, whose indices must be in range; whatever the method finds there."""
    pool = pool_on("cpu")
    pool.pages.normal_()
    before = pool.pages.clone()
    given = {"compress": preset, "decode_budget": 64, "decode_interval": 4 * BLOCK}
    given |= {"max_whole": 4096, "piece": 64 * BLOCK}
    settings = CompressionConfig.parse(given)
    pool.remember(KV_HEADS, sums=adds_up(settings), thresholds=merges(settings))
    if kept := ring_window(settings):
        pool.ring = query_ring.QueryRing(
            layers=LAYERS,
            slots=4,
            requests=4,
            window=kept,
            heads=HEADS,
            dim=DIM,
            max_rows=4,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
    packing = warming_up(pool, settings)
    packing.pack_again(settings.resolved_decode_window, prefill=False)
    packing.pack_again(settings.resolved_window, prefill=True)
    null = pool.every_layer(torch.zeros(1, dtype=torch.int64)).flatten()
    others = torch.ones(len(before), dtype=torch.bool).index_fill_(0, null, False)
    assert torch.equal(pool.pages[others], before[others])
    assert not pool.busy
    assert not pool._lengths.any()


@pytest.mark.parametrize("preset", BOUNDING)
def test_an_answer_that_is_packed_again(preset, monkeypatch):
    """The first time, with budgets, and every later time; with queries that the ring kept.

    And a prompt at a boundary, with those of its prefill.
    """
    names = launches(monkeypatch)

    def uploaded(values, device, dtype):
        return torch.empty(len(values), dtype=dtype, device="meta")

    for module in (page_pool, query_ring, remembered):
        monkeypatch.setattr(module, "async_tensor_h2d", uploaded)
    settings = CompressionConfig.parse(
        {"compress": preset, "decode_budget": 64, "decode_interval": BLOCK}
        | {"max_whole": 4096, "piece": 64 * BLOCK}
    )
    if not method_of(settings).allocator.reads:
        pages = uploaded(range(LAYERS), "meta", torch.int64)
        monkeypatch.setattr("vllm_kvcompress.methods.method.layer_pages", lambda *_: pages)
    pool, window = pool_on("meta"), settings.resolved_decode_window
    adds, merging = adds_up(settings), merges(settings)
    pool.remember(KV_HEADS, sums=adds, thresholds=merging)
    if kept := ring_window(settings):
        pool.ring = query_ring.QueryRing(
            layers=LAYERS,
            slots=4,
            requests=4,
            window=kept,
            heads=HEADS,
            dim=DIM,
            max_rows=4,
            dtype=torch.bfloat16,
            device=torch.device("meta"),
        )
    packing = warming_up(pool, settings)
    with nothing_uploaded_or_read():
        packing.pack_again(window, prefill=False)
    # of keys and of values one KV head at a time: staged, and written; merged, all heads at once
    assert names.count("_move_kernel") == 2 * 2 * (1 if merging else KV_HEADS)
    assert names.count("fold_kernel") == 2 * merging
    # of an answer's latest rows, or of the window's
    assert names.count("columns_kernel") == 2 * bool(kept)
    assert names.count("heaviest_kernel") == 2 * (preset in ("caote", "fastcaote"))
    names.clear()
    with nothing_uploaded_or_read():
        if probe := probe_tokens(settings):
            rows = allocator_rows(settings, probe)
            packing.pack_again(probe, prefill=True, probe=probe, allocator_window=rows)
            names.clear()
        packing.pack_again(settings.resolved_window, prefill=True)
    # a prompt that is packed at a boundary: its layers divide anew each time
    assert names.count("_move_kernel") == 2 * (1 if merging else KV_HEADS)
    # and chunks of 8 to 128 rows that were added up before, where attention is
    chunks = 5 if adds else 0
    window = Reads.WINDOW in method_of(settings).reads
    assert names.count("columns_kernel") == window + chunks


def test_each_layer_gets_its_own_pages():
    pool = pool_on("cpu")
    counts = torch.tensor([3, 0, 1, 2, 2], dtype=torch.int32)
    given = pool.destination([7, 4])[:8]
    assert given[:LAYERS].tolist() == [200 * layer + 7 for layer in range(LAYERS)]
    table = pool.assign("r", given, counts, 9)
    want = given.split(counts.tolist())
    for layer, pages in enumerate(want):
        assert table[layer].tolist() == [*pages.tolist(), *[0] * (80 - len(pages))]
    (slot,) = pool._slots.values()
    assert torch.equal(pool._num_packed[slot], counts)
    assert pool._first_block[slot] == 9


def test_a_prompt_of_which_only_the_tail_stays():
    pool = pool_on("cpu")
    none = torch.zeros(LAYERS, dtype=torch.int32)
    assert not pool.assign("r", pool.destination([]), none, 2).any()
