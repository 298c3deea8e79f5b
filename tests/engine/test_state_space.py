"""Models with full-attention layers and layers that keep a state (linear attention, state space).

The full-attention layers are compressed, and vLLM manages the states. `test_reference` compares
kept tokens with the methods, and `test_hybrids` tests what any second layer group could break.
These tests cover what states add: blocks of 96 tokens, tokens that cannot be rolled back, and a
prefix cache with states at few boundaries.
"""

import math
from dataclasses import replace

import pytest

import test_decode_budgets
import test_lookahead
import test_prompts_in_pieces
from checkpoints import STATEFUL, WIDE, make, tokens
from configuring import configure
from engines import BLOCKS, V2, engine, model_runner_v1_only, settings, with_states
from recordings import recorded
from stand_in_torchvision import in_a_fork
from test_decode_budgets import Replay
from test_lookahead import LookaheadReplay, lookahead_config
from test_prompts_in_pieces import PieceReplay, pieces_settings
from vllm_kvcompress.engine.layers import other_layers_of
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.settings.config import CompressionConfig

pytestmark = with_states

FLOAT32 = ["granite-96", "nemotron"]
# with heads that k4v3 can pack
WITH_K4V3 = ["granite-d64", "nemotron-d64"]
# The only model whose states vLLM's CPU build keeps in the prefix cache.
CACHED = "qwen3-next"
NUM_OUTPUT = 12
SHAPES = STATEFUL | WIDE
FREE = settings("cake", 0.4, allow_override="off,cake,h2o", alias="packed=cake:0.4:k4v3")


def engine_options(name, **more):
    """Return the engine options for this model."""
    options = dict(
        dtype=SHAPES[name].dtype,
        mamba_ssm_cache_dtype="float32",  # on any processor
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    return {**options, **more}


def full_layers(name, seen):
    """Return the checkpoint's shape with only the compressed layers."""
    return replace(SHAPES[name], layers=len(seen))


@pytest.fixture
def longer_blocks(monkeypatch):
    """A function that sets the block size of the replays to a model's."""

    def use(name):
        for module in (test_decode_budgets, test_prompts_in_pieces, test_lookahead):
            monkeypatch.setattr(module, "BLOCK", SHAPES[name].block)

    return use


# -- against float64 ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOAT32[:1] if V2 else FLOAT32)
def test_pieces_keep_the_reference_tokens(name, checkpoints_folder, longer_blocks):
    longer_blocks(name)
    length, num_output = 531, 30
    config = pieces_settings("cake", 0.5, probe=0, max_whole=192)
    model, prompt = make(name, checkpoints_folder), tokens(length, seed=5)
    options = engine_options(name, max_num_batched_tokens=70)
    seen = recorded(model, config, prompt, num_output, **options).seen
    replay = PieceReplay("cake", full_layers(name, seen), seen, length, int(length * 0.5))
    replay.replay_all(length + num_output)
    assert replay.packed_at[-1] == length
    assert len(replay.packed_at) >= 2


@pytest.mark.parametrize("name", FLOAT32[:1] if V2 else FLOAT32)
def test_lookahead_keeps_the_reference_tokens(name, checkpoints_folder, longer_blocks):
    longer_blocks(name)
    length, m, num_output = 417, 12, 30
    config = lookahead_config("cake", 0.3, lookahead=m)
    model, prompt = make(name, checkpoints_folder), tokens(length, seed=33)
    options = engine_options(name, max_num_batched_tokens=150)
    seen = recorded(model, config, prompt, num_output, **options).seen
    replay = LookaheadReplay("cake", full_layers(name, seen), seen, length, m).start_after_prefill()
    replay.steps(length, length + num_output - 1)
    assert replay.packed_at == [length + m]


@model_runner_v1_only
@pytest.mark.parametrize("name", FLOAT32)
def test_decode_budget_is_applied_at_block_ends(name, checkpoints_folder, longer_blocks):
    """The default decode interval is the largest multiple of the block size up to 128 tokens."""
    longer_blocks(name)
    block, num_output = SHAPES[name].block, 200
    bound, prompt = 2 * block, 2 * block + 9
    config = settings("cake", 0.4, min_prompt=1024, decode_budget=bound, decode_window=8)
    with engine(
        make(name, checkpoints_folder),
        additional_config=config,
        **engine_options(name, max_num_seqs=2),
    ) as llm:
        interval = llm.scheduler.admissions.settings.decode.interval
        assert interval == llm.worker.settings.decode.interval == 128 // block * block
        seen, free = llm.record_attention(), llm.free_blocks
        llm.submit("r", tokens(prompt, seed=4), num_output)
        llm.drain()
        assert llm.free_blocks == free
    shape = full_layers(name, seen)
    replay = Replay("cake", shape, seen, prompt, bound, num_output)
    replay.interval = interval
    replay.steps(prompt, prompt + num_output - 1)
    assert len(replay.packed_at) >= 2


# -- concurrent requests --------------------------------------------------------------------------

LENGTHS = (417, 300, 128, 640)
# A scan's rounding depends on its chunks. At the thresholds of these prompts, no two scores are too
# close for float32.
PROMPTS = [tokens(length, seed=length + 1) for length in LENGTHS[: 2 if V2 else None]]
PROMPTS[1][:250] = PROMPTS[0][:250]
OVERRIDES = [
    {},
    {"kv_compress": "off"},
    {"kv_compress": "h2o"},
    {"kv_budget": 0.15},
    {"kv_packed_dtype": "k4v3"},
]
if V2:  # in Triton's interpreter
    OVERRIDES = [OVERRIDES[0], OVERRIDES[1], OVERRIDES[-1]]
# The shortest and the longest prompt run with the first and the last override alone.
REQUESTS = [(prompt, override) for prompt in PROMPTS[:2] for override in OVERRIDES]
REQUESTS += [
    (prompt, override) for prompt in PROMPTS[2:] for override in OVERRIDES[:: len(OVERRIDES) - 1]
]


@pytest.fixture(scope="module", params=WITH_K4V3[:1] if V2 else WITH_K4V3)
def single_outputs(request, checkpoints_folder):
    """A model, and the output of each request when it runs alone."""
    name = request.param
    model = make(name, checkpoints_folder)
    with engine(model, additional_config=FREE, **engine_options(name)) as llm:
        outputs = [llm.generate_each([each], NUM_OUTPUT)[0] for each in REQUESTS]
        # A prompt stays uncompressed if its budget keeps all of its full blocks.
        assert llm.compressor.compressed >= 2 * len(PROMPTS) - 2
    return name, model, outputs


@pytest.mark.parametrize(
    "more",
    [
        # as on CUDA, where steps overlap
        pytest.param(
            {"max_num_batched_tokens": 64, "max_num_seqs": 8, "async_scheduling": V2}, id="chunks"
        ),
        pytest.param({"async_scheduling": True}, id="async", marks=model_runner_v1_only),
    ],
)
def test_output_does_not_depend_on_concurrent_requests(
    more, single_outputs, async_scheduling_allowed
):
    """Nor on the states that earlier requests left in its blocks, for either order of requests."""
    name, model, expected = single_outputs
    with engine(model, additional_config=FREE, **engine_options(name, **more)) as llm:
        free = llm.free_blocks
        for order in (1, -1):
            assert llm.generate_each(REQUESTS[::order], NUM_OUTPUT)[::order] == expected
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free


@model_runner_v1_only
def test_output_does_not_depend_on_the_pool_size(single_outputs):
    """From the smallest pool that holds the prompt and a state block of each group."""
    name, model, expected = single_outputs
    block = SHAPES[name].block
    config = CompressionConfig.parse(FREE["kvcompress"])
    plan = page_plan(config.budget_spec(2, LENGTHS[0]), block)
    min_blocks = -(-448 // block) + 2
    sizes = range(min_blocks, min_blocks + plan.blocks + 2, 2)
    options = engine_options(name, max_model_len=448, max_num_batched_tokens=64, max_num_seqs=2)
    with engine(model, blocks=1 + sizes[-1], additional_config=FREE, **options) as llm:
        assert other_layers_of(llm.scheduler.vllm_config).blocks() == 2
        in_place = llm.watch_packing(lambda done: done.pack_request.in_place)
        for _ in llm.in_smaller_pools(sizes):
            for _ in range(2):
                assert llm.generate([PROMPTS[0]], NUM_OUTPUT) == expected[:1]
    assert set(in_place) == {True, False}


def test_preempted_request_continues_as_a_prompt_of_the_same_tokens(single_outputs):
    """In a pool for one request. The interpreter is slow, so Model Runner V2 preempts both once."""
    name, model, _ = single_outputs
    # Granite has larger blocks, so a compressed request must grow further until it is preempted.
    max_tokens, num_output = (864, 200) if SHAPES[name].block > 32 else (768, 100)
    num_output, blocks = (
        (40, BLOCKS) if V2 else (num_output, 1 + -(-max_tokens // SHAPES[name].block) + 2)
    )
    options = engine_options(
        name, max_model_len=max_tokens, max_num_batched_tokens=64, max_num_seqs=8
    )
    with engine(model, additional_config=FREE, blocks=blocks, **options) as llm:
        free, preemptions = llm.free_blocks, llm.watch_preemptions()
        for i, prompt in enumerate(PROMPTS):
            llm.submit(str(i), prompt, num_output)
        if V2:
            for _ in range(20):
                llm.step()
            assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
        outputs = llm.drain()
        assert preemptions
        assert llm.free_blocks == free
    with engine(model, additional_config=FREE, **engine_options(name)) as llm:
        llm.assert_match_solo_runs(
            [
                (prompt, outputs[str(i)], preemptions.get(str(i), []), None)
                for i, prompt in enumerate(PROMPTS)
            ],
            num_output,
        )


def fill_free_blocks_with_nan(llm):
    """Fill all free blocks with NaN, so that reading one changes the output."""
    free_ids = [block.block_id for block in llm.pool.blocks if not (block.ref_cnt or block.is_null)]
    context = llm.worker.vllm_config.compilation_config.static_forward_context
    for layer in context.values():
        if hasattr(layer, "impl"):
            layer.kv_cache[free_ids] = math.nan


def test_old_contents_of_blocks_are_never_read(single_outputs):
    """vLLM clears the blocks that it allocates for these models, but not the destination blocks."""
    name, model, expected = single_outputs
    with engine(model, additional_config=FREE, **engine_options(name, max_num_seqs=8)) as llm:
        fill_free_blocks_with_nan(llm)
        for index in range(2):
            llm.submit(str(index), PROMPTS[index], NUM_OUTPUT)
        done = {}
        while llm.llm.llm_engine.has_unfinished_requests():
            done |= llm.step()
            fill_free_blocks_with_nan(llm)
        assert llm.compressor.compressed == 2
    outputs = {key: list(each.outputs[0].token_ids) for key, each in done.items()}
    assert outputs == {str(index): expected[index * len(OVERRIDES)] for index in range(2)}


@model_runner_v1_only
def test_output_of_pieces_does_not_depend_on_concurrent_requests(single_outputs):
    """States do not depend on tokens that were dropped later."""
    name, model, _ = single_outputs
    config = pieces_settings("cake", 0.4, probe=0, max_whole=192)
    prompts = [tokens(length, seed=length) for length in (531, 700, 300)]
    with engine(model, additional_config=config, **engine_options(name)) as llm:
        expected = [llm.generate([prompt], NUM_OUTPUT)[0] for prompt in prompts]
    options = engine_options(name, max_num_batched_tokens=70, max_num_seqs=4)
    with engine(model, additional_config=config, **options) as llm:
        free = llm.free_blocks
        assert llm.generate(prompts, NUM_OUTPUT) == expected
        assert llm.free_blocks == free
        assert llm.compressor.compressed == 3


# -- the prefix cache -----------------------------------------------------------------------------


@model_runner_v1_only
def test_prefix_cache_has_only_states_of_uncompressed_prompts(checkpoints_folder):
    """Requests run one at a time in chunks of a block, because vLLM's bfloat16 depends on both.

    A compressed prompt's hit ends earlier, so that its window is computed. vLLM keeps a state there
    only because the plugin makes it end a chunk there.
    """
    model, name = make(CACHED, checkpoints_folder), CACHED
    block = SHAPES[name].block
    history = tokens(4 * block + 10, seed=2)
    turns = [
        (history, {}),
        (history, {}),
        (history, {"kv_compress": "off"}),
        (history + tokens(150, seed=3), {}),
        (history + tokens(150, seed=3), {"kv_compress": "off"}),
        (history[: 3 * block + 20] + tokens(90, seed=4), {"kv_compress": "h2o"}),
    ]
    outputs = {}
    for cached in (False, True):
        options = engine_options(name, enable_prefix_caching=cached, max_num_batched_tokens=block)
        with engine(model, additional_config=FREE, **options) as llm:
            assert other_layers_of(llm.scheduler.vllm_config).groups.states == 1 + cached
            free, hits = llm.free_blocks, []
            for i, (prompt, override) in enumerate(turns):
                (result,) = llm.outputs([prompt], NUM_OUTPUT, extra_args=override)
                outputs.setdefault(i, []).append(list(result.outputs[0].token_ids))
                hits.append(result.num_cached_tokens)
            assert llm.free_blocks == free
            assert llm.compressor.compressed >= 4
    assert hits[1] == 3 * block, "the window of 32 must begin in the fourth block"
    assert hits[2] >= 3 * block
    assert hits[3] >= 3 * block
    assert hits[5] == 0, "h2o must compute the queries of all tokens"
    for without_cache, with_cache in outputs.values():
        assert without_cache == with_cache


@model_runner_v1_only
def test_qwen35_returns_its_blocks(checkpoints_folder):
    """Qwen3.5 has Qwen3-Next's layers. The prefix cache does not change its outputs.

    A budget of 1.0 gives vLLM's own outputs.
    """
    name, prompt = "qwen3.5", tokens(700, seed=1)
    model, block = make(name, checkpoints_folder), SHAPES[name].block
    overrides = ({}, {}, {"kv_budget": 1.0}, {"kv_compress": "off"})

    def run():
        outputs = []
        for cached in (False, True):
            # Chunks must end at the same tokens, because chunk ends change bfloat16 outputs.
            options = engine_options(
                name, enable_prefix_caching=cached, max_num_batched_tokens=block
            )
            with engine(model, additional_config=FREE, **options) as llm:
                assert llm.manager.block_size == block
                free = llm.free_blocks
                outputs.append(
                    [
                        llm.generate([prompt], NUM_OUTPUT, extra_args=override)[0]
                        for override in overrides
                    ]
                )
                assert llm.compressor.compressed == 2
                llm.submit("r", prompt, NUM_OUTPUT)
                while llm.compressor.compressed == 2:
                    llm.step()
                # It holds three packed blocks and the tail instead of eight blocks, and the states.
                states = other_layers_of(llm.scheduler.vllm_config).blocks()
                assert free - llm.free_blocks <= 4 + states
                llm.drain()
                assert llm.free_blocks == free
        return outputs

    for first, second, full_budget, off in (outputs := in_a_fork(run)):
        assert first == second
        assert full_budget == off
        assert first[0] == off[0]
    assert outputs[0] == outputs[1]


# -- refused options ------------------------------------------------------------------------------


@model_runner_v1_only
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("granite", {"enable_prefix_caching": True}, "add --no-enable-prefix-caching"),
        ("nemotron", {"enable_prefix_caching": True}, "add --no-enable-prefix-caching"),
        (
            "qwen3-next",
            {"enable_prefix_caching": True, "prefix_match_unit": 32},
            "remove --prefix-match-unit",
        ),
        (
            "qwen3-next",
            {"enable_prefix_caching": True, "enable_mamba_shared_prefix_checkpoint": True},
            "remove --enable-mamba-shared-prefix-checkpoint",
        ),
        ("nemotron", {"use_replayssm": True}, "remove --use-replayssm"),
        (
            "granite",
            {"additional_config": settings("cake", max_whole=2048)},
            "a probe's rows would advance the states, which cannot be rolled back;"
            " set --kv-probe 0",
        ),
        (
            "granite",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "remove --speculative-config",
        ),
        ("granite", {"kv_cache_dtype": "fp8"}, "is not tested with stateful layers"),
        ("granite", {"pipeline_parallel_size": 2}, "layers with a state were not tested together"),
        ("granite", {"disable_hybrid_kv_cache_manager": True}, "their own KV cache group"),
    ],
)
def test_options_that_do_not_work_with_states_are_refused(
    name, options, message, checkpoints_folder
):
    defaults = {"enable_prefix_caching": False, "additional_config": settings("cake")}
    with pytest.raises(ConfigError, match=message):
        configure(make(name, checkpoints_folder), **(defaults | options))


@model_runner_v1_only
def test_decode_interval_that_is_no_multiple_of_the_block_is_refused(checkpoints_folder):
    """The block size is known once the model is loaded."""
    config = settings("cake", decode_budget=200, decode_interval=128)
    with (
        pytest.raises(
            ConfigError,
            match="must be a multiple of the KV block's 96 tokens, got 128; set it to 96",
        ),
        engine(
            make("granite-96", checkpoints_folder),
            additional_config=config,
            **engine_options("granite-96"),
        ),
    ):
        pass
