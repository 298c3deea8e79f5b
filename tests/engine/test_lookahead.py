"""Look-aheads: the first output tokens score the prompt. Kept tokens, compared with float64.

The reference gets the queries, keys and values that the attention layers received.
"""

import functools
from dataclasses import replace

import pytest
import torch

import methods_reference as ref
from checkpoints import HYBRIDS, SHAPES, make, tokens
from engines import BLOCK, V2, engine, model_runner_v1_only, settings
from recordings import recorded
from test_decode_budgets import INTERVAL, Replay, min_pages, round_up_to_blocks
from test_probes import PROBE, ProbeReplay
from test_prompts_in_pieces import PIECE, PieceReplay
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule

LOOKAHEAD, BUDGET = 12, 0.3
WINDOWS = {"tova": 1}
METHODS = ["snapkv", "pyramidkv", "tova", "cake", "chunkkv", "cake-chunk", "caote", "fastcaote"]


def lookahead_config(method="cake", budget=BUDGET, lookahead=LOOKAHEAD, **more):
    return settings(method, budget, lookahead=lookahead, **more)


class LookaheadReplay(PieceReplay):
    """Replays a prompt of S tokens that is packed once m output tokens are computed.

    It may be packed in pieces before that, and repeatedly afterwards.
    """

    def __init__(self, method, shape, seen, prompt, m, *, window=None, bound=None) -> None:
        super().__init__(method, shape, seen, prompt, int(prompt * BUDGET))
        self.lookahead = m
        default = m + 16 if method in ref.OUTPUT_SCORERS else min(WINDOWS.get(method, 32), m)
        self.m, self.w, self.bound = m, window or default, bound

    def start_after_prefill(self) -> "LookaheadReplay":
        """Start at the end of a prefill that dropped nothing."""
        self.held = [
            [list(range(self.prompt)) for _ in range(self.shape.kv_heads)]
            for _ in range(self.shape.layers)
        ]
        return self

    def after(self, computed: int) -> None:
        if computed < self.prompt:
            super().after(computed)
        elif computed == self.prompt + self.m:
            self.pack_lookahead(computed)
        elif self.bound is not None and computed > self.prompt + self.m:
            self.w, self.budget, self.allocator_window = min(self.w, 8), self.bound, None
            self.scored_by_output = False
            Replay.after(self, computed)

    def pack_lookahead(self, computed: int) -> None:
        self.budget += self.m
        # Only the output's queries decide how much each layer keeps.
        self.scored_by_output = self.lookahead <= self.m
        self.allocator_window = self.m if self.scored_by_output and self.m < self.w else None
        layers, tail = self.shape.layers, computed % BLOCK
        low = min_pages(self.w, tail, self.guarded(computed - max(self.w, tail)))
        cap = round_up_to_blocks(max(layers * (self.budget - tail) // BLOCK, layers * low), layers)
        lengths = [len(heads[0]) for heads in self.held]
        self.pack_prompt(computed, cap, tail, low, lengths)


CASES = [("llama-gqa", method, 417, LOOKAHEAD, None) for method in METHODS]
# Different tails of prompt and output: 16 tokens, 4 tokens, 9 tokens with a window that reaches
# before the tail, and none.
TAILS = [("cake", 404, LOOKAHEAD), ("cake", 417, 3), ("snapkv", 417, 40), ("cake", 400, 48)]
CASES += [("llama-gqa", *tail, None) for tail in TAILS]
# A window of 40: the prompt's last 28 queries score beside the output's 12.
CASES += [("llama-gqa", method, 417, LOOKAHEAD, 40) for method in ("cake-chunk", "cake", "snapkv")]
CASES += [("gpt-oss", "cake", 417, LOOKAHEAD, None), ("qwen3", "snapkv", 417, LOOKAHEAD, None)]
if V2:
    CASES = [CASES[3], ("llama-gqa", "cake", 417, LOOKAHEAD, 40)]


@pytest.fixture(scope="module")
def uncompressed_outputs(checkpoints_folder):
    """vLLM's own outputs for a model's prompts, by prompt length."""

    @functools.cache
    def outputs(name):
        cases = sorted((length, m) for model, _, length, m, _ in CASES if model == name)
        options = dict(max_num_batched_tokens=150, max_num_seqs=4, max_model_len=1024)
        with engine(make(name, checkpoints_folder), **options) as llm:
            return {
                length: llm.generate([tokens(length, seed=33)], m + 1)[0]
                for length, m in dict(cases).items()
            }

    return outputs


@pytest.mark.parametrize(("name", "method", "length", "m", "window"), CASES)
def test_lookahead_keeps_the_reference_tokens(
    name, method, length, m, window, checkpoints_folder, uncompressed_outputs
):
    """Attention reads the reference's tokens. The first m + 1 output tokens are vLLM's own."""
    more = {} if window is None else {"window": window}
    num_output, config = m + 20, lookahead_config(method, lookahead=m, **more)
    model, prompt = make(name, checkpoints_folder), tokens(length, seed=33)
    run = recorded(model, config, prompt, num_output, max_num_batched_tokens=150)
    assert [pack.tokens for pack in run.packed] == [length + m]
    assert run.output[: m + 1] == uncompressed_outputs(name)[length][: m + 1]
    # `seen` has only the full-attention layers.
    shape = replace({**SHAPES, **HYBRIDS}[name], layers=len(run.seen))
    replay = LookaheadReplay(method, shape, run.seen, length, m, window=window)
    replay.start_after_prefill()
    replay.steps(length, length + num_output - 1)
    assert replay.packed_at == [length + m]


def pack_after(monkeypatch, output_tokens):
    """Make every look-ahead end after this many output tokens, however few."""

    def plan(lookahead, footprint, tokens):
        is_due = lookahead.output_tokens(tokens) >= output_tokens
        return lookahead.plan_at(footprint, tokens) if is_due else None

    monkeypatch.setattr(LookaheadSchedule, "plan", plan)


# Scored by the prompt's queries alone; by queries of two of its chunks; by fewer queries than the
# window, because the other tokens came from the prefix cache.
EARLY = [("cake", LOOKAHEAD, 0, 0, 12), ("snapkv", 40, 0, 5, 32), ("snapkv", 40, 416, 5, 6)]
EARLY_CASE = ("method", "m", "hit_tokens", "output_tokens", "window")


@pytest.mark.parametrize(EARLY_CASE, EARLY[1:2] if V2 else EARLY)
def test_prompt_packed_early_is_scored_by_the_latest_queries(
    method, m, hit_tokens, output_tokens, window, checkpoints_folder, monkeypatch
):
    """The latest computed queries score the prompt, including queries of the prompt."""
    name, length, num_output = "llama-gqa", 417, m + 20
    prompt = tokens(length, seed=33)
    with engine(
        make(name, checkpoints_folder),
        additional_config=lookahead_config(method, lookahead=m, allow_override="all"),
        max_num_batched_tokens=200,
        max_num_seqs=4,
        max_model_len=1024,
    ) as llm:
        seen = llm.record_attention()
        packed = llm.watch_packing(lambda done: done.pack_request)
        if hit_tokens:
            llm.outputs([prompt[:hit_tokens]], 1, extra_args={"kv_compress": "off"})
        pack_after(monkeypatch, output_tokens)
        llm.submit("r", prompt, num_output)
        llm.drain()
    (pack_request,) = packed
    due = length + output_tokens
    assert (pack_request.tokens, pack_request.output_tokens, pack_request.plan.window) == (
        due,
        output_tokens,
        window,
    )
    replay = LookaheadReplay(
        method, SHAPES[name], seen, length, output_tokens
    ).start_after_prefill()
    replay.w = window
    replay.after(length)
    replay.steps(length, length + num_output - 1)
    assert replay.packed_at == [due]


class LookaheadPieceReplay(LookaheadReplay, ProbeReplay):
    """Replays a prompt whose pieces were scored by a probe before the look-ahead."""


@model_runner_v1_only
@pytest.mark.parametrize("method", ["cake", "snapkv", "cake-chunk"])
def test_lookahead_after_pieces_and_before_a_decode_budget(method, model):
    """Pieces, look-ahead and decode budget together, in the smallest pool that starts.

    The probe scores the pieces, which keep more than the budget. The output scores those tokens
    when the look-ahead ends. The decode intervals start there: nothing is packed again before.
    """
    length, bound, num_output = 535, 192, 120
    pieces = {"max_whole": 384, "piece": PIECE, **PROBE, "window": 8}
    bounds = {"decode_budget": bound, "decode_interval": INTERVAL}
    config = lookahead_config(method, BUDGET, LOOKAHEAD, **pieces, **bounds)
    # With seeds 5 and 6, two scores at cake-chunk's threshold differ relatively by 7e-11 and 6e-8,
    # which is less than a step of float32. With seed 10 they differ by 4e-6.
    prompt = tokens(length, seed=10)
    limits = {"blocks": 1 + 384 // BLOCK, "max_model_len": 656, "max_num_batched_tokens": 70}
    run = recorded(model, config, prompt, num_output, **limits)
    assert [pack.tokens for pack in run.packed] == [length + LOOKAHEAD]
    replay = LookaheadPieceReplay(
        method, SHAPES["llama-gqa"], run.seen, length, LOOKAHEAD, window=8, bound=bound
    )
    replay.last, replay.max_tokens_before_end = length + num_output, 384 - PIECE - 32
    replay.steps(0, length + num_output - 1)
    due_index = replay.packed_at.index(length + LOOKAHEAD)
    assert due_index >= 3, "fewer than 3 pieces were packed"
    assert len(replay.packed_at) >= due_index + 3, "the output was packed fewer than 2 times"


LENGTHS = (150, 301, 420, 96, 290)
PROMPTS = [tokens(length, seed=40 + length) for length in LENGTHS[: 3 if V2 else None]]
# Two prompts with the same prefix: the second finds the first one's blocks in the prefix cache.
PROMPTS[1][:200] = PROMPTS[2][:200]
NUM_OUTPUT = LOOKAHEAD + 20


@pytest.fixture(scope="module")
def single_outputs(model):
    """The output of each prompt when it runs alone."""
    with engine(model, additional_config=lookahead_config(), enable_prefix_caching=False) as llm:
        return [llm.generate([prompt], NUM_OUTPUT)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            {"max_num_batched_tokens": 64, "max_num_seqs": 8},
            marks=model_runner_v1_only,
            id="chunks",
        ),
        pytest.param({"enable_prefix_caching": False}, marks=model_runner_v1_only, id="batch"),
        pytest.param({"async_scheduling": True}, id="async"),
    ],
)
def test_output_does_not_depend_on_concurrent_requests(
    more, single_outputs, model, async_scheduling_allowed
):
    """Nor on chunk sizes, prefix-cache hits or async scheduling."""
    with engine(model, additional_config=lookahead_config(), max_model_len=1024, **more) as llm:
        free_blocks = llm.free_blocks
        packed = llm.watch_packing(lambda done: done.pack_request.tokens)
        assert llm.generate(PROMPTS, NUM_OUTPUT) == single_outputs
        llm.finish_in_flight_steps()
        assert llm.generate(PROMPTS[::-1], NUM_OUTPUT)[::-1] == single_outputs
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free_blocks
        due = [len(prompt) + LOOKAHEAD for prompt in PROMPTS if len(prompt) >= 128]
        assert sorted(packed) == sorted(2 * due)


@model_runner_v1_only
def test_cached_prompt_is_not_computed_again(model):
    """A look-ahead needs no queries of the prompt, so prefix-cache hits are as long as vLLM's own.

    The last two tokens are computed anyway, because CAKE needs two queries if the prompt is
    compressed early under memory pressure.
    """
    prompt = tokens(418, seed=3)
    config = lookahead_config(allow_override="all")
    overrides = [{}, {}, {"kv_compress": "off"}, {"kv_lookahead": 0}, {"kv_compress": "h2o"}]
    with engine(model, additional_config=config, max_model_len=1024) as llm:
        results = [
            llm.outputs([prompt], NUM_OUTPUT, extra_args=override)[0] for override in overrides
        ]
    hits = [result.num_cached_tokens for result in results]
    assert hits == [0, 416, 416, (418 - 32) // BLOCK * BLOCK, 0]
    outputs = [list(result.outputs[0].token_ids) for result in results]
    assert outputs[0] == outputs[1]
    # The look-ahead's tokens and the next one are vLLM's own.
    assert outputs[0][: LOOKAHEAD + 1] == outputs[2][: LOOKAHEAD + 1]


@model_runner_v1_only
def test_a_prompt_that_would_share_blocks_waits_for_the_lookahead_that_holds_them(model):
    """Packing cannot overwrite shared blocks, and the pool has no others for both prompts."""
    shared = tokens(24 * BLOCK, seed=3)
    with engine(
        model,
        additional_config=lookahead_config(budget=0.5),
        blocks=1 + 25 + 14,
        max_model_len=32 * BLOCK,
    ) as llm:
        packed = llm.watch_packing(lambda done: done.pack_request.tokens)
        llm.submit("first", shared + tokens(4, seed=8), 60)
        llm.step()
        llm.submit("second", shared + tokens(40, seed=9), 30)
        llm.drain()
    # If the second started at once, the first would be packed early.
    assert packed == [len(shared) + length + LOOKAHEAD for length in (4, 40)]


@model_runner_v1_only
@pytest.mark.parametrize("num_steps", [*range(1, 31, 3), LOOKAHEAD])
def test_preempted_request_computes_its_lookahead_again(num_steps, checkpoints_folder, one_engine):
    """Preemption after `num_steps` steps: before, during and after the look-ahead.

    Before its end nothing was dropped, so the output does not change. Afterwards, prompt and output
    are computed and packed like a prompt of the same tokens.
    """
    llm, expected = one_engine
    free_blocks, preemptions = llm.free_blocks, llm.watch_preemptions()
    packed = llm.watch_packing(lambda done: done.pack_request.tokens)
    llm.submit("r", PROMPTS[2], NUM_OUTPUT)
    for _ in range(num_steps):
        llm.step()
    assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert llm.free_blocks == free_blocks
    (output,) = llm.drain().values()
    (resumed_at,) = preemptions["r"]
    assert llm.free_blocks == free_blocks
    due = len(PROMPTS[2]) + LOOKAHEAD
    if resumed_at < LOOKAHEAD:
        assert (packed, output) == ([due], expected)
    else:
        assert output[:resumed_at] == expected[:resumed_at]
        assert packed[-1] == len(PROMPTS[2]) + resumed_at
    del llm.compressor.packer.observers[-1]


@pytest.fixture(scope="module")
def one_engine(model, single_outputs):
    with engine(model, additional_config=lookahead_config(), enable_prefix_caching=False) as llm:
        yield llm, single_outputs[2]


@model_runner_v1_only
@pytest.mark.parametrize("num_output", [2, LOOKAHEAD, LOOKAHEAD + 1, LOOKAHEAD + 2, LOOKAHEAD + 3])
def test_prompt_stays_uncompressed_if_the_output_ends_before_the_lookahead(
    num_output, one_engine, watched
):
    """The last output token is never computed, so packing needs LOOKAHEAD + 2 output tokens."""
    llm, expected = one_engine
    free_blocks, compressed_before = llm.free_blocks, llm.compressor.compressed
    assert llm.generate([PROMPTS[2]], num_output) == [expected[:num_output]]
    is_packed = num_output >= LOOKAHEAD + 2
    assert llm.compressor.compressed - compressed_before == is_packed
    assert watched("skipped") == ({} if is_packed else {"answered": 1})
    assert watched("planned") == ({"cake": 1} if is_packed else {})
    assert llm.free_blocks == free_blocks


@model_runner_v1_only
def test_requests_without_a_lookahead_slot_are_packed_after_prefill(single_outputs, model, watched):
    """Requests with a slot keep their output. Slots are freed however a request ends."""
    num_slots = 2
    config = lookahead_config(lookahead_slots=num_slots)
    without_lookahead = settings("cake", BUDGET, window=LOOKAHEAD)
    with engine(model, additional_config=without_lookahead, enable_prefix_caching=False) as llm:
        outputs_without = [llm.generate([prompt], NUM_OUTPUT)[0] for prompt in PROMPTS]
    with engine(model, additional_config=config, max_model_len=1024) as llm:
        free_blocks = llm.free_blocks
        packed = llm.watch_packing(
            lambda done: (done.pack_request.prompt_tokens, done.pack_request.output_tokens)
        )
        for num_output in (NUM_OUTPUT, 3, NUM_OUTPUT):
            packed.clear()
            outputs = llm.generate(PROMPTS, num_output)
            llm.finish_in_flight_steps()
            assert llm.free_blocks == free_blocks
        llm.submit("preempted", PROMPTS[0], NUM_OUTPUT)
        llm.step(), llm.step()
        assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
        llm.drain()
        assert len(llm.worker.compressor.pool.ring._free) == num_slots
        assert packed.pop() == (len(PROMPTS[0]), LOOKAHEAD)
    output_tokens_by_length = dict(packed)
    compressible = [prompt for prompt in PROMPTS if len(prompt) >= 128]
    with_slot = [length for length, m in output_tokens_by_length.items() if m is not None]
    assert len(output_tokens_by_length) == len(compressible)
    assert len(with_slot) == num_slots
    assert watched("slotless_lookaheads") == {"": 3 * (len(compressible) - num_slots)}
    for prompt, output, with_lookahead, without in zip(
        PROMPTS, outputs, single_outputs, outputs_without, strict=True
    ):
        has_slot = output_tokens_by_length.get(len(prompt)) is not None
        assert output == (with_lookahead if has_slot else without)


@model_runner_v1_only
def test_preempted_request_finds_its_output_in_the_prefix_cache(model):
    """It computes the queries of its window again, and as many queries score its prompt."""
    m, num_output = 40, 70
    config = lookahead_config(lookahead=m)
    with engine(model, additional_config=config, max_model_len=1024) as llm:
        expected = llm.generate([PROMPTS[2]], num_output)
        assert llm.scheduler.reset_prefix_cache()
        packed = llm.watch_packing(
            lambda done: (done.pack_request.tokens, done.pack_request.plan.window)
        )
        llm.submit("r", PROMPTS[2], num_output)
        while llm.step() is not None and llm.running()[0].num_output_tokens < m - 3:
            pass
        llm.preempt(llm.running()[0])
        assert [*llm.drain().values()] == expected
    due = len(PROMPTS[2]) + m
    # At the preemption it had 457 tokens, most of them in the prefix cache.
    assert packed == [(due, 32)]


@model_runner_v1_only
def test_parallel_samples_each_score_the_prompt(model):
    """n=2: the samples share the prompt's blocks until the second one has packed it."""
    sampling = {"temperature": 1.0, "top_k": 20}
    with engine(model, additional_config=lookahead_config()) as llm:
        free_blocks = llm.free_blocks
        separate = [llm.outputs(PROMPTS, NUM_OUTPUT, seed=seed, **sampling) for seed in (7, 8)]
        together = llm.outputs(PROMPTS, NUM_OUTPUT, n=2, seed=7, **sampling)
        assert llm.free_blocks == free_blocks
    for result, pair in zip(together, zip(*separate, strict=True), strict=True):
        samples = [list(sample.token_ids) for sample in result.outputs]
        assert samples == [list(single.outputs[0].token_ids) for single in pair]
        assert samples[0] != samples[1]


@model_runner_v1_only
@pytest.mark.parametrize(
    ("method", "options", "request_args"),
    [
        ("cake-chunk", {"lookahead": 32}, {}),
        ("cake", {"lookahead": 12, "window": 40}, {}),
        ("snapkv", {"lookahead": 0}, {}),
        ("chunkkv", {"lookahead": 0}, {"kv_protect": ["20:28"]}),
        ("cake", {"lookahead": 0, "decode_budget": 96, "decode_interval": 32}, {}),
        # The prompts' ends are merged into tails of different lengths.
        ("snapkv", {"lookahead": 0, "merge": True, "max_whole": 160, "piece": 64, "probe": 0}, {}),
    ],
)
def test_prompts_that_end_together_are_packed_together(
    method, options, request_args, model, monkeypatch
):
    """Together they keep the tokens that each keeps alone, and have the same outputs."""
    prompts = [tokens(length, seed=length) for length in (217, 204, 250)]
    groups, kept = [], {}
    with engine(
        model,
        additional_config=settings(method, BUDGET, **options),
        max_num_batched_tokens=2048,
        max_num_seqs=4,
        max_model_len=1024,
        enable_prefix_caching=False,
    ) as llm:
        packer = llm.compressor.packer
        pack = packer._pack
        monkeypatch.setattr(packer, "_pack", lambda jobs: (groups.append(len(jobs)), pack(jobs))[1])
        packer.observers.append(
            lambda request, slots, counts: kept.setdefault(
                (request.prompt_tokens, request.tokens), (slots.clone(), counts.clone())
            )
        )
        num_output = options["lookahead"] + (70 if "decode_budget" in options else 10)
        alone = [llm.generate_each([(prompt, request_args)], num_output)[0] for prompt in prompts]
        assert set(groups) == {1}
        assert {prompt for prompt, _ in kept} >= {len(prompt) for prompt in prompts}
        kept_alone, kept = kept, {}
        groups.clear()
        assert (
            llm.generate_each([(prompt, request_args) for prompt in prompts], num_output) == alone
        )
        assert groups[0] == len(prompts)
        assert kept.keys() == kept_alone.keys()
        for key, (slots, counts) in kept.items():
            slots_alone, counts_alone = kept_alone[key]
            assert torch.equal(counts, counts_alone)
            width = min(slots.shape[2], slots_alone.shape[2])
            assert torch.equal(slots[..., :width], slots_alone[..., :width])
            assert (slots[..., width:] == -1).all()


@model_runner_v1_only
def test_requests_with_different_decode_budgets_are_packed_together(model, monkeypatch):
    """The decode budget does not change how a prompt is scored."""
    config = settings("cake", BUDGET, decode_budget=192, decode_interval=32, allow_override="cake")
    with engine(
        model,
        additional_config=config,
        max_num_batched_tokens=2048,
        max_num_seqs=4,
        max_model_len=1024,
    ) as llm:
        packer, groups = llm.compressor.packer, []
        pack = packer._pack
        monkeypatch.setattr(packer, "_pack", lambda jobs: (groups.append(len(jobs)), pack(jobs))[1])
        budgets = (192, 160, 128)
        requests = [
            (tokens(200 + 10 * number, seed=number), {"kv_decode_budget": budget})
            for number, budget in enumerate(budgets)
        ]
        llm.generate_each(requests, 4)
    assert groups == [len(budgets)]
