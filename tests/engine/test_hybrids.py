"""Models with full-attention and sliding-window layers, of which only the former are compressed.

`test_reference` compares kept tokens with the methods, including gpt-oss with attention sinks.
These tests cover what a second layer group could break: it shares the block pool and the memory,
and what it computes after a compressed prompt depends on the kept tokens.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

from amx_layout import pretend_amx, pretend_no_amx
from checkpoints import HYBRIDS, make, tokens
from engines import BLOCK, engine, settings
from processor import needs_avx512
from recordings import recorded
from test_added_pieces import ANSWER as LONG_OUTPUT
from test_added_pieces import BOUND, INTERVAL, PieceSumsReplay
from test_added_pieces import pieces_settings as bounded_pieces_settings
from test_probes import PROBE, ProbeReplay
from test_prompts_in_pieces import CHUNKED_PREFILL, pieces_settings
from test_reference import softmax
from vllm_kvcompress.commands.plan import command as planning
from vllm_kvcompress.commands.plan.options import PlanOptions
from vllm_kvcompress.engine.compression.tiled_mover import TiledMover
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.planning.layer_groups import layer_groups, layer_types
from vllm_kvcompress.settings.config import CompressionConfig

NAMES = list(HYBRIDS)
NUM_OUTPUT = 12
PROMPT = tokens(417, seed=33)


def groups_of(llm):
    text = llm.scheduler.vllm_config.model_config.hf_text_config.to_dict()
    return layer_groups(layer_types(text), text["num_hidden_layers"], text["sliding_window"])


def full_layers(name, seen):
    """Return the checkpoint's shape with only the compressed layers."""
    return replace(HYBRIDS[name], layers=len(seen))


def checked_window_outputs(shape, seen, window, every=1):
    """Check in float64 that layers attend to exactly their window; return how many outputs.

    Args:
        shape: shape of the model.
        seen: what `record_attention` returned of the sliding-window layers.
        window: tokens of their window.
        every: check each n-th position.
    """
    num_checked = 0
    for layer, parts in seen.items():
        q, k, v, out = (
            torch.cat(parts[part]).double().flatten(1) for part in ("q", "k", "v", "out")
        )
        q, k, v, out = (x.view(len(q), -1, shape.head_dim) for x in (q, k, v, out))
        for position in range(0, len(q), every):
            first = max(position - window + 1, 0)
            for head in range(shape.heads):
                kv = head // (shape.heads // shape.kv_heads)
                keys, values = k[first : position + 1, kv], v[first : position + 1, kv]
                logits = keys @ q[position, head] / math.sqrt(shape.head_dim)
                sink = None if parts["sinks"] is None else parts["sinks"][head]
                expected = softmax(logits, sink) @ values
                bound = 1e-5 * values.abs().amax() * max(logits.abs().amax(), 1)
                error = (out[position, head] - expected).abs().amax()
                assert error <= bound, (layer, position, head)
                num_checked += 1
    return num_checked


@pytest.mark.parametrize("name", NAMES)
def test_window_layers_read_their_window_after_packing(name, checkpoints_folder):
    """Both kinds of layers share the memory. The pool just fits the prompt: packed in place."""
    blocks = {"gpt-oss": 3, "gemma3": 3 + 3 * 5, "mistral-windows": 6}[name]
    with engine(
        make(name, checkpoints_folder),
        blocks=1 + -(-len(PROMPT) // BLOCK) + 16 + blocks,
        additional_config=settings("cake", 0.5),
        max_num_batched_tokens=64,
        max_num_seqs=2,
        max_model_len=512,
        enable_prefix_caching=False,
    ) as llm:
        types, window = groups_of(llm), HYBRIDS[name].extra_config["sliding_window"]
        assert llm.compressor.packer.num_layers == len(types.full)
        seen, free = llm.record_attention(all_layers=True), llm.free_blocks
        llm.submit("r", PROMPT, 40)
        llm.drain()
        assert llm.free_blocks == free
        assert llm.compressor.compressed == 1
    windows = {layer: parts for layer, parts in seen.items() if layer not in types.full}
    assert checked_window_outputs(HYBRIDS[name], windows, window, every=3) > 1000


@pytest.mark.parametrize("name", NAMES)
def test_layer_groups_and_planned_blocks_match_vllm(name, checkpoints_folder):
    """Groups, bytes per block, and the maximum blocks of a request in the window groups."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    from vllm_kvcompress.engine.device_memory import sizes_of
    from vllm_kvcompress.engine.layers import other_layers_of

    with engine(
        make(name, checkpoints_folder),
        additional_config=settings("cake", 0.4),
        max_num_batched_tokens=96,
        max_model_len=1024,
    ) as llm:
        groups, config = groups_of(llm), llm.scheduler.vllm_config
        cache = llm.scheduler.kv_cache_config
        group_sizes = [len(group.layer_names) for group in cache.kv_cache_groups]
        assert group_sizes.count(len(groups.full)) >= 1
        assert len(cache.kv_cache_groups) == groups.full_groups + groups.windowed_groups
        assert cache.kv_cache_tensors[0].size == cache.num_blocks * sizes_of(config).block_bytes
        managers = llm.scheduler.kv_cache_manager.coordinator.single_type_managers
        windows = [each for each in managers if isinstance(each, SlidingWindowManager)]
        options = PlanOptions(
            model=make(name, checkpoints_folder), compress_config=json.dumps(FREE["kvcompress"]),
            length=900, output=100, block_size=BLOCK, dtype="float32", longest=1024, requests=4,
            device="cpu",
        )  # fmt: skip
        planned = planning.make_plan(options).forecast
        assert planned.block_bytes == sizes_of(config).block_bytes
        free_before = llm.free_blocks
        llm.submit("r", tokens(900, seed=1), 100)
        max_window_blocks, decoding = 0, []
        while llm.llm.llm_engine.has_unfinished_requests():
            llm.step()
            if llm.compressor.compressed:
                decoding.append(free_before - llm.free_blocks)
            held = [len([b for b in each.req_to_blocks.get(r.request_id, ()) if not b.is_null])
                    for r in llm.running() for each in windows]  # fmt: skip
            max_window_blocks = max(max_window_blocks, sum(held))
        planned_blocks = other_layers_of(config).blocks()
        assert planned_blocks - len(windows) <= max_window_blocks <= planned_blocks
        # The plan assumes one block more per window, in case a window starts inside a block.
        spare = len(windows)
        # Skip the step that packs: the windows still hold the blocks of its chunk.
        assert planned.on.decoding - spare <= decoding[1] <= planned.on.decoding
        assert planned.on.end - spare <= max(decoding[1:]) <= planned.on.end
        assert planned.off.end > 1.5 * planned.on.end


# Methods differ in how they use attention with sinks.
PIECEWISE = [("cake", name) for name in NAMES] + [("tova", "gpt-oss"), ("caote", "gpt-oss")]


@pytest.mark.parametrize(("method", "name"), PIECEWISE)
def test_pieces_keep_the_reference_tokens(method, name, checkpoints_folder):
    """Only full-attention layers drop tokens. Window layers do not count towards the budget."""
    length, num_output, config = 531, 40, pieces_settings(method, **PROBE)
    # At the thresholds of this prompt, no two scores are too close for float32.
    model, prompt = make(name, checkpoints_folder), tokens(length, seed=9)
    seen = recorded(model, config, prompt, num_output, **CHUNKED_PREFILL).seen
    replay = ProbeReplay(method, full_layers(name, seen), seen, length, int(length * 0.4))
    replay.replay_all(length + num_output)
    assert len(replay.packed_at) >= 3


@pytest.mark.parametrize("method", ["h2o", "d2o"])
def test_pieces_with_a_decode_budget_keep_the_reference_tokens(method, checkpoints_folder):
    """Attention with sinks is summed over pieces and decode intervals."""
    name, length = "gpt-oss", 480
    config = bounded_pieces_settings(method, 0.4, decode_budget=BOUND, decode_interval=2 * INTERVAL)
    model, prompt = make(name, checkpoints_folder), tokens(length, seed=5)
    seen = recorded(model, config, prompt, LONG_OUTPUT, **CHUNKED_PREFILL).seen
    replay = PieceSumsReplay(method, full_layers(name, seen), seen, length, int(length * 0.4))
    replay.interval = 2 * INTERVAL
    replay.steps(0, length + LONG_OUTPUT - 1)
    assert replay.packed_at


# -- concurrent requests --------------------------------------------------------------------------

LENGTHS = (417, 300, 128, 90, 640)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
PROMPTS[1][:250] = PROMPTS[0][:250]
OVERRIDES = [{}, {"kv_compress": "off"}, {"kv_compress": "h2o"}, {"kv_budget": 0.15}]
FREE = settings("cake", 0.4, allow_override="off,cake,h2o")


REQUESTS = [(prompt, override) for prompt in PROMPTS[:2] for override in OVERRIDES]
REQUESTS += [(prompt, override) for prompt in PROMPTS[2:] for override in OVERRIDES[::2]]


def outputs_of_all(llm, order=1):
    return llm.generate_each(REQUESTS[::order], NUM_OUTPUT)[::order]


@pytest.fixture(scope="module", params=NAMES)
def single_outputs(request, checkpoints_folder):
    """A model, the output of each request when it runs alone, and the model's layer groups."""
    model = make(request.param, checkpoints_folder)
    with engine(model, additional_config=FREE, enable_prefix_caching=False) as llm:
        outputs = [llm.generate_each([each], NUM_OUTPUT)[0] for each in REQUESTS]
        assert llm.compressor.compressed == 3 * 2 + 2 * 2
        return model, outputs, groups_of(llm)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 8}, id="chunks"),
        pytest.param({"async_scheduling": True}, id="async"),
        pytest.param({"enable_prefix_caching": False}, id="batch"),
    ],
)
def test_output_does_not_depend_on_concurrent_requests(
    more, single_outputs, async_scheduling_allowed
):
    """Nor on earlier requests in the same blocks or in the prefix cache, for either order.

    An uncompressed request must not find window blocks that were computed after a compressed
    prompt. A compressed request must compute the queries that its method reads.
    """
    model, expected, _ = single_outputs
    with engine(model, additional_config=FREE, max_model_len=1024, **more) as llm:
        free = llm.free_blocks
        for order in (1, -1):
            assert outputs_of_all(llm, order) == expected
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_hit_ends_at_the_window_even_with_another_prompt_of_the_same_prefix(
    name, checkpoints_folder
):
    """One step computes the end of the shared prefix and the end of later hits. Both are cached."""
    common = tokens(300, seed=1)
    other, prompt = common + tokens(200, seed=2), common + tokens(300, seed=3)
    model, config = make(name, checkpoints_folder), settings("cake", 0.4)
    with engine(model, additional_config=config, max_model_len=1024) as llm:
        hits = [llm.outputs([each], 3)[0].num_cached_tokens for each in (other, prompt, prompt)]
    # 600 tokens without a window of 32 are 17 full blocks.
    assert hits == [0, 0, 17 * BLOCK]


def test_conversation_reuses_only_uncompressed_window_blocks(single_outputs):
    """Each turn's prompt contains the last output, computed after a compressed prompt.

    The output has more full blocks than any window, so hits behind it would be possible.
    """
    model, *_ = single_outputs
    overrides = ({}, {"kv_compress": "off"}, {})
    with engine(model, additional_config=FREE, max_model_len=2048) as llm:
        history, turns = tokens(350, seed=2), []
        for turn in range(2):
            for num_output, override in zip((150, NUM_OUTPUT, NUM_OUTPUT), overrides, strict=True):
                result = llm.outputs([history], num_output, extra_args=override)[0]
                turns.append((history, override, list(result.outputs[0].token_ids)))
            assert result.num_cached_tokens > 0
            # The first and the last request of a turn have the same prompt and settings.
            assert turns[-1][2] == turns[-3][2][:NUM_OUTPUT]
            history = history + turns[-3][2] + tokens(50, seed=turn)
    with engine(
        model, additional_config=FREE, max_model_len=2048, enable_prefix_caching=False
    ) as llm:
        for i, (history, override, output) in enumerate(turns):
            llm.submit(str(i), history, len(output), extra_args=override)
        expected = llm.drain()
        assert expected == {str(i): output for i, (_, _, output) in enumerate(turns)}


def test_output_does_not_depend_on_the_pool_size(single_outputs):
    """From the smallest pool that starts. The prompt is packed into free blocks or in place.

    If destinations were counted for the compressed group alone, the windows could take them.
    """
    model, expected, groups = single_outputs
    config = CompressionConfig.parse(FREE["kvcompress"])
    plan = page_plan(config.budget_spec(len(groups.full), LENGTHS[0]), BLOCK)
    chunk = 32
    min_blocks = 14 + groups.windowed_blocks(448, chunk, BLOCK)
    sizes = range(min_blocks, min_blocks + plan.blocks + 3, 2)
    with engine(
        model,
        blocks=1 + sizes[-1],
        additional_config=FREE,
        max_model_len=448,
        max_num_batched_tokens=chunk,
        max_num_seqs=2,
    ) as llm:
        in_place = llm.watch_packing(lambda done: done.pack_request.in_place)
        for _ in llm.in_smaller_pools(sizes):
            for _ in range(2):
                assert llm.generate([PROMPTS[0]], NUM_OUTPUT) == expected[:1]
    assert set(in_place) == {True, False}


@pytest.mark.parametrize("name", NAMES)
def test_sequences_can_be_longer_than_the_pool(name, checkpoints_folder):
    """Full-attention layers can use the pool without the blocks of the window layers."""
    from vllm.exceptions import VLLMValidationError

    model, chunk, full_blocks, max_tokens = make(name, checkpoints_folder), 64, 17, 2048
    config = settings("cake", 160, window=8, max_whole=256, piece=96, allow_override="off", **PROBE)
    prompts, short = [tokens(1200, seed=1), tokens(833, seed=2)], tokens(500, seed=3)
    off = {"kv_compress": "off"}
    options = dict(additional_config=config, max_model_len=max_tokens, max_num_batched_tokens=chunk)
    with engine(model, max_num_seqs=2, **options) as llm:
        expected = [llm.generate([prompt], 20)[0] for prompt in prompts]
        # The last output token takes no slot.
        uncompressed = llm.generate([short], full_blocks * BLOCK - len(short) + 1, extra_args=off)
        window_blocks = groups_of(llm).windowed_blocks(max_tokens, chunk, BLOCK)
    with engine(model, blocks=1 + full_blocks + window_blocks, max_num_seqs=2, **options) as llm:
        free = llm.free_blocks
        assert llm.generate(prompts, 20) == expected
        # The uncompressed output ends when the pool is full.
        assert llm.generate([short], max_tokens - len(short), extra_args=off) == uncompressed
        with pytest.raises(VLLMValidationError, match="stays uncompressed; choose a method"):
            llm.generate(prompts[:1], 20, extra_args=off)
        assert llm.free_blocks == free


def test_preempted_request_continues_as_a_prompt_of_the_same_tokens(single_outputs):
    model, _, groups = single_outputs
    options = dict(max_model_len=704, max_num_batched_tokens=64, max_num_seqs=8)
    blocks = 22 + groups.windowed_blocks(704, 64, BLOCK) + 2
    with engine(model, additional_config=FREE, blocks=1 + blocks, **options) as llm:
        free, preemptions = llm.free_blocks, llm.watch_preemptions()
        for i, prompt in enumerate(PROMPTS):
            llm.submit(str(i), prompt, 60)
        outputs = llm.drain()
        assert preemptions
        assert llm.free_blocks == free
    with engine(model, additional_config=FREE, enable_prefix_caching=False) as llm:
        requests = [
            (prompt, outputs[str(i)], preemptions.get(str(i), []), None)
            for i, prompt in enumerate(PROMPTS)
        ]
        llm.assert_match_solo_runs(requests, 60)


@needs_avx512
@pytest.mark.parametrize("name", ["gpt-oss"])
def test_tiles_and_vectors_give_equal_outputs(name, checkpoints_folder, monkeypatch):
    """In AMX's tile layout, pages are unpacked before they are scored."""
    outputs = {}
    for kind, pretend in (("vectors", pretend_no_amx), ("tiles", pretend_amx)):
        pretend(monkeypatch)
        model = make(name, checkpoints_folder)
        # few blocks, because the AMX stand-in copies all pages for each layer
        options = {"dtype": "bfloat16", "max_num_seqs": 4, "max_model_len": 704, "blocks": 1 + 160}
        with engine(model, additional_config=FREE, **options) as llm:
            assert isinstance(llm.compressor.packer.mover, TiledMover) == (kind == "tiles")
            outputs[kind] = outputs_of_all(llm)
    assert outputs["tiles"] == outputs["vectors"]
