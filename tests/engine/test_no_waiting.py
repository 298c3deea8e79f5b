"""The host never waits for the GPU in a step that ends a prefill or packs an output."""

import os

import pytest
import torch

from host_sync import launches, no_uploads_or_reads
from vllm_kvcompress.engine.compression import warm_up
from vllm_kvcompress.engine.compression.attention_adder import AttentionAdder
from vllm_kvcompress.engine.compression.compressor import PromptCompressor
from vllm_kvcompress.engine.compression.mover import StridedMover
from vllm_kvcompress.engine.compression.packer import Packer
from vllm_kvcompress.engine.compression.stages import Stages
from vllm_kvcompress.engine.pages import layouts as kv_layouts
from vllm_kvcompress.engine.pages import method_state, query_ring
from vllm_kvcompress.engine.pages import pool as page_pool
from vllm_kvcompress.engine.pages.pool import PagePool
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.methods import attention as attention_module
from vllm_kvcompress.methods import method as method_module
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.settings.config import CompressionConfig

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ, reason="the tests only record kernel launches"
)

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 5, 4, 2, 64, 16


def scales_on(device: str) -> Scales:
    """Return different scales for all layers, as a quantised cache has."""
    return Scales([0.1 + 0.01 * layer for layer in range(LAYERS)], [1.0] * LAYERS, device)


def pool_on(device: str, *, packs_groups: bool = False, scratch_blocks: int = 0) -> PagePool:
    store = torch.zeros(LAYERS, 200, KV_HEADS, BLOCK, 2 * DIM, dtype=torch.bfloat16, device=device)
    sizes = dict(max_requests=3, max_rows=4, max_blocks=80, block_size=BLOCK)
    return PagePool([*store], **sizes, packs_groups=packs_groups, scratch_blocks=scratch_blocks)


def warm_up_of(pool: PagePool, settings: CompressionConfig) -> warm_up.WarmUp:
    mover = StridedMover(pool, kv_layouts.INTERLEAVED)
    packer = Packer(mover, scales=scales_on(pool.pages.device.type), num_layers=LAYERS)
    query_shape = HEADS, DIM, torch.bfloat16
    return warm_up.WarmUp(packer, AttentionAdder(packer), settings, query_shape)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"random"}))
def test_the_end_of_a_prefill_does_not_wait(preset, in_place, monkeypatch):
    """Only destination blocks, and budgets that depend on lengths alone, are uploaded (pinned)."""
    names, pack = launches(monkeypatch), warm_up.PackPrompt

    def uploaded(values, dtype, device):
        return torch.empty(len(values), dtype=dtype, device="meta")

    monkeypatch.setattr(
        page_pool, "async_tensor_h2d", lambda values, device, dtype: uploaded(values, dtype, device)
    )
    monkeypatch.setattr(
        warm_up, "PackPrompt", lambda **fields: pack(**{**fields, "in_place": in_place})
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
    if not settings.method.allocator.reads:
        pages = uploaded(range(LAYERS), torch.int64, "meta")
        monkeypatch.setattr("vllm_kvcompress.methods.method.layer_pages", lambda *_: pages)
    with no_uploads_or_reads():
        compressor.warm_up(1000)
    assert names.count("_move_kernel") >= 1 + in_place


@pytest.mark.parametrize(
    ("config", "max_queries"),
    [
        ({"compress": "cake", "lookahead": 20, "window": 40}, 20),
        ({"compress": "cake-chunk", "window": 48, "max_whole": 4096}, 32),
        ({"compress": "cake-chunk"}, 32),
    ],
)
def test_layer_budgets_from_any_look_ahead_length_are_warmed_up(config, max_queries, monkeypatch):
    """Warm-up compiles the kernels for all look-ahead lengths that requests may choose."""
    signatures, score = set(), method_module.window_scores_of_rows

    def scoring(query, *where, lengths, variance, maximum=False, **options):
        signatures.add((lengths is None, power_of_two(query.shape[1]), variance, maximum))
        return score(query, *where, lengths=lengths, variance=variance, maximum=maximum, **options)

    for module in (method_module, attention_module):
        monkeypatch.setattr(module, "window_scores_of_rows", scoring)
    settings = CompressionConfig.parse({**config, "min_prompt": 200, "budget": 0.3})
    pool = pool_on("cpu")
    warm_up_of(pool, settings).run(1000)
    budget_signatures = {
        (no_drop, rows)
        for no_drop, rows, variance, maximum in signatures
        if variance and not maximum
    }
    # prompts without dropped tokens, and prompts of which a halving or pieces dropped some
    no_drops = [True, False]
    assert budget_signatures >= {
        (no_drop, power_of_two(m)) for no_drop in no_drops for m in range(2, max_queries + 1)
    }
    if not settings.parts.output_scorer:
        return
    # the prompt's last queries, which complement output queries of any number
    window, prompt_window = settings.resolved_window, settings.parts.prompt_window
    complements = {power_of_two(prompt_window or window - m) for m in range(2, max_queries + 1)}
    score_signatures = {
        (no_drop, rows)
        for no_drop, rows, variance, maximum in signatures
        if maximum and not variance
    }
    assert score_signatures >= {(no_drop, rows) for no_drop in no_drops for rows in complements}


def power_of_two(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


OUTPUT_METHODS = [
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


@pytest.mark.parametrize("preset", OUTPUT_METHODS)
def test_warm_up_writes_only_to_the_null_block(preset):
    """Warm-up on real tensors with random values writes only to the null block."""
    pool = pool_on("cpu")
    pool.pages.normal_()
    before = pool.pages.clone()
    config = {"compress": preset, "decode_budget": 64, "decode_interval": 4 * BLOCK}
    config |= {"max_whole": 4096, "piece": 64 * BLOCK}
    settings = CompressionConfig.parse(config)
    pool.allocate_method_state(
        KV_HEADS,
        sums=settings.method.sums_output_attention,
        thresholds=settings.method.merges_repeatedly,
    )
    if ring_rows := settings.ring_window:
        pool.ring = query_ring.QueryRing(
            layers=LAYERS,
            slots=4,
            requests=4,
            window=ring_rows,
            heads=HEADS,
            dim=DIM,
            max_rows=4,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
    packing = warm_up_of(pool, settings)
    packing.pack_again(settings.resolved_decode_window, prefill=False)
    packing.pack_again(settings.resolved_window, prefill=True)
    null = pool.flat_ids_in_all_layers(torch.zeros(1, dtype=torch.int64)).flatten()
    other_pages = torch.ones(len(before), dtype=torch.bool).index_fill_(0, null, False)
    assert torch.equal(pool.pages[other_pages], before[other_pages])
    assert not pool.has_requests
    assert not pool._lengths.any()


@pytest.mark.parametrize("preset", OUTPUT_METHODS)
def test_packing_an_output_does_not_wait(preset, monkeypatch):
    """Packing an output, and a prompt at a boundary, uploads and reads nothing.

    An output is packed a first time with budgets and again later, with queries from the ring. A
    prompt at a boundary uses queries of its prefill.
    """
    names = launches(monkeypatch)

    def uploaded(values, device, dtype):
        return torch.empty(len(values), dtype=dtype, device="meta")

    for module in (page_pool, query_ring, method_state):
        monkeypatch.setattr(module, "async_tensor_h2d", uploaded)
    settings = CompressionConfig.parse(
        {"compress": preset, "decode_budget": 64, "decode_interval": BLOCK}
        | {"max_whole": 4096, "piece": 64 * BLOCK}
    )
    if not settings.method.allocator.reads:
        pages = uploaded(range(LAYERS), "meta", torch.int64)
        monkeypatch.setattr("vllm_kvcompress.methods.method.layer_pages", lambda *_: pages)
    pool, window = pool_on("meta"), settings.resolved_decode_window
    adds, merging = settings.method.sums_output_attention, settings.method.merges_repeatedly
    pool.allocate_method_state(KV_HEADS, sums=adds, thresholds=merging)
    if ring_rows := settings.ring_window:
        pool.ring = query_ring.QueryRing(
            layers=LAYERS,
            slots=4,
            requests=4,
            window=ring_rows,
            heads=HEADS,
            dim=DIM,
            max_rows=4,
            dtype=torch.bfloat16,
            device=torch.device("meta"),
        )
    packing = warm_up_of(pool, settings)
    with no_uploads_or_reads():
        packing.pack_again(window, prefill=False)
    # two packings, each with a staging and a writing launch per KV head; merging moves all heads
    # in one launch
    assert names.count("_move_kernel") == 2 * 2 * (1 if merging else KV_HEADS)
    assert names.count("fold_kernel") == 2 * merging
    # scores of the latest output queries
    assert names.count("columns_kernel") == 2 * bool(ring_rows)
    assert names.count("heaviest_kernel") == 2 * (preset in ("caote", "fastcaote"))
    names.clear()
    with no_uploads_or_reads():
        if probe := settings.method.probe_tokens:
            rows = settings.method.num_allocator_queries(probe)
            packing.pack_again(probe, prefill=True, probe=probe, allocator_window=rows)
            names.clear()
        packing.pack_again(settings.resolved_window, prefill=True)
    # at a boundary, the prompt's layer budgets are computed again each time
    assert names.count("_move_kernel") == 2 * (1 if merging else KV_HEADS)
    # methods that add up attention also add chunks of 8 to 128 rows
    chunks = 5 if adds else 0
    window = Reads.WINDOW in settings.method.reads
    assert names.count("columns_kernel") == window + chunks


def test_each_layer_gets_separate_pages():
    pool = pool_on("cpu")
    counts = torch.tensor([3, 0, 1, 2, 2], dtype=torch.int32)
    destinations = pool.destination([7, 4])[:8]
    assert destinations[:LAYERS].tolist() == [200 * layer + 7 for layer in range(LAYERS)]
    (table,) = pool.assign([page_pool.PackedBlocks("r", [7, 4], 9)], counts[None])
    expected = destinations.split(counts.tolist())
    for layer, pages in enumerate(expected):
        assert table[layer].tolist() == [*pages.tolist(), *[0] * (80 - len(pages))]
    (slot,) = pool._slots.values()
    assert torch.equal(pool._num_packed[slot], counts)
    assert pool._first_block[slot] == 9


def test_a_prompt_can_keep_only_its_tail():
    pool = pool_on("cpu")
    none = torch.zeros(LAYERS, dtype=torch.int32)
    (table,) = pool.assign([page_pool.PackedBlocks("r", [], 2)], none[None])
    assert not table.any()


@pytest.mark.parametrize("groups", [False, True])
def test_several_requests_are_assigned_as_if_alone(groups):
    """Stale lengths in the slots do not matter."""
    alone, together = pool_on("cpu", packs_groups=True), pool_on("cpu", packs_groups=True)
    for pool in (alone, together):
        for lengths in (pool._num_packed, pool._first_block, pool._group_tokens):
            lengths[1:] = 77
    requests = [
        page_pool.PackedBlocks("a", [7, 4], 9),
        page_pool.PackedBlocks("b", [], 2),
        page_pool.PackedBlocks("c", [3, 11, 5], 3),
    ]
    counts = torch.tensor([[3, 0, 1, 2, 2], [0] * 5, [0, 9, 1, 2, 3]], dtype=torch.int32)
    tokens = counts * 40 if groups else None
    tables = together.assign(requests, counts, tokens)
    for row, request in enumerate(requests):
        row_tokens = None if tokens is None else tokens[row : row + 1]
        (table,) = alone.assign([request], counts[row : row + 1], row_tokens)
        assert torch.equal(tables[row], table)
    for name in ("_packed", "_num_packed", "_first_block", "_group_tokens"):
        assert torch.equal(getattr(together, name), getattr(alone, name)), name
    assert torch.equal(together._num_packed[together.slots(["a", "b", "c"])], counts * (not groups))
    assert together.have_groups(together.slots(["a"])) == groups
    assert together._slots_with_pages == alone._slots_with_pages == {1, 2, 3}


@pytest.mark.parametrize("groups", [False, True])
def test_several_requests_are_assigned_with_one_upload_and_one_launch(groups, monkeypatch):
    names, uploads = launches(monkeypatch), []

    def uploaded(values, device, dtype):
        uploads.append(list(values))
        return torch.empty(len(values), dtype=dtype, device="meta")

    monkeypatch.setattr(page_pool, "async_tensor_h2d", uploaded)
    pool = pool_on("meta", packs_groups=groups)
    requests = [page_pool.PackedBlocks("a", [7, 4], 9), page_pool.PackedBlocks("b", [3, 11, 5], 3)]
    counts = torch.empty(2, LAYERS, dtype=torch.int32, device="meta")
    with no_uploads_or_reads():
        pool.assign(requests, counts, counts if groups else None)
    assert names == ["_assign_pages_kernel"]
    assert uploads == [[1, 9, 0, 2, 3, 2, 7, 4, 3, 11, 5]]
    # A request that has a slot keeps it.
    with no_uploads_or_reads():
        again = page_pool.PackedBlocks("b", [8], 4)
        pool.assign([again], counts[:1], counts[:1] if groups else None)
    assert uploads[1:] == [[2, 4, 0, 8]]


def test_rows_read_scratch_pages_without_a_wait_or_upload(monkeypatch):
    """A row with few queries, a partly filled page or too many pages reads its groups."""
    pool, per_page = pool_on("meta", packs_groups=True, scratch_blocks=4), 64
    leading, slots = torch.zeros(LAYERS, 1, dtype=torch.int32, device="meta"), []
    for request_id, pages, tokens in (("a", 1, per_page), ("b", 3, 3 * per_page), ("c", 1, 40)):
        table = torch.zeros(LAYERS, pages, dtype=torch.int32, device="meta")
        pool.add_groups(request_id, table, tokens, per_page, 1 + tokens // BLOCK, leading)
        slots += pool.slots([request_id])
    assert len(pool.scratch.pages) == 4 * LAYERS
    with no_uploads_or_reads():
        read_slots, copies = pool.use_scratch([*slots, 0], [32, 700, 50, 900], 900)
        assert read_slots == [4, 5, slots[2], 0]
        assert pool.have_groups(read_slots)
        assert [packed.shape for packed in copies.packed] == [(4,)] * LAYERS
        assert len(copies.destinations) == 16
        assert pool.use_scratch(slots, [31, 1, 99], 900) == (slots, None)
        too_long = pool.max_layer_tokens + 1
        assert pool.use_scratch(slots, [32, 700, 50], too_long) == (slots, None)
        pool.scratch.pages = pool.scratch.pages[:12]
        read_slots, copies = pool.use_scratch(slots, [32, 700, 50], 900)
        assert (read_slots, len(copies.destinations)) == ([4, *slots[1:]], 4)
    assert pool.may_use_scratch({"a": 32})
    assert not pool.may_use_scratch({"a": 31, "other": 900})
    pool.forget("a")
    assert not pool.may_use_scratch({"a": 32})
