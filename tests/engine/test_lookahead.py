"""Prompts that the first tokens of their answer judge: what stays, against float64, and when.

The reference sees the queries, keys and values that the attention layers received.
"""

import functools
from dataclasses import replace

import pytest

import methods_reference as ref
from checkpoints import HYBRIDS, SHAPES, make, tokens
from engines import BLOCK, V2, engine, first_runner, settings
from test_decode_budgets import INTERVAL, Replay, filled, least_pages
from test_probes import PROBE, Guided
from test_prompts_in_pieces import PIECE, Prompt
from vllm_kvcompress.planning.schedules import LookAhead

AHEAD, BUDGET = 12, 0.3
WINDOWS = {"tova": 1}
METHODS = [*("snapkv", "pyramidkv", "tova", "cake", "chunkkv", "cake-chunk", "caote", "fastcaote")]


def ahead(method="cake", budget=BUDGET, lookahead=AHEAD, **more):
    return settings(method, budget, lookahead=lookahead, **more)


class Ahead(Prompt):
    """A prompt of S tokens that is packed once m tokens of its answer are computed.

    Perhaps in pieces before that, and again and again behind it.
    """

    def __init__(self, method, shape, seen, prompt, m, *, window=None, bound=None) -> None:
        super().__init__(method, shape, seen, prompt, int(prompt * BUDGET))
        self.ahead = m
        usual = m + 16 if method in ref.BY_ANSWER else min(WINDOWS.get(method, 32), m)
        self.m, self.w, self.bound = m, window or usual, bound

    def whole(self) -> "Ahead":
        """Begin where the prefill ends, of which nothing was dropped."""
        self.held = [
            [list(range(self.prompt)) for _ in range(self.shape.kv_heads)]
            for _ in range(self.shape.layers)
        ]
        return self

    def after(self, computed: int) -> None:
        if computed < self.prompt:
            super().after(computed)
        elif computed == self.prompt + self.m:
            self.judge(computed)
        elif self.bound is not None and computed > self.prompt + self.m:
            self.w, self.budget, self.allocator_window = min(self.w, 8), self.bound, None
            self.by_answer = False
            Replay.after(self, computed)

    def judge(self, computed: int) -> None:
        self.budget += self.m
        # how much layers keep is judged by the answer alone
        self.by_answer = self.ahead <= self.m
        self.allocator_window = self.m if self.by_answer and self.m < self.w else None
        layers, tail = self.shape.layers, computed % BLOCK
        low = least_pages(self.w, tail, self.guarded(computed - max(self.w, tail)))
        cap = filled(max(layers * (self.budget - tail) // BLOCK, layers * low), layers)
        lengths = [len(heads[0]) for heads in self.held]
        self.pack_prompt(computed, cap, tail, low, lengths)


# tails of the prompt and its answer: some, none, and one that the window reaches behind
CASES = [*(("llama-gqa", method, 417, AHEAD, None) for method in METHODS)]
OTHERS = [("cake", 404, AHEAD), ("cake", 417, 3), ("snapkv", 417, 40), ("cake", 400, 48)]
CASES += [("llama-gqa", *other, None) for other in OTHERS]
# the prompt's last 28 judge beside the answer's
CASES += [("llama-gqa", method, 417, AHEAD, 40) for method in ("cake-chunk", "cake", "snapkv")]
CASES += [("gpt-oss", "cake", 417, AHEAD, None), ("qwen3", "snapkv", 417, AHEAD, None)]
if V2:
    CASES = [CASES[3], CASES[-2], ("llama-gqa", "cake", 417, AHEAD, 40)]


@pytest.fixture(scope="module")
def plain(checkpoints_folder):
    """vLLM's own answers to a model's prompts, by their lengths."""

    @functools.cache
    def answers(name):
        asked = sorted((length, m) for own, _, length, m, _ in CASES if own == name)
        options = dict(max_num_batched_tokens=150, max_num_seqs=4, max_model_len=1024)
        with engine(make(name, checkpoints_folder), **options) as llm:
            return {
                length: llm.generate([tokens(length, seed=33)], m + 1)[0]
                for length, m in dict(asked).items()
            }

    return answers


@pytest.mark.parametrize(("name", "method", "length", "m", "window"), CASES)
def test_every_step_reads_what_the_reference_holds(
    name, method, length, m, window, checkpoints_folder, plain
):
    """And until then all of it, as vLLM alone."""
    asked = {} if window is None else {"window": window}
    answer = m + 20
    model, prompt = make(name, checkpoints_folder), tokens(length, seed=33)
    with engine(
        model,
        additional_config=ahead(method, lookahead=m, **asked),
        max_num_batched_tokens=150,
        max_num_seqs=4,
        max_model_len=1024,
    ) as llm:
        seen, free = llm.record_attention(), llm.free_blocks
        packed = llm.watch_packing(lambda done: done.todo.tokens)
        llm.submit("r", prompt, answer)
        (got,) = llm.drain().values()
        assert llm.free_blocks == free
        assert packed == [length + m]
    assert got[: m + 1] == plain(name)[length][: m + 1]
    shape = replace({**SHAPES, **HYBRIDS}[name], layers=len(seen))  # those with full attention
    replay = Ahead(method, shape, seen, length, m, window=window).whole()
    for position in range(length, length + answer - 1):
        replay.step(position)
    assert replay.packed_at == [length + m]


def pack_after(monkeypatch, answered):
    """Pack every prompt as soon as so much of its answer is computed, however little that is."""

    def early(ahead, holding, tokens):
        return ahead.kept(holding, tokens) if ahead.answered(tokens) >= answered else None

    monkeypatch.setattr(LookAhead, "plan", early)


# by the prompt's queries alone; by those of two chunks of it; by fewer than the window, since the
# prefix cache had the others' tokens
EARLY = [("cake", AHEAD, 0, 0, 12), ("snapkv", 40, 0, 5, 32), ("snapkv", 40, 416, 5, 6)]
CASE = ("method", "m", "hit", "answered", "rows")


@pytest.mark.parametrize(CASE, EARLY[1:2] if V2 else EARLY)
def test_the_ring_judges_at_any_moment(
    method, m, hit, answered, rows, checkpoints_folder, monkeypatch
):
    """By the latest queries that were computed, the prompt's among them."""
    name, length, answer = "llama-gqa", 417, m + 20
    prompt = tokens(length, seed=33)
    with engine(
        make(name, checkpoints_folder),
        additional_config=ahead(method, lookahead=m, allow_override="all"),
        max_num_batched_tokens=200,
        max_num_seqs=4,
        max_model_len=1024,
    ) as llm:
        seen = llm.record_attention()
        packed = llm.watch_packing(lambda done: done.todo)
        if hit:
            llm.outputs([prompt[:hit]], 1, extra_args={"kv_compress": "off"})
        pack_after(monkeypatch, answered)
        llm.submit("r", prompt, answer)
        llm.drain()
    (todo,) = packed
    due = length + answered
    assert (todo.tokens, todo.answered, todo.plan.window) == (due, answered, rows)
    replay = Ahead(method, SHAPES[name], seen, length, answered).whole()
    replay.w = rows
    replay.after(length)
    for position in range(length, length + answer - 1):
        replay.step(position)
    assert replay.packed_at == [due]


class InPieces(Ahead, Guided):
    """One whose pieces the prompt's end has judged before."""


@pytest.mark.parametrize("method", ["cake"] if V2 else ["cake", "snapkv", "cake-chunk"])
def test_pieces_and_bounded_answers(method, checkpoints_folder):
    """The pieces are judged by the prompt's ends, and what they leave by the answer.

    They leave more than the budget, in the smallest pool that starts.

    Its intervals begin there: nothing is packed again before.
    """
    name, length, bound, answer = "llama-gqa", 535, 192, 120
    config = ahead(
        *(method, BUDGET, AHEAD),
        max_whole=384,
        piece=PIECE,
        **PROBE,
        window=8,
        decode_budget=bound,
        decode_interval=INTERVAL,
    )
    with engine(
        make(name, checkpoints_folder),
        additional_config=config,
        blocks=1 + 384 // BLOCK,
        max_num_seqs=4,
        max_model_len=656,
        max_num_batched_tokens=70,
    ) as llm:
        seen, free = llm.record_attention(), llm.free_blocks
        packed = llm.watch_packing(lambda done: done.todo.tokens)
        # seed 5 has two tokens at cake-chunk's cut whose scores differ by 7e-11, relatively
        llm.submit("r", tokens(length, seed=6), answer)
        llm.drain()
        assert llm.free_blocks == free
    assert packed == [length + AHEAD]
    replay = InPieces(method, SHAPES[name], seen, length, AHEAD, window=8, bound=bound)
    replay.last, replay.inside = length + answer, 384 - PIECE - 32
    for position in range(length + answer - 1):
        replay.step(position)
    at = replay.packed_at.index(length + AHEAD)
    assert at >= 3, "pieces"
    assert len(replay.packed_at) >= at + 3, "intervals"


LENGTHS = (150, 301, 420, 96, 290)
PROMPTS = [tokens(length, seed=40 + length) for length in LENGTHS[: 3 if V2 else None]]
# two prompts that begin alike, the second of which finds the first one's blocks
PROMPTS[1][:200] = PROMPTS[2][:200]
ANSWER = AHEAD + 20


@pytest.fixture(scope="module")
def alone(checkpoints_folder):
    """Each answer by itself."""
    model = make("llama-gqa", checkpoints_folder)
    with engine(model, additional_config=ahead(), enable_prefix_caching=False) as llm:
        return [llm.generate([prompt], ANSWER)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            {"max_num_batched_tokens": 64, "max_num_seqs": 8}, marks=first_runner, id="chunks"
        ),
        pytest.param({"enable_prefix_caching": False}, marks=first_runner, id="batch"),
        pytest.param({"async_scheduling": True}, id="async"),
    ],
)
def test_an_answer_depends_on_its_own_tokens(
    more, alone, checkpoints_folder, keep_async_scheduling
):
    """Not on its neighbours, chunks, prefix-cache hits or how steps are scheduled."""
    model = make("llama-gqa", checkpoints_folder)
    with engine(model, additional_config=ahead(), max_model_len=1024, **more) as llm:
        free, packed = llm.free_blocks, llm.watch_packing(lambda done: done.todo.tokens)
        assert llm.generate(PROMPTS, ANSWER) == alone
        llm.settle()
        assert llm.generate(PROMPTS[::-1], ANSWER)[::-1] == alone
        llm.settle()
        assert llm.free_blocks == free
        due = [len(prompt) + AHEAD for prompt in PROMPTS if len(prompt) >= 128]
        assert sorted(packed) == sorted(2 * due)


@first_runner
def test_a_prompt_that_was_cached_is_not_computed_again(checkpoints_folder):
    """No query of the prompt judges it, so that hits are as long as vLLM's own.

    But for two tokens, without which CAKE could not judge if the pool were short.
    """
    model, prompt = make("llama-gqa", checkpoints_folder), tokens(418, seed=3)
    config = ahead(allow_override="all")
    asks = [{}, {}, {"kv_compress": "off"}, {"kv_lookahead": 0}, {"kv_compress": "h2o"}]
    with engine(model, additional_config=config, max_model_len=1024) as llm:
        outputs = [llm.outputs([prompt], ANSWER, extra_args=ask)[0] for ask in asks]
    hits = [output.num_cached_tokens for output in outputs]
    assert hits == [0, 416, 416, (418 - 32) // BLOCK * BLOCK, 0]
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    assert answers[0] == answers[1]
    # the first tokens are vLLM's own, with and without a look-ahead one more than it has
    assert answers[0][: AHEAD + 1] == answers[2][: AHEAD + 1]


@first_runner
@pytest.mark.parametrize("cut", [*range(1, 31, 3), AHEAD])
def test_preempted_before_in_and_after_it(cut, checkpoints_folder, one_engine):
    """Until the look-ahead is over nothing was dropped; then it is a prompt of all its tokens."""
    llm, want = one_engine
    free, cuts = llm.free_blocks, llm.watch_preemptions()
    packed = llm.watch_packing(lambda done: done.todo.tokens)
    llm.submit("r", PROMPTS[2], ANSWER)
    for _ in range(cut):
        llm.step()
    assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert llm.free_blocks == free
    (got,) = llm.drain().values()
    (resumed,) = cuts["r"]
    assert llm.free_blocks == free
    due = len(PROMPTS[2]) + AHEAD
    if resumed < AHEAD:
        assert (packed, got) == ([due], want)
    else:
        assert got[:resumed] == want[:resumed]
        assert packed[-1] == len(PROMPTS[2]) + resumed
    del llm.compressor.packer.observers[-1]


@pytest.fixture(scope="module")
def one_engine(checkpoints_folder, alone):
    model = make("llama-gqa", checkpoints_folder)
    with engine(model, additional_config=ahead(), enable_prefix_caching=False) as llm:
        yield llm, alone[2]


@first_runner
@pytest.mark.parametrize("answer", [2, AHEAD, AHEAD + 1, AHEAD + 2, AHEAD + 3])
def test_an_answer_that_ends_before_is_whole(answer, one_engine, watched):
    """The last token of an answer is read by nobody: one more must follow for it to be packed."""
    llm, want = one_engine
    free, compressed = llm.free_blocks, llm.compressor.compressed
    assert llm.generate([PROMPTS[2]], answer) == [want[:answer]]
    packs = answer >= AHEAD + 2
    assert llm.compressor.compressed - compressed == packs
    assert watched("skipped") == ({} if packs else {"answered": 1})
    assert watched("planned") == ({"cake": 1} if packs else {})
    assert llm.free_blocks == free


@first_runner
def test_who_finds_no_slot_is_packed_at_its_prefills_end(alone, checkpoints_folder, watched):
    """Those that find one answer as ever; slots come back from all that end, whatever ends them."""
    model, slots = make("llama-gqa", checkpoints_folder), 2
    config = ahead(lookahead_slots=slots)
    without = settings("cake", BUDGET, window=AHEAD)
    with engine(model, additional_config=without, enable_prefix_caching=False) as llm:
        at_end = [llm.generate([prompt], ANSWER)[0] for prompt in PROMPTS]
    with engine(model, additional_config=config, max_model_len=1024) as llm:
        free = llm.free_blocks
        packed = llm.watch_packing(lambda done: (done.todo.prompt_tokens, done.todo.answered))
        for new in (ANSWER, 3, ANSWER):
            packed.clear()
            got = llm.generate(PROMPTS, new)
            llm.settle()
            assert llm.free_blocks == free
        llm.submit("cut", PROMPTS[0], ANSWER)
        llm.step(), llm.step()
        assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
        llm.drain()
        assert len(llm.worker.compressor.pool.ring._free) == slots
        assert packed.pop() == (len(PROMPTS[0]), AHEAD)
    answered = dict(packed)
    longer = [prompt for prompt in PROMPTS if len(prompt) >= 128]
    waited = [length for length in answered if answered[length] is not None]
    assert len(answered) == len(longer)
    assert len(waited) == slots
    assert watched("slotless") == {"": 3 * (len(longer) - slots)}
    for prompt, answer, own, other in zip(PROMPTS, got, alone, at_end, strict=True):
        assert answer == (own if answered.get(len(prompt)) is not None else other)


@first_runner
def test_preempted_it_finds_its_answer_in_the_cache(checkpoints_folder):
    """It computes the window's queries again, the answer's, and is judged by as many."""
    model, m, new = make("llama-gqa", checkpoints_folder), 40, 70
    with engine(model, additional_config=ahead(lookahead=m), max_model_len=1024) as llm:
        want = llm.generate([PROMPTS[2]], new)
        assert llm.scheduler.reset_prefix_cache()
        packed = llm.watch_packing(lambda done: (done.todo.tokens, done.todo.plan.window))
        llm.submit("r", PROMPTS[2], new)
        while llm.step() is not None and llm.running()[0].num_output_tokens < m - 3:
            pass
        llm.preempt(llm.running()[0])
        assert [*llm.drain().values()] == want
    due = len(PROMPTS[2]) + m
    # 457 tokens were there, and 28 blocks of them
    assert packed == [(due, 32)]


@first_runner
def test_two_answers_to_one_prompt(checkpoints_folder):
    """n=2: each judges the prompt by itself, whose blocks are shared until the last has."""
    model, sampled = make("llama-gqa", checkpoints_folder), {"temperature": 1.0, "top_k": 20}
    with engine(model, additional_config=ahead()) as llm:
        free = llm.free_blocks
        apart = [llm.outputs(PROMPTS, ANSWER, seed=seed, **sampled) for seed in (7, 8)]
        together = llm.outputs(PROMPTS, ANSWER, n=2, seed=7, **sampled)
        assert llm.free_blocks == free
    for output, pair in zip(together, zip(*apart, strict=True), strict=True):
        answers = [list(answer.token_ids) for answer in output.outputs]
        assert answers == [list(one.outputs[0].token_ids) for one in pair]
        assert answers[0] != answers[1]
