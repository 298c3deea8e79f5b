"""EAGLE, EAGLE3 and MTP: outputs equal those without drafts, and draft layers keep every token.

The draft layer's cache lies in the target's blocks, which compression frees. Wrong draft pages
would be silent: the target rejects bad drafts, so outputs stay right and only get slower. So its
attention is compared with a float64 reference that knows no pages.
"""

import pytest
import torch

from checkpoints import make, tokens
from draft_checkpoints import make_eagle, make_eagle3, make_with_mtp
from drafting import (
    FOUR_TOKENS,
    draft_pages,
    limit_drafts,
    pack_early,
    speculative,
    watch_draft_attention,
    watch_drafts,
)
from engines import BLOCK, V2, engine, model_runner_v1_only, settings
from vllm_kvcompress.engine.messages.step import BUDGET, HALF
from vllm_kvcompress.errors import ConfigError

NEW = 24
LENGTHS = (417, 640, 90, 321, 545)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
PROMPTS[3][:200] = PROMPTS[0][:200]
# scored by a window's queries, by the last query, by all queries, with merging, and by none
METHODS = ["off", "cake", "tova", "h2o", "d2o", "streamingllm"]
ANY_METHOD = settings("cake", 0.4, allow_override="all")
FEW = {"allowed_token_ids": list(FOUR_TOKENS)}
SIZES = {"max_model_len": 1024, "max_num_seqs": 8}
OPTIONS = {
    "prefix cache": {},
    "no cache": {"enable_prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 64},
    "preempted": {"blocks": 1 + 24, "max_model_len": 704},
}


@pytest.fixture(scope="module")
def head(model):
    return make_eagle(model)


# A draft method, and CUDA's attention backend that stand-ins run on a CPU.
CASES = [("eagle", None), ("eagle3", None), ("mtp", None)]
if V2:
    CASES = [("eagle", None), ("eagle3", None), ("eagle", "FLASH_ATTN"), ("mtp", "TRITON_ATTN")]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # from padding rows
@pytest.mark.parametrize(("method", "backend"), CASES)
def test_draft_models_keep_their_tokens(
    method, backend, checkpoints_folder, async_scheduling_allowed, monkeypatch
):
    """Outputs equal those without drafts, and the draft layer attends to all tokens.

    Look-aheads and async scheduling are those of the default method on a GPU.
    """
    if backend is not None:
        import cuda_on_cpu

        cuda_on_cpu.use(monkeypatch, backend)
    prompts = [PROMPTS[3][:170], PROMPTS[1][:139]] if V2 else [PROMPTS[3], PROMPTS[1][:200]]
    new = 14 if V2 else NEW
    if method == "mtp":
        model, head = make_with_mtp(checkpoints_folder), None
    else:
        model = make("llama-gqa", checkpoints_folder)
        head = make_eagle(model) if method == "eagle" else make_eagle3(model)
    config = settings("cake-chunk", 0.3, lookahead=4, allow_override="off")
    options = {"additional_config": config, "enable_prefix_caching": False, "max_num_seqs": 4}
    options |= {"max_model_len": 512, "max_num_batched_tokens": 128}
    with engine(model, **options) as llm:
        expected = llm.generate(prompts, new, **FEW)
    drafting = speculative(head, method=method)
    with engine(model, **options, **drafting, async_scheduling=True) as llm:
        limit_drafts(llm)
        free, errors, drafts = llm.free_blocks, watch_draft_attention(llm), watch_drafts(llm)
        assert llm.generate(prompts, new, **FEW) == expected
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
        assert llm.compressor.compressed == len(prompts)
        assert len(errors) > sum(map(len, prompts)) + 2 * new
        assert max(errors) < 1e-4
        assert 0 < drafts.accepted < drafts.verified


@pytest.fixture(scope="module")
def drafting(model, head):
    """Return an engine of which tests watch the draft layer's attention."""
    with engine(
        model,
        additional_config=settings("snapkv", 0.3, lookahead=12),
        enable_prefix_caching=False,
        max_num_batched_tokens=512,
        max_model_len=512,
        max_num_seqs=4,
        **speculative(head),
    ) as llm:
        limit_drafts(llm)
        yield llm


TWO = {"338": tokens(338, seed=338), "258": tokens(258, seed=258)}


def test_draft_layer_attends_to_all_tokens_after_early_packings(drafting):
    """Two requests at once, each packed to half and then to its budget."""
    with drafting.lent() as llm:
        errors, packings = watch_draft_attention(llm), pack_early(llm, {HALF: 2, BUDGET: 6})
        for name, prompt in TWO.items():
            llm.submit(name, prompt, NEW, **FEW)
        llm.drain()
        del llm.scheduler.step_builder.pack_early
        assert packings.keys() == {(name, target) for name in TWO for target in (HALF, BUDGET)}
        assert len(errors) > sum(map(len, TWO.values())) + 2 * NEW
        assert max(errors) < 1e-4


def stale_lengths(pool, tables, lengths, previous):
    """Attend to as many tokens as in the draft step before."""
    before = previous.get(lengths[0].shape)
    previous[lengths[0].shape] = [each.clone() for each in lengths]
    return tables, before or lengths


def targets_table(pool, tables, lengths, previous):
    """Read the first target layer's pages."""
    return [pool._tables[0, : len(tables[0])]], lengths


def a_block_too_late(pool, tables, lengths, previous):
    """Read each ordinary block from the column of the one before."""
    pages = max(pool.drafts._packed_pages)
    return [torch.cat([tables[0][:, :pages], tables[0][:, pages - 1 : -1]], 1)], lengths


def without_a_blocks_first_token(pool, tables, lengths, previous):
    """Leave out the last token if it is the first of its block."""
    return tables, [each - (each % BLOCK == 1).int() for each in lengths]


@pytest.mark.parametrize(
    "broken", [stale_lengths, targets_table, a_block_too_late, without_a_blocks_first_token]
)
def test_wrong_tables_of_draft_layers_are_noticed(broken, drafting):
    """So that the small errors of other tests mean something."""
    with drafting.lent() as llm:
        pool, errors, previous = llm.compressor.pool, watch_draft_attention(llm), {}
        compute, breaks = pool.drafts.tables, []

        def breaking(*args):
            tables, lengths = compute(*args)
            if not any(pool.drafts._packed_pages):
                return tables, lengths
            breaks.append(len(errors))
            return broken(pool, tables, lengths, previous)

        pool.drafts.tables = breaking
        llm.generate([TWO["338"]], NEW, **FEW)
        del pool.drafts.tables
        assert max(errors[: breaks[0]]) < 1e-4
        assert max(errors[breaks[0] :]) > 1e-2


@pytest.fixture(scope="module")
def outputs_without_drafts(model):
    """Return each prompt's output by method, without drafts."""
    with engine(model, additional_config=ANY_METHOD, enable_prefix_caching=False) as llm:
        return {
            method: llm.generate(PROMPTS, NEW, extra_args={"kv_compress": method}, **FEW)
            for method in METHODS
        }


@model_runner_v1_only
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_greedy_outputs_match_those_without_drafts(options, model, head, outputs_without_drafts):
    options = SIZES | speculative(head) | options
    with engine(model, additional_config=ANY_METHOD, **options) as llm:
        limit_drafts(llm)
        free, drafts, preempted, compared = llm.free_blocks, watch_drafts(llm), 0, 0
        for method, expected in outputs_without_drafts.items():
            for order in (1, -1):
                cuts = llm.watch_preemptions() if "blocks" in options else {}
                for index, prompt in [*enumerate(PROMPTS)][::order]:
                    chosen = {"kv_compress": method}
                    llm.submit(str(index), prompt, NEW, extra_args=chosen, **FEW)
                outputs = llm.drain()
                preempted += len(cuts)
                for name, output in outputs.items():
                    # Until a request is preempted, nothing sets it apart.
                    stop = min(cuts.get(name, [NEW]))
                    compared += stop
                    assert output[:stop] == expected[int(name)][:stop], method
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
        assert llm.compressor.compressed >= 2 * 4 * (len(METHODS) - 1)
        assert bool(preempted) == ("blocks" in options)
        assert compared > len(METHODS) * len(PROMPTS) * NEW
        assert 0 < drafts.accepted < drafts.verified


# Few blocks: prompts are packed in place, where draft and target write over each other's pages
@model_runner_v1_only
@pytest.mark.parametrize("blocks", [1 + 1000, 1 + 21], ids=["fresh", "in place"])
@pytest.mark.parametrize("method", ["snapkv", "d2o"])
def test_draft_layer_attends_to_all_tokens(method, blocks, model, head):
    with engine(
        model,
        additional_config=settings(method, 0.3),
        enable_prefix_caching=False,
        blocks=blocks,
        max_num_batched_tokens=128,
        max_model_len=672,
        max_num_seqs=8,
        **speculative(head),
    ) as llm:
        limit_drafts(llm)
        in_place = llm.watch_packing(lambda outputs: outputs.pack_request.in_place)
        errors, drafts = watch_draft_attention(llm), watch_drafts(llm)
        for prompt in (PROMPTS[1], PROMPTS[3]):
            llm.generate([prompt], NEW, **FEW)
        assert in_place[0] == (blocks == 1 + 21)
        assert len(errors) > sum(map(len, (PROMPTS[1], PROMPTS[3]))) + 2 * NEW
        assert max(errors) < 1e-4
        assert 0 < drafts.accepted < drafts.verified


@model_runner_v1_only
def test_draft_pages_lie_in_the_destination_blocks(model, head):
    """Layers and draft layer share the destination blocks, and no page twice."""
    with engine(
        model, additional_config=settings("cake", 0.3, usage=True), **SIZES, **speculative(head)
    ) as llm:
        llm.submit("r", PROMPTS[1], NEW)
        while not llm.compressor.compressed:
            llm.step()
        (request,) = llm.running()
        held = llm.num_blocks_held(request.request_id)
        pool, blocks = llm.compressor.pool, llm.packed_blocks(request.request_id)
        full = len(PROMPTS[1]) // BLOCK
        pages = draft_pages(llm, request.request_id)
        assert len(pages) == full
        counts = pool._num_packed[pool._slots[request.request_id]]
        packed = pool._packed[pool._slots[request.request_id]]
        for row, count in zip(packed, counts.tolist(), strict=True):
            pages += row[:count].tolist()
        own = pool.destination([block.block_id for block in blocks]).tolist()
        assert len(set(pages)) == len(pages) == int(counts.sum()) + full
        assert set(pages) <= set(own)
        assert len(own) - len(pages) < len(pool._page_offset)
        cache = llm.scheduler.kv_cache_config
        page_bytes = 2 * 2 * 32 * 4 * BLOCK  # keys and values of 2 heads of 32 float32 numbers
        block_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors) // cache.num_blocks
        assert block_bytes == (4 + 1) * page_bytes
        outputs = {}
        while not outputs:
            outputs = llm.step()
        usage = outputs["r"].kv_compress
        # The last block has no token yet, only slots for drafts.
        assert usage["kept_bytes"] == (held - 1) * block_bytes
        assert usage["uncompressed_bytes"] == -(-len(PROMPTS[1]) // BLOCK) * block_bytes
        assert len(usage["layer_tokens"]) == 4


@model_runner_v1_only
def test_a_prompt_that_frees_no_block_stays_uncompressed(model, head):
    """Five full blocks at 0.75: the four layers would free one block, the draft layer needs it."""
    config, prompt = settings("snapkv", 0.78), tokens(5 * BLOCK + 3, seed=8)
    compressed = {}
    for name, options in (("without", {}), ("with", speculative(head))):
        with engine(model, additional_config=config, **SIZES, **options) as llm:
            llm.generate([prompt], 4)
            compressed[name] = llm.compressor.compressed
    assert compressed == {"without": 1, "with": 0}


@model_runner_v1_only
@pytest.mark.parametrize(
    "shape", [{"kv_heads": 4}, {"head_dim": 64}], ids=["KV heads", "head size"]
)
def test_draft_layers_of_another_shape_are_refused(shape, model):
    head = make_eagle(model, **shape)
    with (
        pytest.raises(ConfigError, match="draft layers with the target's KV heads") as refusal,
        engine(model, additional_config=settings(), **SIZES, **speculative(head)),
    ):
        pass
    assert "model.layers.4" in str(refusal.value)
    assert "ngram" in str(refusal.value)


@model_runner_v1_only
@pytest.mark.parametrize(
    ("options", "more", "reason"),
    [
        ({"packed_dtype": "k4v3"}, {}, "draft layers are not tested with k4v3"),
        ({}, {"kv_cache_dtype": "fp8"}, "draft layers are not tested with"),
        ({"packed_dtype": "k4v3", "budget": 1.0, "reuse": "grid"}, {}, "draft layers"),
        ({"decode_budget": 96}, {}, "requests compressed more than once"),
        ({}, {"parallel_drafting": True}, "with the default of parallel_drafting"),
        ({}, {"num_speculative_tokens_per_batch_size": [(1, 4, 2)]}, "with the default of num_"),
    ],
)
def test_what_was_not_tested_with_draft_layers_is_refused(options, more, reason, model, head):
    drafting = speculative(head)
    if "kv_cache_dtype" not in more:
        drafting["speculative_config"] |= more
        more = {}
    config = settings("cake", **({"budget": 0.5} | options))
    with (
        pytest.raises(ConfigError, match=reason),
        engine(model, additional_config=config, **SIZES, **drafting, **more),
    ):
        pass


@model_runner_v1_only
def test_several_mtp_modules_are_refused(checkpoints_folder):
    model = make_with_mtp(checkpoints_folder, modules=2)
    with (
        pytest.raises(ConfigError, match="with 2 MTP modules, but only one was tested") as refusal,
        engine(model, additional_config=settings(), **SIZES, **speculative(None, 2, "mtp")),
    ):
        pass
    assert "ngram" in str(refusal.value)
