"""States in the prefix cache: beside neighbours, in pools of any size, with all that packs.

With Qwen3-Next vLLM's CPU build answers in bfloat16 alone, where answers follow the batch. Granite
4 H runs in float32, where they are exact, but it is refused: vLLM asks its scan for a state inside
the step, which the scan for a CPU does not give. Here vLLM is told that its layers keep none there.
Then their states are cached where steps end, as Qwen3-Next's, by the same scheduler and managers.
"""

from dataclasses import replace

import pytest
import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

import test_yielding
from checkpoints import STATEFUL, make, tokens
from engines import V2, engine, first_runner, settings, with_states
from test_lookahead import ahead
from test_prompts_in_pieces import piecewise
from test_reference import PROMPT, equals_the_reference, packed
from vllm_kvcompress.engine.layers import other_layers_of
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.planning import model_traits, obstacles
from vllm_kvcompress.settings.config import CompressionConfig

pytestmark = with_states

NAME = "granite-96"
BLOCK = STATEFUL[NAME].block
NEW = 12
LENGTHS = (417, 300, 128, 640)
# No two of their tokens whose scores float32 cannot tell apart stand at a cut.
PROMPTS = [tokens(length, seed=length + 1) for length in LENGTHS[: 2 if V2 else None]]
PROMPTS[1][:250] = PROMPTS[0][:250]
OFF = {"kv_compress": "off"}
ASKS = [{}, OFF, {"kv_compress": "h2o"}, {"kv_budget": 0.15}]
FREE = settings("cake", 0.4, allow_override="off,cake,h2o")
PIECES = piecewise("cake", 0.4, probe=0, max_whole=192)
AHEAD = ahead("cake", 0.3, lookahead=6, allow_override="off")
BOUNDED = settings("cake", 150, decode_budget=2 * BLOCK, decode_window=8)
KINDS = {  # settings, what is asked for, tokens of the answers
    "prompts": (FREE, [(prompt, ask) for prompt in PROMPTS for ask in ASKS], NEW),
    "pieces": (PIECES, [(tokens(n, seed=n), {}) for n in (531, 700, 300)], NEW),
    "look-ahead": (AHEAD, [(prompt, ask) for prompt in PROMPTS for ask in ({}, OFF)], NEW),
    "bounded": (BOUNDED, [(prompt, {}) for prompt in PROMPTS[:3]], 110),
}


@pytest.fixture(scope="module", autouse=True)
def states_of_whole_steps():
    """Granite's states are cached where steps end, and it is not refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec)
        served = model_traits.WITH_CACHED_STATES | {"GraniteMoeHybridForCausalLM"}
        for module in (model_traits, obstacles):
            patch.setattr(module, "WITH_CACHED_STATES", served)
        yield


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make(NAME, checkpoints_folder)


def started(model, config, **more):
    options = dict(mamba_ssm_cache_dtype="float32", max_model_len=1024, max_num_seqs=8)
    return engine(model, additional_config=config, **(options | more))


def uncached(model, config):
    """An engine whose requests find nothing of others."""
    return started(model, config, enable_prefix_caching=False)


def run(llm, asked, new):
    """Answers to requests that come together, and tokens that each found in the cache."""
    for number, (prompt, ask) in enumerate(asked):
        llm.submit(str(number), prompt, new, extra_args=ask)
    done = {}
    while llm.llm.llm_engine.has_unfinished_requests():
        done |= {int(key.split("-")[0]): output for key, output in llm.step().items()}
    every = [done[number] for number in range(len(asked))]
    answers = [list(each.outputs[0].token_ids) for each in every]
    return answers, [each.num_cached_tokens for each in every]


@pytest.fixture(scope="module", params=["prompts"] if V2 else KINDS)
def alone(request, model):
    """A kind of requests, and each one's answer by itself."""
    config, asked, new = KINDS[request.param]
    with uncached(model, config) as llm:
        return request.param, [
            llm.generate([prompt], new, extra_args=ask)[0] for prompt, ask in asked
        ]


@pytest.mark.parametrize(
    "more",
    [
        # as on CUDA, where steps overlap
        pytest.param({"max_num_batched_tokens": 70, "async_scheduling": V2}, id="chunks"),
        pytest.param({"async_scheduling": True}, id="async", marks=first_runner),
    ],
)
def test_an_answer_depends_on_its_own_tokens(more, alone, model, keep_async_scheduling):
    """Whatever states it finds of whom, in either order: all of them were computed whole."""
    kind, want = alone
    config, asked, new = KINDS[kind]
    with started(model, config, **more) as llm:
        assert other_layers_of(llm.scheduler.vllm_config).groups.states == 2
        free = llm.free_blocks
        for order in (1, -1):
            answers, hits = run(llm, asked[::order], new)
            assert answers[::order] == want
        llm.settle()
        assert llm.free_blocks == free
    for (prompt, ask), hit in zip(asked, hits[::-1], strict=True):
        if ask.get("kv_compress") == "h2o":
            assert hit == 0, "it reads the whole prompt"
        else:
            assert 0 < hit < len(prompt)


@first_runner
def test_a_conversation_is_cached_as_far_as_it_was_computed_whole(checkpoints_folder):
    """A turn holds the last one's answer, whose states follow from what its prompt kept."""
    model, asks = make("granite", checkpoints_folder), ({}, OFF, {})
    history, turns, hits = tokens(350, seed=2), [], []
    with started(model, FREE) as llm:
        for turn in range(2):
            for new, ask in zip((80, NEW, NEW), asks, strict=True):
                (output,) = llm.outputs([history], new, extra_args=ask)
                turns.append((history, ask, list(output.outputs[0].token_ids)))
            hits.append(output.num_cached_tokens)
            history = history + turns[-3][2] + tokens(50, seed=turn)
    # of 350 and of 480 tokens, without a window of 32, in blocks of 32
    assert hits == [288, 448]
    with uncached(model, FREE) as llm:
        for history, ask, answer in turns:
            assert llm.generate([history], len(answer), extra_args=ask) == [answer]


@first_runner
@pytest.mark.parametrize(
    ("config", "longest", "in_place"),
    [
        pytest.param(FREE, 448, {True, False}, id="prompts"),
        # what its pieces hold has room in a pool for fewer tokens
        pytest.param(PIECES, 359, {True}, id="pieces"),
        pytest.param(AHEAD, 448, {False}, id="look-ahead"),
    ],
)
def test_in_a_pool_of_any_size_it_ends_and_is_the_same(config, longest, in_place, model):
    """From the smallest that vLLM starts with; what it finds of itself was given away or not."""
    plan = page_plan(CompressionConfig.parse(config["kvcompress"]).prompt(2, LENGTHS[0]), BLOCK)
    with uncached(model, config) as llm:
        want = llm.generate([PROMPTS[0]], NEW)
    places, hits, least = set(), set(), -(-longest // BLOCK) + 2 * 2
    for blocks in range(least, least + plan.blocks + 3):
        options = dict(max_model_len=448, max_num_batched_tokens=64, max_num_seqs=2)
        with started(model, config, blocks=1 + blocks, **options) as llm:
            packings = llm.watch_packing(lambda finished: finished.pack_request.in_place)
            for _ in range(2):
                answers, found = run(llm, [(PROMPTS[0], {})], NEW)
                assert answers == want
                hits |= set(found)
            places |= set(packings)
            assert llm.free_blocks == blocks
    assert places == in_place
    assert min(hits) == 0 < max(hits)


# -- preemption -----------------------------------------------------------------------------------


def preempt(llm):
    """Preempt the one that runs; returns tokens that it finds in the cache when it comes back."""
    cache = llm.scheduler.kv_cache_manager
    look, found = cache.get_computed_blocks, []

    def looking(request):
        blocks, tokens, *more = look(request)
        found.append(tokens)
        return blocks, tokens, *more

    (request,) = llm.running()
    llm.preempt(request)
    cache.get_computed_blocks = looking
    while not request.num_computed_tokens:
        llm.step()
    cache.get_computed_blocks = look
    return found.pop()


@first_runner
@pytest.mark.parametrize("config", [FREE, PIECES, BOUNDED], ids=["prompts", "pieces", "bounded"])
def test_preempted_it_goes_on_as_a_prompt_of_the_same_tokens(config, model):
    """Its own states are there still, where nobody else has taken their blocks."""
    new, longest = 110 if config is BOUNDED else 60, 768
    options = dict(max_model_len=longest, max_num_batched_tokens=64)
    with started(model, config, blocks=1 + -(-longest // BLOCK) + 2 * 2, **options) as llm:
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        answers = llm.answers([(prompt, {}) for prompt in PROMPTS], new)
        assert cuts
        assert llm.free_blocks == free
        # and once more in the midst of an answer
        llm.submit("again", PROMPTS[1], new)
        while llm.step() is not None and llm.running()[0].num_output_tokens < new // 2:
            pass
        assert preempt(llm) > 0
        (again,) = llm.drain().values()
        assert cuts["again"] == [new // 2]
    with uncached(model, config) as llm:
        for i, prompt in enumerate(PROMPTS):
            llm.alone(prompt, new, answers[i], cuts.get(str(i), []))
        llm.alone(PROMPTS[1], new, again, cuts["again"])


@first_runner
@pytest.mark.parametrize("answered", [1, 20])
def test_a_look_ahead_that_is_preempted_finds_its_states(answered, model):
    """Nothing was dropped until it is over; so it is judged as if nobody had come between."""
    m, new = 24, 40
    with started(model, ahead("cake", 0.3, lookahead=m)) as llm:
        want = llm.generate([PROMPTS[0]], new)
        assert llm.scheduler.reset_prefix_cache()
        judged = llm.watch_packing(
            lambda done: (done.pack_request.tokens, done.pack_request.answered)
        )
        llm.submit("r", PROMPTS[0], new)
        while llm.step() is not None and llm.running()[0].num_output_tokens < answered:
            pass
        assert preempt(llm) == LENGTHS[0] // BLOCK * BLOCK
        assert [*llm.drain().values()] == want
    assert judged == [(LENGTHS[0] + m, m)]


def record_guesses(llm):
    """From now on: what each step was guessed to take, and what those took who ran before it."""
    manager, cache, seen = llm.manager, llm.scheduler.kv_cache_manager, []
    allocate, take, latest = cache.allocate_slots, manager.take_step, [0, 0, ()]

    def allocating(request, *args, **kwargs):
        before = llm.free_blocks
        found = allocate(request, *args, **kwargs)
        if request.request_id in latest[2]:
            latest[1] += before - llm.free_blocks
        return found

    def taking(following):
        plan = take(following)
        seen.append(tuple(latest[:2]))
        guess = following.blocks(set(manager.lookaheads._all))
        latest[:] = guess, 0, {each.request_id for each in llm.running()}
        return plan

    cache.allocate_slots, manager.take_step = allocating, taking
    return seen


@first_runner
def test_no_request_is_preempted_while_another_looks_ahead(checkpoints_folder):
    """Too few blocks, guessed for the next step, would let one be for which another gives way."""
    kind = test_yielding.Kind(model="granite", pool=90, small=28)
    options = dict(blocks=1 + kind.pool, max_model_len=512, max_num_seqs=16)
    model, config = make(kind.model, checkpoints_folder), test_yielding.config()
    with started(model, config, max_num_batched_tokens=256, **options) as llm:
        watched, guesses = test_yielding.Watched(llm), record_guesses(llm)
        for seed in kind.seeds:
            done = test_yielding.run(llm, kind, seed)
            assert len(done) == len(list(test_yielding.requests(seed)))
    assert watched.preempted, "pools were meant to be too small"
    assert watched.cuts, "look-aheads were meant to give way"
    assert not watched.left
    assert all(taken <= guess for guess, taken in guesses)
    assert any(taken for _, taken in guesses)


@first_runner
def test_what_vllm_leaves_of_a_step_where_it_ends_a_chunk_is_others(checkpoints_folder):
    """Behind a chunk that ends at a block, three that are short take a state of each group."""
    options = dict(max_num_batched_tokens=64, max_model_len=1024)
    config = ahead("cake", 0.3, lookahead=200)
    with started(make("granite", checkpoints_folder), config, **options) as llm:
        llm.submit("looking", PROMPTS[1], 200)
        for _ in range(7):
            llm.step()
        guesses = record_guesses(llm)
        for at, length in enumerate((900, 10, 10, 10)):
            llm.submit(str(at), tokens(length, seed=at), 60)
        llm.drain()
    assert all(taken <= guess for guess, taken in guesses)
    assert max(taken for _, taken in guesses) > 6


@first_runner
def test_a_look_ahead_does_not_give_way_to_states_that_nobody_takes(checkpoints_folder):
    """A step writes one state of each group, and not one for each block that it computes."""
    config = ahead("cake", 0.3, lookahead=200)
    # 10 and 19 blocks, of which a step computes 8, and two states of each of two groups
    options = dict(blocks=1 + 42, max_num_batched_tokens=257, max_model_len=640)
    with started(make("granite", checkpoints_folder), config, **options) as llm:
        packings = []
        llm.compressor.packer.observers.append(
            lambda pack_request, *_: packings.append(pack_request.cut)
        )
        looking = llm.submit("looking", PROMPTS[1], 60)
        for _ in range(3):
            llm.step()
        llm.submit("long", tokens(600, seed=1), 2)
        done = llm.drain()
    assert {name.split("-")[0] for name in done} == {looking, "long"}
    assert packings == []


# -- hits -----------------------------------------------------------------------------------------


@first_runner
def test_a_hit_ends_where_the_window_begins_though_another_prompt_begins_alike(model):
    """vLLM keeps the state where they part, and then the one where hits for this prompt end."""
    common = tokens(2 * BLOCK + 5, seed=1)
    other, third = (common + tokens(200, seed=seed) for seed in (2, 4))
    prompt = common + tokens(5 * BLOCK + 10 - len(common), seed=3)
    with started(model, FREE) as llm:
        found = [
            llm.outputs([each])[0].num_cached_tokens for each in (other, prompt, prompt, third)
        ]
    # of five blocks and ten tokens a window of 32 leaves four
    assert found == [0, 0, 4 * BLOCK, 2 * BLOCK]


# -- against float64 ------------------------------------------------------------------------------


def record_rows(llm):
    """From now on: of each step, the requests in its batch, as submitted, and their tokens."""
    steps, runner = [], llm.worker.model_runner
    execute = runner.execute_model

    def executing(output, *args, **kwargs):
        done = execute(output, *args, **kwargs)
        if output.num_scheduled_tokens:
            counts = output.num_scheduled_tokens
            steps.append(
                [(name.split("-")[0], counts[name]) for name in runner.input_batch.req_ids]
            )
        return done

    runner.execute_model = executing
    return steps


def of_request(seen, steps, name):
    """What `record_attention` recorded of one request's tokens."""
    own = {}
    for layer, parts in seen.items():
        own[layer] = {"sinks": parts["sinks"]}
        for part in ("q", "k", "v", "out"):
            rows = []
            for recorded, batch in zip(parts[part], steps, strict=True):
                of_each = recorded.split([count for _, count in batch])
                rows += [of for (who, _), of in zip(batch, of_each, strict=True) if who == name]
            own[layer][part] = torch.cat(rows)
    return own


@first_runner
def test_pages_hold_what_the_method_says_beside_neighbours(checkpoints_folder):
    """In bfloat16 too, where answers follow the batch: what was found is what another computed."""
    shape = STATEFUL["qwen3-next"]
    config = settings("cake", 0.7, allow_override="off")
    options = dict(dtype=shape.dtype, max_num_batched_tokens=150)
    with started(make("qwen3-next", checkpoints_folder), config, **options) as llm:
        seen, steps, free = llm.record_attention(), record_rows(llm), llm.free_blocks
        llm.submit("before", PROMPT, 2, extra_args=OFF)
        llm.drain()
        llm.submit("beside", tokens(250, seed=9), 60, extra_args=OFF)
        for _ in range(5):
            llm.step()
        llm.submit("same", PROMPT, 8)
        llm.submit("alike", PROMPT[:250] + tokens(200, seed=8), 20, extra_args=OFF)
        counts, held = packed(llm)
        llm.drain()
        assert llm.free_blocks == free
    hit = len(PROMPT) - 32
    hit -= hit % shape.block
    before, same = (of_request(seen, steps, name) for name in ("before", "same"))
    for layer, parts in same.items():
        for part in ("q", "k", "v", "out"):
            whole, own = before[layer][part], parts[part]
            assert len(own) == len(PROMPT) - hit + 7
            # from the state that was found, as from those tokens
            same_rows = whole[hit : len(PROMPT)].float(), own[: len(PROMPT) - hit].float()
            assert part == "out" or torch.cosine_similarity(*same_rows, dim=-1).min() > 0.999
            parts[part] = [whole[:hit], own]
    assert any({"same", "beside", "alike"} <= {name for name, _ in batch} for batch in steps)
    made = CompressionConfig.parse(config["kvcompress"])
    shape = replace(shape, layers=len(same))
    equals_the_reference(made, same, counts, held, shape, len(PROMPT))
