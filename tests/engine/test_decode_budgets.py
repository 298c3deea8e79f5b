"""Answers whose memory is bounded: what stays at every step, against float64, and how much.

The reference sees the queries, keys and values that the attention layers received. It replays the
answer: when it is packed, what each layer may keep, which tokens that are, and what every step
attends to.
"""

import math

import numpy as np
import pytest
import torch

import methods_reference as ref
from checkpoints import SHAPES, make, tokens
from engines import BLOCK, V2, engine, first_runner, settings

FLOAT32_EPS = torch.finfo(torch.float32).eps
PROMPT, BUDGET, INTERVAL, ANSWER = 45, 64, 32, 150
WINDOWS = {"streamingllm": 0, "tova": 1}
METHODS = [
    *("snapkv", "pyramidkv", "tova", "cake", "chunkkv", "streamingllm", "cake-chunk"),
    *("caote", "fastcaote"),
]


def scores_of(method, q, k, v, w, allocator_window=None, *, by_answer=False):
    """``[Hkv, P]`` of what a layer holds, by its last w queries ``[w, Hq, d]``.

    And CAKE's figures, which may be of fewer queries.
    """
    slots = ref.with_sinks(np.zeros((q.shape[1], *k.shape[1:])), getattr(q, "sinks", None))
    if w:
        slots[:, -w:] = q.transpose(1, 0, 2)
    cake = method in ("cake", "cake-chunk")
    stats = ref.cake_stats(slots, k, allocator_window or w) if cake else None
    if by_answer and method in ref.BY_ANSWER:
        return ref.BY_ANSWER[method](slots, k, v, w, allocator_window), stats
    return ref.WINDOW_SCORERS[method](slots, k, v, w), stats


def rounded(shares, total, low, caps):
    """Pages: whole ones of each layer's tokens, and one more for the largest remainders.

    Where layers that `low` lifts take from the others, in proportion to what is above it.
    """
    held = [min(max(n, low * BLOCK), cap * BLOCK) for n, cap in zip(shares, caps, strict=True)]
    whole = [n // BLOCK for n in held]
    if sum(whole) > total:
        return ref.apportion([n - low * BLOCK for n in held], total, caps, low)
    order = sorted(range(len(held)), key=lambda i: (-(held[i] % BLOCK), i))
    while sum(whole) < total:
        for i in order:
            if sum(whole) < total and whole[i] < caps[i]:
                whole[i] += 1
    return whole


def budgets(method, stats, layers, most, pages, w, lengths):
    """Tokens of each layer: what one cannot hold goes to the others, in proportion."""
    total, past = pages * BLOCK, most - w
    base = pages * BLOCK // layers - w
    if method in ("cake", "cake-chunk"):
        weights = [h * s for h, s in stats]
        given = ref.apportion(
            [x / max(weights) for x in weights], total - layers * w, [past] * layers
        )
    elif method == "pyramidkv":
        given = ref.pyramid_budgets(layers, base, past)
    else:
        given = [min(base, past)] * layers
    given = ref.apportion(given, sum(given), [length - w for length in lengths])
    return [n + w for n in given]


def least_pages(w, tail, guarded):
    """Pages of what stands in any case before a tail: of the window and the protected, or one."""
    return max(-(-(max(w - tail, 0) + guarded) // BLOCK), 1)


def filled(pages, layers):
    """Pages of the blocks that hold so many: none of the last one lies unused."""
    return -(-pages // layers) * layers


def kept_of_heads(scores, held, past, keep, size, protected):
    """Per KV head the slots that are kept of the first `past`: those of protected tokens, in any
    case, and of the others, side by side, the best tokens or chunks."""
    own = [[j for j in range(past) if held_by[j] in protected] for held_by in held]
    others = [sorted(set(range(past)) - set(slots)) for slots in own]
    rows = [row[slots] for row, slots in zip(scores, others, strict=True)]
    if size:
        rows = [sum(rows)] * len(rows)
    kept = []
    for row, slots, free in zip(rows, own, others, strict=True):
        left = keep - len(slots)
        best = ref.chunks(row, left, size) if size else ref.best(row, left)
        kept.append(sorted([*slots, *(free[j] for j in best)]))
    return kept


class Replay:
    """What each layer and KV head holds, as positions."""

    protected: frozenset[int] = frozenset()

    def __init__(self, method, shape, seen, prompt=PROMPT, budget=BUDGET, answer=ANSWER) -> None:
        self.method, self.shape = method, shape
        self.prompt, self.budget, self.last = prompt, budget, prompt + answer
        self.w, self.interval = WINDOWS.get(method, 8), INTERVAL
        self.allocator_window: int | None = None
        self.by_answer = False
        parts = {
            (layer, name): torch.cat([part.flatten(1) for part in seen[layer][name]]).double()
            for layer in range(shape.layers)
            for name in ("q", "k", "v", "out")
        }
        self.parts = {
            at: part.view(len(part), -1, shape.head_dim).numpy() for at, part in parts.items()
        }
        for layer in range(shape.layers):
            if (sinks := seen[layer].get("sinks")) is not None:
                self.parts[layer, "q"] = ref.with_sinks(self.parts[layer, "q"], sinks.numpy())
        self.held = [
            [list(range(prompt)) for _ in range(shape.kv_heads)] for _ in range(shape.layers)
        ]
        self.counts: list[int] | None = None
        self.first_block = self.pages = self.most_pages = 0
        self.packed_at: list[int] = []

    def sink(self, layer: int, head: int):
        own = getattr(self.parts[layer, "q"], "sinks", None)
        return None if own is None else own[head]

    def step(self, position: int) -> None:
        """The step that computes `position`: what it attends to, and what is packed after it."""
        self.look(position)
        self.after(position + 1)

    def look(self, position: int) -> None:
        """What `position` attends to: what is held, and itself."""
        shape = self.shape
        for layer in range(shape.layers):
            q, k, v, out = (self.parts[layer, name] for name in ("q", "k", "v", "out"))
            for kv in range(shape.kv_heads):
                self.held[layer][kv].append(position)
                own = np.asarray(self.held[layer][kv])
                keys, values = k[own, kv], v[own, kv]
                longest, largest = np.linalg.norm(keys, axis=-1).max(), np.abs(values).max()
                for head in range(
                    kv * shape.heads // shape.kv_heads, (kv + 1) * shape.heads // shape.kv_heads
                ):
                    query = np.asarray(q)[position, head]
                    logits = keys @ query / math.sqrt(shape.head_dim)
                    want = ref.softmax(logits, self.sink(layer, head)) @ values
                    reach = longest * np.linalg.norm(query)
                    rounding = 2 * FLOAT32_EPS * reach / math.sqrt(shape.head_dim)
                    bound = (1e-6 + rounding) * largest
                    assert np.abs(out[position, head] - want).max() <= bound, (
                        position,
                        layer,
                        head,
                    )

    def after(self, computed: int) -> None:
        """Pack the answer, if its length says so."""
        if computed % BLOCK or computed // BLOCK * BLOCK - self.first_block * BLOCK < self.interval:
            return
        layers = self.shape.layers
        least = layers * max(-(-(self.w + len(self.protected)) // BLOCK), 1)
        cap = max(self.pages, filled(layers * self.budget // BLOCK, layers), least)
        lengths = [len(heads[0]) for heads in self.held]
        if sum(lengths) // BLOCK <= cap or computed - self.prompt < self.w:
            return
        if computed + 1 >= self.last:
            return
        self.pack(computed, cap, lengths)

    def scores(self, layer: int, computed: int):
        """What the last w queries make of what a layer holds (`scores_of`)."""
        q, k, v = (self.parts[layer, name] for name in "qkv")
        keys, values = (
            np.stack([part[own, kv] for kv, own in enumerate(self.held[layer])]) for part in (k, v)
        )
        latest = q[computed - self.w : computed]
        which = {"allocator_window": self.allocator_window, "by_answer": self.by_answer}
        return scores_of(self.method, latest, keys, values, self.w, **which)

    def guarded(self, end: int) -> int:
        """Protected tokens before `end`."""
        return sum(at < end for at in self.protected)

    @property
    def chunk(self):
        """Tokens in a chunk; None where tokens are chosen one by one."""
        if self.by_answer and self.method in ref.BY_ANSWER:
            return None
        return ref.CHUNKS.get(self.method)

    def pack(self, computed: int, cap: int, lengths: list[int]) -> None:
        shape, w = self.shape, self.w
        found = []
        for layer in range(shape.layers):
            found.append(self.scores(layer, computed))
        if self.counts is None:
            # what the host knows of the longest layer, which depends on lengths alone
            most = (self.most_pages + computed // BLOCK - self.first_block) * BLOCK
            figures = [stats for _, stats in found]
            standing = w + self.guarded(computed - w)
            shares = budgets(self.method, figures, shape.layers, most, cap, standing, lengths)
            low = max(-(-standing // BLOCK), 1)
            self.counts = rounded(shares, cap, low, [n // BLOCK for n in lengths])
        size = self.chunk
        for layer, (scores, _) in enumerate(found):
            keep = self.counts[layer] * BLOCK - w
            past = lengths[layer] - w
            kept = kept_of_heads(scores, self.held[layer], past, keep, size, self.protected)
            for kv, own in enumerate(self.held[layer]):
                self.held[layer][kv] = [own[j] for j in kept[kv]] + own[past:]
        self.first_block, self.pages = computed // BLOCK, cap
        self.packed_at.append(computed)


@pytest.mark.parametrize("method", METHODS[3:4] if V2 else METHODS)
def test_every_step_reads_what_the_reference_holds(method, checkpoints_folder):
    """Blocks too: at most those of the budget, of an interval and one, from the first time on."""
    name = "llama-gqa"
    with engine(
        make(name, checkpoints_folder),
        additional_config=settings(method, decode_budget=BUDGET, decode_interval=INTERVAL),
        max_num_seqs=4,
        max_model_len=1024,
    ) as llm:
        seen, free, packed = llm.record_attention(), llm.free_blocks, []
        llm.submit("r", tokens(PROMPT, seed=5), ANSWER)
        while llm.llm.llm_engine.has_unfinished_requests():
            llm.step()
            (request,) = llm.scheduler.running or [None]
            if request is not None:
                held = llm.manager.num_blocks_held(request.request_id)
                assert free - llm.free_blocks == held
                (holding,) = llm.holdings() or [None]
                if holding is not None and holding.frozen:
                    packed.append(holding.first_block * BLOCK)
                    assert held <= BUDGET // BLOCK + INTERVAL // BLOCK + 1
        assert llm.free_blocks == free
    replay = Replay(method, SHAPES[name], seen)
    for position in range(PROMPT, PROMPT + ANSWER - 1):
        replay.step(position)
    assert sorted(set(packed)) == replay.packed_at
    assert len(replay.packed_at) >= 3


def kept_of(llm, seen, prompt):
    """``[L][Hkv]``: positions of the prompt that the pages of a compressed request hold."""
    pool, held = llm.compressor.pool, []
    (slot,) = pool._slots.values()
    for layer, count in enumerate(pool._num_packed[slot].tolist()):
        keys, _ = llm.compressor.packer.mover.read(pool._packed[slot, layer, :count].long())
        keys = keys.permute(1, 0, 3, 2).flatten(1, 2)
        heads, dim = keys.shape[0], keys.shape[2]
        own = torch.cat([part.flatten(1) for part in seen[layer]["k"]])[:prompt]
        own = own.view(prompt, heads, dim)
        where = [{own[i, h].numpy().tobytes(): i for i in range(prompt)} for h in range(heads)]
        tail = list(range(prompt // BLOCK * BLOCK, prompt))
        held.append(
            [[where[h][row.numpy().tobytes()] for row in keys[h]] + tail for h in range(heads)]
        )
    return held


@first_runner
def test_an_answer_goes_on_from_what_its_prompt_kept(checkpoints_folder):
    """Layers hold different numbers of tokens then: none is given more pages than it has."""
    name, method, prompt, budget, answer = "llama-gqa", "pyramidkv", 401, 160, 200
    shape = SHAPES[name]
    config = settings(method, 0.3, decode_budget=budget, decode_interval=2 * INTERVAL)
    with engine(
        make(name, checkpoints_folder),
        additional_config=config,
        max_num_seqs=4,
        max_model_len=1024,
        max_num_batched_tokens=150,
    ) as llm:
        seen = llm.record_attention()
        llm.submit("r", tokens(prompt, seed=5), answer)
        while not llm.compressor.compressed:
            llm.step()
        held = kept_of(llm, seen, prompt)
        (holding,) = llm.holdings()
        pages, most_pages, first = holding.pages, holding.most_pages, holding.first_block
        llm.drain()
    replay = Replay(method, shape, seen, prompt, budget, answer)
    replay.held, replay.pages, replay.most_pages, replay.first_block = (
        held,
        pages,
        most_pages,
        first,
    )
    replay.interval = 2 * INTERVAL
    assert len({len(heads[0]) for heads in held}) > 1
    for position in range(prompt, prompt + answer - 1):
        replay.step(position)
    assert len(replay.packed_at) >= 2
    assert sum(replay.counts) == shape.layers * budget // BLOCK


@first_runner
def test_a_budget_that_holds_everything_changes_nothing(checkpoints_folder):
    path, prompts = (
        make("llama-gqa", checkpoints_folder),
        [tokens(PROMPT, seed=5), tokens(7, seed=6)],
    )
    with engine(path, max_num_seqs=4, max_model_len=1024) as llm:
        want = llm.generate(prompts, 3 * INTERVAL + 4)
    config = settings(decode_budget=1024, decode_interval=INTERVAL)
    with engine(path, additional_config=config, max_num_seqs=4, max_model_len=1024) as llm:
        assert llm.generate(prompts, 3 * INTERVAL + 4) == want
        assert not llm.manager.tally.repacked


LENGTHS = (20, 150, 301, 64, 97, 260)
PROMPTS = [tokens(length, seed=40 + length) for length in LENGTHS[: 3 if V2 else None]]
LONG = 60 if V2 else 130
GROWING = settings("cake", 0.3, decode_budget=BUDGET, decode_interval=INTERVAL)


@pytest.fixture(scope="module")
def alone(checkpoints_folder):
    """Each answer by itself."""
    model = make("llama-gqa", checkpoints_folder)
    with engine(model, additional_config=GROWING, enable_prefix_caching=False) as llm:
        return [llm.generate([prompt], LONG)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 1024},
            marks=first_runner,
            id="chunks",
        ),
        pytest.param({"enable_prefix_caching": False}, marks=first_runner, id="batch"),
        pytest.param({"async_scheduling": True}, id="async"),
    ],
)
def test_an_answer_depends_on_its_own_tokens(
    more, alone, checkpoints_folder, keep_async_scheduling
):
    """Not on its neighbours, chunks, the prefix cache or how steps are scheduled."""
    model = make("llama-gqa", checkpoints_folder)
    with engine(model, additional_config=GROWING, **more) as llm:
        free = llm.free_blocks
        assert llm.generate(PROMPTS, LONG) == alone
        if "async_scheduling" in more:
            assert llm.core.batch_queue is not None
            llm.settle()
        assert llm.generate(PROMPTS[::-1], LONG)[::-1] == alone
        assert llm.free_blocks == free


@first_runner
def test_two_answers_to_one_prompt(checkpoints_folder):
    """n=2: each is a request of its own, and the prompt's blocks are shared until they part."""
    model, sampled = make("llama-gqa", checkpoints_folder), {"temperature": 1.0, "top_k": 20}
    with engine(model, additional_config=GROWING) as llm:
        apart = [llm.outputs(PROMPTS, LONG, seed=seed, **sampled) for seed in (7, 8)]
        together = llm.outputs(PROMPTS, LONG, n=2, seed=7, **sampled)
    for output, pair in zip(together, zip(*apart, strict=True), strict=True):
        answers = [list(answer.token_ids) for answer in output.outputs]
        assert answers == [list(one.outputs[0].token_ids) for one in pair]
        assert answers[0] != answers[1]


@first_runner
def test_preemption_goes_on_as_a_prompt_of_the_same_tokens(checkpoints_folder):
    """Before an answer was packed, in the step after which it is, and between two times."""
    model, prompts = make("llama-gqa", checkpoints_folder), PROMPTS[1:3]
    # in tokens: a ratio would be of a longer prompt then
    config = settings("cake", 100, decode_budget=128, decode_interval=INTERVAL)
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        for i, prompt in enumerate(prompts):
            llm.submit(str(i), prompt, LONG)
        seen, got = set(), {}
        for step in range(1000):
            if step in (20, 75, 110):
                assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
            for request_id, output in llm.step().items():
                got[request_id.split("-")[0]] = list(output.outputs[0].token_ids)
            seen |= {holding.frozen for holding in llm.holdings()}
            if not llm.llm.llm_engine.has_unfinished_requests():
                break
        assert seen == {False, True}
        assert llm.free_blocks == free
        assert {len(each) for each in cuts.values()} == {3}
        for i, prompt in enumerate(prompts):
            llm.alone(prompt, LONG, got[str(i)], cuts[str(i)])
