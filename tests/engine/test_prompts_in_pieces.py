"""Prompts that never stand whole: what every token attends to, against float64, and how much.

The reference sees the queries, keys and values that the attention layers received. It replays the
prompt from its first token: where it is packed, what each layer may keep, which tokens that are.
"""

import pytest

import methods_reference as ref
from checkpoints import SHAPES, make, tokens
from engines import BLOCK, V2, engine, first_runner, settings
from test_decode_budgets import WINDOWS, Replay, filled, kept_of_heads, least_pages, rounded
from vllm_kvcompress.engine.scheduling import scheduler
from vllm_kvcompress.planning.pieces import EveryPiece

METHODS = [
    *("snapkv", "pyramidkv", "tova", "cake", "chunkkv", "streamingllm", "cake-chunk"),
    *("caote", "fastcaote"),
]
WHOLE, PIECE, WINDOW = 128, 96, 8
IN_CHUNKS = {"max_num_seqs": 4, "max_model_len": 1024, "max_num_batched_tokens": 70}


def piecewise(method="cake", budget=0.4, probe=16, **more):
    own = {"max_whole": WHOLE, "piece": PIECE, "probe": probe}
    if probe:
        own["probe_first"] = 16
    if method not in WINDOWS:
        own["window"] = WINDOW
    return settings(method, budget, **(own | more))


class Prompt(Replay):
    """A prompt of S tokens that may keep B of each layer, packed every `PIECE` tokens."""

    def __init__(self, method, shape, seen, prompt, budget) -> None:
        super().__init__(method, shape, seen, prompt, budget)
        self.w = WINDOWS.get(method, WINDOW)
        self.held = [[[] for _ in range(shape.kv_heads)] for _ in range(shape.layers)]
        # what it may hold before its end
        self.inside = budget

    def may_hold(self, computed: int) -> int:
        return self.budget if computed >= self.prompt else max(self.inside, self.budget)

    def to_the_end(self, tokens: int) -> None:
        """Replay a prompt and its answer, `tokens` together, from the first token."""
        for position in range(tokens - 1):
            self.look(position)
            self.after(position + 1)

    def after(self, computed: int) -> None:
        """Pack at the multiples of the piece and at the end, if more is held than may be."""
        if computed == self.prompt or (computed < self.prompt and computed % PIECE == 0):
            tail = computed % BLOCK if computed == self.prompt else 0
            layers = self.shape.layers
            low = least_pages(self.w, tail, self.guarded(computed - max(self.w, tail)))
            cap = max(layers * (self.may_hold(computed) - tail) // BLOCK, layers * low)
            cap = filled(cap, layers)
            lengths = [len(heads[0]) for heads in self.held]
            if computed == self.prompt or sum(lengths) // BLOCK > cap:
                self.pack_prompt(computed, cap, tail, low, lengths)

    def pack_prompt(self, computed, cap, tail, low, lengths) -> None:
        shape, w = self.shape, self.w
        found = []
        for layer in range(shape.layers):
            found.append(self.scores(layer, computed))
        most = (self.most_pages + computed // BLOCK - self.first_block) * BLOCK + tail
        figures = [stats for _, stats in found]
        budget = cap * BLOCK // shape.layers + tail
        standing = w + self.guarded(computed - w)
        given = shares(self.method, figures, shape.layers, most, budget, standing, lengths)
        full = [length // BLOCK for length in lengths]
        pages = rounded([n - tail for n in given], cap, low, full)
        size = self.chunk
        for layer, (scores, _) in enumerate(found):
            after = max(w - tail, 0)
            past, keep = lengths[layer] - max(w, tail), pages[layer] * BLOCK - after
            kept = kept_of_heads(scores, self.held[layer], past, keep, size, self.protected)
            for kv, own in enumerate(self.held[layer]):
                self.held[layer][kv] = [own[j] for j in kept[kv]] + own[past:]
        self.most_pages = min(most // BLOCK, cap - (shape.layers - 1) * low)
        self.first_block, self.pages = computed // BLOCK, cap
        self.packed_at.append(computed)


def shares(method, stats, layers, most, budget, w, lengths):
    """Tokens of each layer, where a budget of tokens is not one of pages."""
    past, base = most - w, budget - w
    if method in ("cake", "cake-chunk"):
        weights = [h * s for h, s in stats]
        total = layers * min(base, past)
        given = ref.apportion([x / max(weights) for x in weights], total, [past] * layers)
    elif method == "pyramidkv":
        given = ref.pyramid_budgets(layers, base, past)
    else:
        given = [min(base, past)] * layers
    given = ref.apportion(given, sum(given), [length - w for length in lengths])
    return [n + w for n in given]


# with a tail, without one, and with a last piece that the window reaches behind
CASES = [*((method, 531) for method in METHODS), ("cake", 480), ("cake", 581), ("snapkv", 581)]


@pytest.mark.parametrize(("method", "length"), [("cake", 581)] if V2 else CASES)
def test_every_token_reads_what_the_reference_holds(method, length, checkpoints_folder):
    """Whatever chunks compute it; and never more blocks than what is kept and one piece."""
    name, budget, answer = "llama-gqa", int(length * 0.4), 40
    shape = SHAPES[name]
    with engine(
        make(name, checkpoints_folder),
        additional_config=piecewise(method, probe=0),
        **IN_CHUNKS,
    ) as llm:
        seen, free, most = llm.record_attention(), llm.free_blocks, 0
        llm.submit("r", tokens(length, seed=5), answer)
        while llm.llm.llm_engine.has_unfinished_requests():
            llm.step()
            most = max(most, free - llm.free_blocks)
        assert llm.free_blocks == free
    kept = -(-(shape.layers * budget // BLOCK) // shape.layers)
    assert most <= kept + PIECE // BLOCK + 1
    replay = Prompt(method, shape, seen, length, budget)
    replay.to_the_end(length + answer)
    assert replay.packed_at[-1] == length
    assert len(replay.packed_at) >= 3


LENGTHS = (150, 420, 531, 96, 290)
PROMPTS = [tokens(length, seed=40 + length) for length in LENGTHS[: 3 if V2 else None]]
# two prompts that begin alike, the second of which finds the first one's blocks
PROMPTS[1][:300] = PROMPTS[2][:300]
ANSWER = 12 if V2 else 40


@pytest.fixture(scope="module")
def alone(checkpoints_folder):
    """Each answer by itself."""
    model = make("llama-gqa", checkpoints_folder)
    with engine(model, additional_config=piecewise(), enable_prefix_caching=False) as llm:
        return [llm.generate([prompt], ANSWER)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            # as few as a token of each request and a probe take
            {"max_num_batched_tokens": 40, "max_num_seqs": 8},
            marks=first_runner,
            id="chunks",
        ),
        pytest.param({"enable_prefix_caching": False}, marks=first_runner, id="batch"),
        pytest.param({"async_scheduling": True}, id="async"),
        pytest.param({"blocks": 24}, marks=first_runner, id="preempted"),
    ],
)
def test_a_prompt_depends_on_its_own_tokens(more, alone, checkpoints_folder, keep_async_scheduling):
    """Not on its neighbours, chunks, prefix-cache hits, the pool or how steps are scheduled."""
    model = make("llama-gqa", checkpoints_folder)
    with engine(model, additional_config=piecewise(), max_model_len=1024, **more) as llm:
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        for i, prompt in enumerate(PROMPTS):
            llm.submit(str(i), prompt, ANSWER)
        first = llm.drain()
        llm.settle()
        if "blocks" in more:
            # an answer that goes on after a preemption is one to a longer prompt
            assert cuts
            for i, prompt in enumerate(PROMPTS):
                (got,) = (each for name, each in first.items() if name.split("-")[0] == str(i))
                llm.alone(prompt, ANSWER, got, cuts.get(str(i), []))
            return
        assert [first[name] for name in sorted(first)] == alone
        assert llm.generate(PROMPTS[::-1], ANSWER)[::-1] == alone
        llm.settle()
        assert llm.free_blocks == free


@first_runner
def test_hits_end_before_the_first_packing(checkpoints_folder):
    """Later blocks of one prompt were computed against less than another one may hold."""
    model, prompt = make("llama-gqa", checkpoints_folder), tokens(531, seed=3)
    config = piecewise("cake", 0.4, allow_override="off,snapkv")
    with engine(model, additional_config=config, max_model_len=1024) as llm:
        asks = [{"kv_compress": "off"}, {}, {"kv_budget": 0.2}, {}, {"kv_compress": "off"}]
        outputs = [llm.outputs([prompt], 12, extra_args=ask)[0] for ask in asks]
        hits = [output.num_cached_tokens for output in outputs]
        answers = [list(output.outputs[0].token_ids) for output in outputs]
    with engine(
        model, additional_config=config, max_model_len=1024, enable_prefix_caching=False
    ) as llm:
        for i in range(3):  # what the others ask again is asked once
            assert llm.generate([prompt], 12, extra_args=asks[i]) == [answers[i]]
        assert answers[3:] == [answers[1], answers[0]]
    # 0.4 of 531 tokens are 212, so 288 is the first boundary with more; of 0.2 it is 192
    assert hits == [0, (288 - WINDOW) // BLOCK * BLOCK, (192 - WINDOW) // BLOCK * BLOCK, 256, 512]


@first_runner
def test_preempted_between_boundaries_it_begins_again(checkpoints_folder):
    model, prompt = make("llama-gqa", checkpoints_folder), PROMPTS[2]
    with engine(
        *(model,),
        additional_config=piecewise("cake", 200),
        max_num_seqs=8,
        max_num_batched_tokens=50,
    ) as llm:
        free = llm.free_blocks
        want = llm.generate([prompt], 8)[0]
        for cut in range(1, 12, 2):
            assert llm.scheduler.reset_prefix_cache()
            llm.submit("r", prompt, 8)
            for _ in range(cut):
                llm.step()
            assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
            assert llm.free_blocks == free
            assert list(llm.drain().values()) == [want]
        assert llm.free_blocks == free


@first_runner
def test_an_answer_that_comes_again_in_pieces_takes_no_more_from_the_cache(checkpoints_folder):
    """Its prompt stood whole, so nothing said how far hits may go; somebody else asked the same."""
    model, prompt = make("llama-gqa", checkpoints_folder), tokens(60, seed=8)
    config = piecewise("snapkv", 0.4, decode_budget=96, decode_interval=BLOCK, allow_override="off")
    with engine(model, additional_config=config, max_model_len=1024) as llm:
        llm.submit("r", prompt, 240)
        while len(llm.running()) == 0 or llm.running()[0].num_computed_tokens < 290:
            llm.step()
        (request,) = llm.running()
        assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
        planner = llm.manager.planner
        pieces = planner.schedule_of(request).prefill
        assert isinstance(pieces, EveryPiece)
        most = request.num_tokens - 1
        assert planner.longest_hit(request, most) == pieces.first_end - 1 < most
        llm.drain()


@first_runner
@pytest.mark.parametrize(("piece", "warned"), [(96, True), (32, False)])
def test_a_start_says_that_little_is_held(piece, warned, checkpoints_folder, monkeypatch):
    """A tenth of 1,023 tokens is 102, and 160 are fewer than twice as many."""
    said = []
    monkeypatch.setattr(scheduler.logger, "warning", lambda text, *of: said.append(text % of))
    config = piecewise("snapkv", 0.1, max_whole=288, piece=piece)
    with engine(make("llama-gqa", checkpoints_folder), additional_config=config, **IN_CHUNKS):
        pass
    assert [line for line in said if "holds 160 in each layer, and keeps 95" in line] == said
    assert len(said) == warned
