"""States in the prefix cache: with concurrent requests, in small pools, for every kind of packing.

vLLM's CPU build runs Qwen3-Next only in bfloat16, where outputs depend on the batch. Granite 4 H
runs in float32, where outputs are exact, but we refuse its prefix cache: vLLM wants states from
inside a step, which its CPU scan does not return. These tests make vLLM cache Granite's states only
at the end of a step, as it does for Qwen3-Next, with the same scheduler and block managers.
"""

from dataclasses import replace

import pytest
import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from checkpoints import STATEFUL, make, tokens
from engines import engine, settings, with_states
from test_early_compression import (
    EngineKind,
    PressureWatch,
    load_requests,
    pressure_config,
    run_load,
)
from test_lookahead import lookahead_config
from test_prompts_in_pieces import pieces_settings
from test_reference import PROMPT, assert_equals_reference, packed
from vllm_kvcompress.engine.layers import other_layers_of
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.planning import model_traits
from vllm_kvcompress.settings.config import CompressionConfig

pytestmark = with_states

NAME = "granite-96"
BLOCK = STATEFUL[NAME].block
NUM_OUTPUT = 12
LENGTHS = (417, 300, 128, 640)
# At the thresholds of these prompts, no two scores are too close for float32.
PROMPTS = [tokens(length, seed=length + 1) for length in LENGTHS]
PROMPTS[1][:250] = PROMPTS[0][:250]
OFF = {"kv_compress": "off"}
OVERRIDES = [{}, OFF, {"kv_compress": "h2o"}, {"kv_budget": 0.15}]
FREE = settings("cake", 0.4, allow_override="off,cake,h2o")
PIECES = pieces_settings("cake", 0.4, probe=0, max_whole=192)
LOOKAHEAD = lookahead_config("cake", 0.3, lookahead=6, allow_override="off")
BOUNDED = settings("cake", 150, decode_budget=2 * BLOCK, decode_window=8)
KINDS = {  # settings, prompts with overrides, output tokens
    "prompts": (
        FREE,
        [
            *((prompt, override) for prompt in PROMPTS[:2] for override in OVERRIDES),
            *((prompt, override) for prompt in PROMPTS[2:] for override in OVERRIDES[::2]),
        ],
        NUM_OUTPUT,
    ),
    "pieces": (PIECES, [(tokens(n, seed=n), {}) for n in (531, 700, 300)], NUM_OUTPUT),
    "look-ahead": (
        LOOKAHEAD,
        [(prompt, override) for prompt in PROMPTS for override in ({}, OFF)],
        NUM_OUTPUT,
    ),
    "bounded": (BOUNDED, [(prompt, {}) for prompt in PROMPTS[:3]], 110),
}


@pytest.fixture(scope="module", autouse=True)
def states_of_whole_steps():
    """Cache Granite's states at the end of a step, and do not refuse the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec)
        served = model_traits.CACHED_STATE_MODELS | {"GraniteMoeHybridForCausalLM"}
        patch.setattr(model_traits, "CACHED_STATE_MODELS", served)
        yield


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make(NAME, checkpoints_folder)


def start_engine(model, config, **more):
    options = dict(mamba_ssm_cache_dtype="float32", max_model_len=1024, max_num_seqs=8)
    return engine(model, additional_config=config, **(options | more))


def start_uncached(model, config):
    """Start an engine without a prefix cache."""
    return start_engine(model, config, enable_prefix_caching=False)


def run(llm, requests, num_output):
    """Run requests together. Return their outputs and their numbers of cached tokens."""
    for index, (prompt, override) in enumerate(requests):
        llm.submit(str(index), prompt, num_output, extra_args=override)
    done = {}
    while llm.llm.llm_engine.has_unfinished_requests():
        done |= llm.step()
    results = [done[str(index)] for index in range(len(requests))]
    outputs = [list(result.outputs[0].token_ids) for result in results]
    return outputs, [result.num_cached_tokens for result in results]


@pytest.fixture(scope="module", params=KINDS)
def single_outputs(request, model):
    """A kind of requests, and the output of each request when it runs alone."""
    config, requests, num_output = KINDS[request.param]
    with start_uncached(model, config) as llm:
        return request.param, [
            llm.generate([prompt], num_output, extra_args=override)[0]
            for prompt, override in requests
        ]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"max_num_batched_tokens": 70}, id="chunks"),
        pytest.param({"async_scheduling": True}, id="async"),
    ],
)
def test_output_does_not_depend_on_concurrent_requests(
    more, single_outputs, model, async_scheduling_allowed
):
    """Cached states come from uncompressed contexts only, for either order of requests."""
    kind, expected = single_outputs
    config, requests, num_output = KINDS[kind]
    with start_engine(model, config, **more) as llm:
        assert other_layers_of(llm.scheduler.vllm_config).groups.states == 2
        free_before = llm.free_blocks
        for order in (1, -1):
            outputs, hits = run(llm, requests[::order], num_output)
            assert outputs[::order] == expected
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free_before
    for (prompt, override), hit in zip(requests, hits[::-1], strict=True):
        # A prompt needs two full blocks to be compressed.
        if override.get("kv_compress") == "h2o" and len(prompt) >= 2 * BLOCK:
            assert hit == 0, "h2o must compute the queries of all tokens"
        else:
            assert 0 < hit < len(prompt)


def test_conversation_reuses_only_uncompressed_states(checkpoints_folder):
    """Each turn's prompt contains the last output, whose states depend on a compressed prompt."""
    model, overrides = make("granite", checkpoints_folder), ({}, OFF, {})
    history, turns, hits = tokens(350, seed=2), [], []
    with start_engine(model, FREE) as llm:
        for turn in range(2):
            for num_output, override in zip((80, NUM_OUTPUT, NUM_OUTPUT), overrides, strict=True):
                (result,) = llm.outputs([history], num_output, extra_args=override)
                turns.append((history, override, list(result.outputs[0].token_ids)))
            hits.append(result.num_cached_tokens)
            history = history + turns[-3][2] + tokens(50, seed=turn)
    # The prompts have 350 and 480 tokens. Window and block size are 32.
    assert hits == [288, 448]
    with start_uncached(model, FREE) as llm:
        for history, override, output in turns:
            assert llm.generate([history], len(output), extra_args=override) == [output]


@pytest.mark.parametrize(
    ("config", "min_tokens", "in_place"),
    [
        pytest.param(FREE, 448, {True, False}, id="prompts"),
        # With pieces, the smallest pool that starts holds fewer tokens.
        pytest.param(PIECES, 359, {True}, id="pieces"),
        pytest.param(LOOKAHEAD, 448, {False}, id="look-ahead"),
    ],
)
def test_output_does_not_depend_on_the_pool_size(config, min_tokens, in_place, model):
    """From the smallest pool that starts. A repeated prompt may find its states or not."""
    plan = page_plan(
        CompressionConfig.parse(config["kvcompress"]).budget_spec(2, LENGTHS[0]), BLOCK
    )
    with start_uncached(model, config) as llm:
        expected = llm.generate([PROMPTS[0]], NUM_OUTPUT)
    all_hits, min_blocks = set(), -(-min_tokens // BLOCK) + 2 * 2
    sizes = range(min_blocks, min_blocks + plan.blocks + 6, 2)
    options = dict(max_model_len=448, max_num_batched_tokens=64, max_num_seqs=2)
    with start_engine(model, config, blocks=1 + sizes[-1], **options) as llm:
        packings = llm.watch_packing(lambda done: done.pack_request.in_place)
        for _ in llm.in_smaller_pools(sizes):
            for _ in range(2):
                outputs, hits = run(llm, [(PROMPTS[0], {})], NUM_OUTPUT)
                assert outputs == expected
                all_hits |= set(hits)
    assert set(packings) == in_place
    assert min(all_hits) == 0 < max(all_hits)


# -- preemption -----------------------------------------------------------------------------------


def preempt(llm):
    """Preempt the running request. Return its cached tokens when it is scheduled again."""
    cache = llm.scheduler.kv_cache_manager
    get_computed_blocks, hits = cache.get_computed_blocks, []

    def recording(request):
        blocks, num_cached, *more = get_computed_blocks(request)
        hits.append(num_cached)
        return blocks, num_cached, *more

    (request,) = llm.running()
    llm.preempt(request)
    cache.get_computed_blocks = recording
    while not request.num_computed_tokens:
        llm.step()
    cache.get_computed_blocks = get_computed_blocks
    return hits.pop()


@pytest.mark.parametrize("config", [FREE, PIECES, BOUNDED], ids=["prompts", "pieces", "bounded"])
def test_preempted_request_continues_as_a_prompt_of_the_same_tokens(config, model):
    """It finds its own states in the cache unless another request has taken their blocks."""
    num_output, max_tokens = 110 if config is BOUNDED else 60, 768
    options = dict(max_model_len=max_tokens, max_num_batched_tokens=64)
    blocks = 1 + -(-max_tokens // BLOCK) + 2 * 2
    with start_engine(model, config, blocks=blocks, **options) as llm:
        free_before, preemptions = llm.free_blocks, llm.watch_preemptions()
        outputs = llm.generate_each([(prompt, {}) for prompt in PROMPTS], num_output)
        assert preemptions
        assert llm.free_blocks == free_before
        # Preempt another request in the middle of its output.
        llm.submit("again", PROMPTS[1], num_output)
        while llm.step() is not None and llm.running()[0].num_output_tokens < num_output // 2:
            pass
        assert preempt(llm) > 0
        (output,) = llm.drain().values()
        assert preemptions["again"] == [num_output // 2]
    with start_uncached(model, config) as llm:
        requests = [
            (prompt, outputs[i], preemptions.get(str(i), []), None)
            for i, prompt in enumerate(PROMPTS)
        ]
        again = PROMPTS[1], output, preemptions["again"], None
        llm.assert_match_solo_runs([*requests, again], num_output)


@pytest.mark.parametrize("output_tokens", [1, 20])
def test_preempted_lookahead_finds_its_states(output_tokens, model):
    """Nothing is dropped before it is over, so the output does not change."""
    m, num_output = 24, 40
    with start_engine(model, lookahead_config("cake", 0.3, lookahead=m)) as llm:
        expected = llm.generate([PROMPTS[0]], num_output)
        assert llm.scheduler.reset_prefix_cache()
        packed_at = llm.watch_packing(
            lambda done: (done.pack_request.tokens, done.pack_request.output_tokens)
        )
        llm.submit("r", PROMPTS[0], num_output)
        while llm.step() is not None and llm.running()[0].num_output_tokens < output_tokens:
            pass
        assert preempt(llm) == LENGTHS[0] // BLOCK * BLOCK
        assert [*llm.drain().values()] == expected
    assert packed_at == [(LENGTHS[0] + m, m)]


def record_estimates(llm):
    """Record, for each step, the estimated and the actual blocks taken by running requests."""
    scheduler, cache, records = llm.scheduler, llm.scheduler.kv_cache_manager, []
    allocate_slots, build = cache.allocate_slots, scheduler.step_builder.build
    estimate, taken, running_ids = 0, 0, set()

    def recording_allocate(request, *args, **kwargs):
        nonlocal taken
        before = llm.free_blocks
        result = allocate_slots(request, *args, **kwargs)
        if request.request_id in running_ids:
            taken += before - llm.free_blocks
        return result

    def recording_build():
        nonlocal estimate, taken, running_ids
        plan = build()
        records.append((estimate, taken))
        estimate = scheduler.next_step.blocks_for_running(scheduler.lookaheads.request_ids)
        taken, running_ids = 0, {request.request_id for request in llm.running()}
        return plan

    cache.allocate_slots, scheduler.step_builder.build = recording_allocate, recording_build
    return records


def test_lookaheads_are_compressed_before_a_request_is_preempted(checkpoints_folder):
    """If the next step's blocks were underestimated, a request could be preempted first."""
    kind = EngineKind(model="granite", pool=90, min_pool=28)
    options = dict(blocks=1 + kind.pool, max_model_len=512, max_num_seqs=16)
    model, config = make(kind.model, checkpoints_folder), pressure_config()
    with start_engine(model, config, max_num_batched_tokens=256, **options) as llm:
        watch, estimates = PressureWatch(llm), record_estimates(llm)
        for seed in kind.seeds:
            outputs = run_load(llm, kind, seed)
            assert len(outputs) == len(list(load_requests(seed)))
    assert watch.preempted, "no request was preempted: the pool is too large"
    assert watch.early_targets, "no prompt was compressed early: the pool is too large"
    assert not watch.not_compressed
    assert all(taken <= estimate for estimate, taken in estimates)
    assert any(taken for _, taken in estimates)


def test_estimate_includes_tokens_left_by_a_chunk_that_ends_at_a_block(checkpoints_folder):
    """vLLM ends a chunk at a block. Three short requests then take a state in each group."""
    options = dict(max_num_batched_tokens=64, max_model_len=1024)
    config = lookahead_config("cake", 0.3, lookahead=200)
    with start_engine(make("granite", checkpoints_folder), config, **options) as llm:
        llm.submit("lookahead", PROMPTS[1], 200)
        for _ in range(7):
            llm.step()
        estimates = record_estimates(llm)
        for index, length in enumerate((900, 10, 10, 10)):
            llm.submit(str(index), tokens(length, seed=index), 60)
        llm.drain()
    assert all(taken <= estimate for estimate, taken in estimates)
    assert max(taken for _, taken in estimates) > 6


def test_no_early_compression_for_states_that_are_not_written(checkpoints_folder):
    """A step writes one state per group, not one for each block that it computes."""
    config = lookahead_config("cake", 0.3, lookahead=200)
    # The prompts have 10 and 19 blocks, 8 of which are computed per step. Each request holds two
    # states in each of two groups.
    options = dict(blocks=1 + 42, max_num_batched_tokens=257, max_model_len=640)
    with start_engine(make("granite", checkpoints_folder), config, **options) as llm:
        packings = []
        llm.compressor.packer.observers.append(
            lambda pack_request, *_: packings.append(pack_request.early_target)
        )
        llm.submit("lookahead", PROMPTS[1], 60)
        for _ in range(3):
            llm.step()
        llm.submit("long", tokens(600, seed=1), 2)
        done = llm.drain()
    assert done.keys() == {"lookahead", "long"}
    assert packings == []


# -- hits -----------------------------------------------------------------------------------------


def test_hit_ends_at_the_window_even_with_another_prompt_of_the_same_prefix(model):
    """vLLM caches the state at the end of the shared prefix, and the one where a hit ends."""
    common = tokens(2 * BLOCK + 5, seed=1)
    other, third = (common + tokens(200, seed=seed) for seed in (2, 4))
    prompt = common + tokens(5 * BLOCK + 10 - len(common), seed=3)
    with start_engine(model, FREE) as llm:
        hits = [llm.outputs([each])[0].num_cached_tokens for each in (other, prompt, prompt, third)]
    # The prompt has five blocks and ten tokens. Without a window of 32 these are four blocks.
    assert hits == [0, 0, 4 * BLOCK, 2 * BLOCK]


# -- against float64 ------------------------------------------------------------------------------


def record_batches(llm):
    """Record, for each step, the submitted names of the requests in its batch and their tokens."""
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
    """Return the part of `record_attention`'s tensors that belongs to one request."""
    result = {}
    for layer, parts in seen.items():
        result[layer] = {"sinks": parts["sinks"]}
        for part in ("q", "k", "v", "out"):
            tensors = []
            for recorded, batch in zip(parts[part], steps, strict=True):
                per_request = recorded.split([count for _, count in batch])
                tensors += [
                    tensor
                    for (request_name, _), tensor in zip(batch, per_request, strict=True)
                    if request_name == name
                ]
            result[layer][part] = torch.cat(tensors)
    return result


def test_kept_tokens_match_the_reference_with_concurrent_requests(checkpoints_folder):
    """In bfloat16, where outputs depend on the batch. The cached prefix comes from a request."""
    shape = STATEFUL["qwen3-next"]
    config = settings("cake", 0.7, allow_override="off")
    options = dict(dtype=shape.dtype, max_num_batched_tokens=150)
    with start_engine(make("qwen3-next", checkpoints_folder), config, **options) as llm:
        seen, steps, free = llm.record_attention(), record_batches(llm), llm.free_blocks
        llm.submit("before", PROMPT, 2, extra_args=OFF)
        llm.drain()
        llm.submit("concurrent", tokens(250, seed=9), 60, extra_args=OFF)
        for _ in range(5):
            llm.step()
        llm.submit("same", PROMPT, 8)
        llm.submit("prefix", PROMPT[:250] + tokens(200, seed=8), 20, extra_args=OFF)
        counts, held = packed(llm)
        llm.drain()
        assert llm.free_blocks == free
    hit = len(PROMPT) - 32
    hit -= hit % shape.block
    before, same = (of_request(seen, steps, name) for name in ("before", "same"))
    for layer, parts in same.items():
        for part in ("q", "k", "v", "out"):
            uncached, cached = before[layer][part], parts[part]
            assert len(cached) == len(PROMPT) - hit + 7
            # Computing from the cached state gives nearly the same values as from the tokens.
            pair = uncached[hit : len(PROMPT)].float(), cached[: len(PROMPT) - hit].float()
            assert part == "out" or torch.cosine_similarity(*pair, dim=-1).min() > 0.999
            parts[part] = [uncached[:hit], cached]
    assert any({"same", "concurrent", "prefix"} <= {name for name, _ in batch} for batch in steps)
    made = CompressionConfig.parse(config["kvcompress"])
    shape = replace(shape, layers=len(same))
    assert_equals_reference(made, same, counts, held, shape, len(PROMPT))
