"""Models some of whose layers keep a state, of linear attention or a state space.

The full layers are compressed, the states stay vLLM's. `test_reference` holds what is kept against
the methods, and `test_hybrids` has what any second group of layers could break. Here is what is new
with states: blocks of 96 tokens, rows that cannot be taken back, and a prefix cache that has a
state at few places.
"""

import math
from dataclasses import replace

import pytest

import test_decode_budgets
import test_lookahead
import test_prompts_in_pieces
from checkpoints import STATEFUL, make, tokens
from configuring import configure
from engines import BLOCKS, V2, engine, first_runner, settings, with_states
from stand_in_torchvision import in_a_fork
from test_decode_budgets import Replay
from test_lookahead import Ahead, ahead
from test_prompts_in_pieces import PieceReplay, piecewise
from vllm_kvcompress.engine.layers import other_layers_of
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.settings.config import CompressionConfig

pytestmark = with_states

FLOAT32 = ["granite-96", "nemotron"]
# vLLM's CPU build keeps states in its prefix cache for this one alone
CACHED = "qwen3-next"
NEW = 12
FREE = settings("cake", 0.4, allow_override="off,cake,h2o")


def asked(name, **more):
    """Options of an engine of this model."""
    own = dict(
        dtype=STATEFUL[name].dtype,
        mamba_ssm_cache_dtype="float32",  # whatever the processor has
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    return {**own, **more}


def full_layers(name, seen):
    """The checkpoint's shape as one of compressed layers alone."""
    return replace(STATEFUL[name], layers=len(seen))


@pytest.fixture
def longer_blocks(monkeypatch):
    """The replays' blocks are as long as a model's."""

    def use(name):
        for module in (test_decode_budgets, test_prompts_in_pieces, test_lookahead):
            monkeypatch.setattr(module, "BLOCK", STATEFUL[name].block)

    return use


# -- against float64 ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOAT32[:1] if V2 else FLOAT32)
def test_every_token_of_a_prompt_in_pieces_reads_what_the_reference_holds(
    name, checkpoints_folder, longer_blocks
):
    longer_blocks(name)
    length, answer = 531, 30
    config = piecewise("cake", 0.5, probe=0, max_whole=192)
    with engine(
        make(name, checkpoints_folder),
        additional_config=config,
        **asked(name, max_num_seqs=4, max_num_batched_tokens=70),
    ) as llm:
        seen, free = llm.record_attention(), llm.free_blocks
        llm.submit("r", tokens(length, seed=5), answer)
        llm.drain()
        assert llm.free_blocks == free
    replay = PieceReplay("cake", full_layers(name, seen), seen, length, int(length * 0.5))
    replay.to_the_end(length + answer)
    assert replay.packed_at[-1] == length
    assert len(replay.packed_at) >= 2


@pytest.mark.parametrize("name", FLOAT32)
def test_a_look_ahead_reads_what_the_reference_holds(name, checkpoints_folder, longer_blocks):
    longer_blocks(name)
    length, m, answer = 417, 12, 30
    with engine(
        make(name, checkpoints_folder),
        additional_config=ahead("cake", 0.3, lookahead=m),
        **asked(name, max_num_seqs=4, max_num_batched_tokens=150),
    ) as llm:
        seen, free = llm.record_attention(), llm.free_blocks
        llm.submit("r", tokens(length, seed=33), answer)
        llm.drain()
        assert llm.free_blocks == free
    replay = Ahead("cake", full_layers(name, seen), seen, length, m).whole()
    for position in range(length, length + answer - 1):
        replay.step(position)
    assert replay.packed_at == [length + m]


@pytest.mark.parametrize("name", FLOAT32)
def test_an_answer_is_packed_at_the_ends_of_blocks(name, checkpoints_folder, longer_blocks):
    """The interval that nobody gave is as long as the block, or as many as 128 tokens hold."""
    longer_blocks(name)
    block, answer = STATEFUL[name].block, 200
    bound, prompt = 2 * block, 2 * block + 9
    config = settings("cake", 0.4, min_prompt=1024, decode_budget=bound, decode_window=8)
    with engine(
        make(name, checkpoints_folder), additional_config=config, **asked(name, max_num_seqs=2)
    ) as llm:
        interval = llm.manager.settings.decode_interval
        assert interval == llm.worker.settings.decode_interval == 128 // block * block
        seen, free = llm.record_attention(), llm.free_blocks
        llm.submit("r", tokens(prompt, seed=4), answer)
        llm.drain()
        assert llm.free_blocks == free
    shape = full_layers(name, seen)
    replay = Replay("cake", shape, seen, prompt, bound, answer)
    replay.interval = interval
    for position in range(prompt, prompt + answer - 1):
        replay.step(position)
    assert len(replay.packed_at) >= 2


# -- requests side by side ------------------------------------------------------------------------

LENGTHS = (417, 300, 128, 640)
# A scan's rounding depends on its chunks: of these prompts no two tokens whose scores float32
# cannot tell apart stand at a cut.
PROMPTS = [tokens(length, seed=length + 1) for length in LENGTHS[: 2 if V2 else None]]
PROMPTS[1][:250] = PROMPTS[0][:250]
ASKS = [{}, {"kv_compress": "off"}, {"kv_compress": "h2o"}, {"kv_budget": 0.15}]


def answers(llm, order=1):
    every = [(prompt, ask) for prompt in PROMPTS for ask in ASKS]
    return llm.answers(every[::order], NEW)[::order]


@pytest.fixture(scope="module", params=FLOAT32)
def alone(request, checkpoints_folder):
    """A model, and each answer by itself."""
    name, found = request.param, []
    model = make(name, checkpoints_folder)
    with engine(model, additional_config=FREE, **asked(name)) as llm:
        for prompt in PROMPTS:
            found += [llm.generate([prompt], NEW, extra_args=ask)[0] for ask in ASKS]
        # what keeps all of its full blocks is left whole
        assert llm.compressor.compressed >= 2 * len(PROMPTS) - 2
    return name, model, found


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 8}, id="chunks"),
        pytest.param({"async_scheduling": True}, id="async"),
    ],
)
def test_an_answer_depends_on_its_own_tokens(more, alone, keep_async_scheduling):
    """Whoever ran before in the same blocks and left whatever state there, in either order."""
    name, model, want = alone
    with engine(model, additional_config=FREE, **asked(name, **more)) as llm:
        free = llm.free_blocks
        for order in (1, -1):
            assert answers(llm, order) == want
        llm.settle()
        assert llm.free_blocks == free


@first_runner
def test_in_a_pool_of_any_size_it_ends_and_is_the_same(alone):
    """From the smallest that holds the prompt and a block of each group with states."""
    name, model, want = alone
    block, used = STATEFUL[name].block, set()
    config = CompressionConfig.parse(FREE["kvcompress"])
    plan = page_plan(config.prompt(2, LENGTHS[0]), block)
    least = -(-448 // block) + 2
    for blocks in range(least, least + plan.blocks + 2):
        options = asked(name, max_model_len=448, max_num_batched_tokens=64, max_num_seqs=2)
        with engine(model, blocks=1 + blocks, additional_config=FREE, **options) as llm:
            assert other_layers_of(llm.scheduler.vllm_config).blocks() == 2
            places = llm.watch_packing(lambda finished: finished.pack_request.in_place)
            for _ in range(2):
                assert llm.generate([PROMPTS[0]], NEW) == want[:1]
            used |= set(places)
            assert llm.free_blocks == blocks
    assert used == {True, False}


def test_preempted_it_goes_on_as_a_prompt_of_the_same_tokens(alone):
    """In a pool for one; the interpreter has no time for as many tokens, and preempts both once."""
    name, model, _ = alone
    new, blocks = (40, BLOCKS) if V2 else (200, 1 + -(-864 // STATEFUL[name].block) + 2)
    options = asked(name, max_model_len=864, max_num_batched_tokens=64, max_num_seqs=8)
    with engine(model, additional_config=FREE, blocks=blocks, **options) as llm:
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        for i, prompt in enumerate(PROMPTS):
            llm.submit(str(i), prompt, new)
        if V2:
            for _ in range(20):
                llm.step()
            assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
        done = {int(key.split("-")[0]): answer for key, answer in llm.drain().items()}
        assert cuts
        assert llm.free_blocks == free
    with engine(model, additional_config=FREE, **asked(name)) as llm:
        for i, prompt in enumerate(PROMPTS):
            llm.alone(prompt, new, done[i], cuts.get(str(i), []))


def spoil_free_blocks(llm):
    """Leave in them what no sum survives."""
    free = [block.block_id for block in llm.pool.blocks if not (block.ref_cnt or block.is_null)]
    context = llm.worker.vllm_config.compilation_config.static_forward_context
    for layer in context.values():
        if hasattr(layer, "impl"):
            layer.kv_cache[free] = math.nan


def test_what_was_in_a_block_before_is_read_by_nobody(alone):
    """vLLM empties the blocks that it gives out for these models, and not those that are packed."""
    name, model, want = alone
    with engine(model, additional_config=FREE, **asked(name, max_num_seqs=8)) as llm:
        spoil_free_blocks(llm)
        for number in range(2):
            llm.submit(str(number), PROMPTS[number], NEW)
        done = {}
        while llm.llm.llm_engine.has_unfinished_requests():
            done |= llm.step()
            spoil_free_blocks(llm)
        assert llm.compressor.compressed == 2
    answers = {key.split("-")[0]: list(each.outputs[0].token_ids) for key, each in done.items()}
    assert answers == {str(number): want[number * len(ASKS)] for number in range(2)}


@first_runner
def test_pieces_of_any_prompt_depend_on_its_own_tokens(alone):
    """Its states too, which know what was computed and not what was dropped behind it."""
    name, model, _ = alone
    config = piecewise("cake", 0.4, probe=0, max_whole=192)
    prompts = [tokens(length, seed=length) for length in (531, 700, 300)]
    with engine(model, additional_config=config, **asked(name)) as llm:
        want = [llm.generate([prompt], NEW)[0] for prompt in prompts]
    options = asked(name, max_num_batched_tokens=70, max_num_seqs=4)
    with engine(model, additional_config=config, **options) as llm:
        free = llm.free_blocks
        assert llm.generate(prompts, NEW) == want
        assert llm.free_blocks == free
        assert llm.compressor.compressed == 3


# -- the prefix cache -----------------------------------------------------------------------------


def test_states_in_the_prefix_cache_are_those_of_whole_prompts(checkpoints_folder):
    """In sequence and in chunks of a block: in bfloat16 vLLM's CPU build answers by both.

    A compressed prompt's hit is cut short, so that its window is computed. vLLM has a state there
    only because it is told to stop there.
    """
    model, name = make(CACHED, checkpoints_folder), CACHED
    block = STATEFUL[name].block
    history = tokens(4 * block + 10, seed=2)
    turns = [
        (history, {}),
        (history, {}),
        (history, {"kv_compress": "off"}),
        (history + tokens(150, seed=3), {}),
        (history + tokens(150, seed=3), {"kv_compress": "off"}),
        (history[: 3 * block + 20] + tokens(90, seed=4), {"kv_compress": "h2o"}),
    ]
    found = {}
    for cached in (False, True):
        options = asked(name, enable_prefix_caching=cached, max_num_batched_tokens=block)
        with engine(model, additional_config=FREE, **options) as llm:
            assert other_layers_of(llm.scheduler.vllm_config).groups.states == 1 + cached
            free, hits = llm.free_blocks, []
            for i, (prompt, ask) in enumerate(turns):
                (output,) = llm.outputs([prompt], NEW, extra_args=ask)
                found.setdefault(i, []).append(list(output.outputs[0].token_ids))
                hits.append(output.num_cached_tokens)
            assert llm.free_blocks == free
            assert llm.compressor.compressed >= 4
    assert hits[1] == 3 * block, "its window of 32 reaches into the fourth block"
    assert hits[2] >= 3 * block
    assert hits[3] >= 3 * block
    assert hits[5] == 0, "h2o reads the whole prompt"
    for with_and_without in found.values():
        assert with_and_without[0] == with_and_without[1]


@first_runner
def test_qwen35_gives_its_blocks_back(checkpoints_folder):
    """Its layers are Qwen3-Next's. The prefix cache on and off answer alike, and 1.0 as vLLM."""
    name, prompt = "qwen3.5", tokens(700, seed=1)
    model, block = make(name, checkpoints_folder), STATEFUL[name].block
    asks = ({}, {}, {"kv_budget": 1.0}, {"kv_compress": "off"})

    def run():
        found = []
        for cached in (False, True):
            # chunks that end alike, since their ends show in bfloat16
            options = asked(name, enable_prefix_caching=cached, max_num_batched_tokens=block)
            with engine(model, additional_config=FREE, **options) as llm:
                assert llm.manager.block_size == block
                free = llm.free_blocks
                found.append([llm.generate([prompt], NEW, extra_args=ask)[0] for ask in asks])
                assert llm.compressor.compressed == 2
                llm.submit("r", prompt, NEW)
                while llm.compressor.compressed == 2:
                    llm.step()
                # of eight blocks the tail's and three packed ones, and a state of each group
                states = other_layers_of(llm.scheduler.vllm_config).blocks()
                assert free - llm.free_blocks <= 4 + states
                llm.drain()
                assert llm.free_blocks == free
        return found

    for first, again, everything, off in (found := in_a_fork(run)):
        assert first == again
        assert everything == off
        assert first[0] == off[0]
    assert found[0] == found[1]


# -- what is refused ------------------------------------------------------------------------------


@first_runner
@pytest.mark.parametrize(
    ("name", "options", "said"),
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
            "a probe's rows would advance the states, which cannot be taken back; set --kv-probe 0",
        ),
        (
            "granite",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "remove --speculative-config",
        ),
        ("granite", {"kv_cache_dtype": "fp8"}, "beside layers that keep a state is not tested"),
        ("granite", {"pipeline_parallel_size": 2}, "or states are not tested"),
        ("granite", {"disable_hybrid_kv_cache_manager": True}, "blocks of their own"),
    ],
)
def test_what_is_not_tested_with_states_is_refused(name, options, said, checkpoints_folder):
    plain = {"enable_prefix_caching": False, "additional_config": settings("cake")}
    with pytest.raises(ConfigError, match=said):
        configure(make(name, checkpoints_folder), **(plain | options))


@first_runner
def test_an_interval_that_is_given_and_does_not_fit_is_refused(checkpoints_folder):
    """The block is known once the model is loaded."""
    config = settings("cake", decode_budget=200, decode_interval=128)
    with (
        pytest.raises(ConfigError, match="which has 96 tokens here, got 128; set it to 96"),
        engine(
            make("granite-96", checkpoints_folder), additional_config=config, **asked("granite-96")
        ),
    ):
        pass
