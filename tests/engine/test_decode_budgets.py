"""Decode budgets: tokens kept during decoding, and their number, compared with float64.

The reference gets the queries, keys and values that the attention layers received. It replays the
output: when the request is packed, how many tokens each layer keeps, which ones, and the attention
of every step.
"""

import math

import numpy as np
import pytest
import torch

import methods_reference as ref
from checkpoints import SHAPES, make, tokens
from engines import BLOCK, V2, engine, model_runner_v1_only, settings
from recordings import packed_pages

FLOAT32_EPS = torch.finfo(torch.float32).eps
PROMPT, BUDGET, INTERVAL, OUTPUT_TOKENS = 45, 64, 32, 150
WINDOWS = {"streamingllm": 0, "tova": 1}
METHODS = [
    "snapkv",
    "pyramidkv",
    "tova",
    "cake",
    "chunkkv",
    "streamingllm",
    "cake-chunk",
    "caote",
    "fastcaote",
]


def scores_of(method, q, k, v, w, allocator_window=None, *, scored_by_output=False):
    """Return scores ``[Hkv, P]`` of a layer's tokens by its last w queries ``[w, Hq, d]``.

    The second value is CAKE's statistics, which may use fewer queries, or None.
    """
    slots = ref.with_sinks(np.zeros((q.shape[1], *k.shape[1:])), getattr(q, "sinks", None))
    if w:
        slots[:, -w:] = q.transpose(1, 0, 2)
    cake = method in ("cake", "cake-chunk")
    stats = ref.cake_stats(slots, k, allocator_window or w) if cake else None
    if scored_by_output and method in ref.OUTPUT_SCORERS:
        return ref.OUTPUT_SCORERS[method](slots, k, v, w, allocator_window), stats
    return ref.WINDOW_SCORERS[method](slots, k, v, w), stats


def round_to_pages(shares, total, low, caps):
    """Return each layer's pages, `total` in sum, by largest remainders.

    If layers raised to `low` pages take too many, the others give up pages in proportion to their
    pages above `low`.
    """
    held = [min(max(n, low * BLOCK), cap * BLOCK) for n, cap in zip(shares, caps, strict=True)]
    pages = [n // BLOCK for n in held]
    if sum(pages) > total:
        return ref.apportion([n - low * BLOCK for n in held], total, caps, low)
    order = sorted(range(len(held)), key=lambda i: (-(held[i] % BLOCK), i))
    while sum(pages) < total:
        for i in order:
            if sum(pages) < total and pages[i] < caps[i]:
                pages[i] += 1
    return pages


def budgets(method, stats, layers, max_tokens, pages, w, lengths):
    """Return each layer's tokens. Other layers get, in proportion, what one layer cannot hold."""
    total, past = pages * BLOCK, max_tokens - w
    base = pages * BLOCK // layers - w
    if method in ("cake", "cake-chunk"):
        weights = [h * s for h, s in stats]
        shares = ref.apportion(
            [x / max(weights) for x in weights], total - layers * w, [past] * layers
        )
    elif method == "pyramidkv":
        shares = ref.pyramid_budgets(layers, base, past)
    else:
        shares = [min(base, past)] * layers
    shares = ref.apportion(shares, sum(shares), [length - w for length in lengths])
    return [n + w for n in shares]


def min_pages(w, tail, guarded):
    """Return the pages for the window and the protected tokens before the tail, at least one."""
    return max(-(-(max(w - tail, 0) + guarded) // BLOCK), 1)


def round_up_to_blocks(pages, layers):
    """Return the pages of the blocks that hold `pages`, so that the last block is filled."""
    return -(-pages // layers) * layers


def kept_slots_per_head(scores, held, past, keep, size, protected):
    """Return, for each KV head, the kept slots among the first `past` slots.

    Protected tokens are always kept. The best tokens, or chunks of `size` tokens, fill the rest.
    """
    protected_slots = [[j for j in range(past) if held_by[j] in protected] for held_by in held]
    other_slots = [sorted(set(range(past)) - set(slots)) for slots in protected_slots]
    head_scores = [row[slots] for row, slots in zip(scores, other_slots, strict=True)]
    if size:
        head_scores = [sum(head_scores)] * len(head_scores)
    kept = []
    for row, slots, others in zip(head_scores, protected_slots, other_slots, strict=True):
        remaining = keep - len(slots)
        best = ref.chunks(row, remaining, size) if size else ref.best(row, remaining)
        kept.append(sorted([*slots, *(others[j] for j in best)]))
    return kept


class Replay:
    """Replays a request in float64: the token positions that each layer and KV head holds."""

    protected: frozenset[int] = frozenset()

    def __init__(self, method, shape, seen, prompt=PROMPT, budget=BUDGET, num_output=OUTPUT_TOKENS):
        self.method, self.shape = method, shape
        self.prompt, self.budget, self.last = prompt, budget, prompt + num_output
        self.w, self.interval = WINDOWS.get(method, 8), INTERVAL
        self.allocator_window: int | None = None
        self.scored_by_output = False
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
        self.first_block = self.pages = self.max_layer_pages = 0
        self.packed_at: list[int] = []

    def sink(self, layer: int, head: int):
        sinks = getattr(self.parts[layer, "q"], "sinks", None)
        return None if sinks is None else sinks[head]

    def step(self, position: int) -> None:
        """Check the step that computes `position`, and replay the packing after it."""
        self.look(position)
        self.after(position + 1)

    def steps(self, start: int, stop: int) -> None:
        """Check and replay the steps that compute the positions from `start` to `stop`."""
        for position in range(start, stop):
            self.step(position)

    def look(self, position: int) -> None:
        """Check that `position` attends to the held positions and itself."""
        shape = self.shape
        for layer in range(shape.layers):
            q, k, v, out = (self.parts[layer, name] for name in ("q", "k", "v", "out"))
            for held in self.held[layer]:
                held.append(position)
            positions, kv = np.asarray(self.held[layer]), np.arange(shape.kv_heads)[:, None]
            keys, values = k[positions, kv], v[positions, kv]  # [Hkv, n, D]
            queries = np.asarray(q)[position].reshape(shape.kv_heads, -1, shape.head_dim)
            logits = queries @ keys.swapaxes(1, 2) / math.sqrt(shape.head_dim)
            sinks = getattr(q, "sinks", None)
            sinks = None if sinks is None else sinks.reshape(shape.kv_heads, -1, 1)
            expected = ref.softmax(logits, sinks) @ values
            longest, largest = np.linalg.norm(keys, axis=-1).max(1), np.abs(values).max((1, 2))
            reach = longest[:, None] * np.linalg.norm(queries, axis=-1)
            rounding = 2 * FLOAT32_EPS * reach / math.sqrt(shape.head_dim)
            bound = (1e-6 + rounding) * largest[:, None]
            error = np.abs(out[position].reshape(expected.shape) - expected).max(-1)
            assert (error <= bound).all(), (position, layer)

    def after(self, computed: int) -> None:
        """Pack the request if the number of computed tokens requires it."""
        if computed % BLOCK or computed // BLOCK * BLOCK - self.first_block * BLOCK < self.interval:
            return
        layers = self.shape.layers
        least = layers * max(-(-(self.w + len(self.protected)) // BLOCK), 1)
        cap = max(self.pages, round_up_to_blocks(layers * self.budget // BLOCK, layers), least)
        lengths = [len(heads[0]) for heads in self.held]
        if sum(lengths) // BLOCK <= cap or computed - self.prompt < self.w:
            return
        if computed + 1 >= self.last:
            return
        self.pack(computed, cap, lengths)

    def scores(self, layer: int, computed: int):
        """Return the scores of a layer's tokens by the last w queries (`scores_of`)."""
        q, k, v = (self.parts[layer, name] for name in "qkv")
        keys, values = (
            np.stack([part[positions, kv] for kv, positions in enumerate(self.held[layer])])
            for part in (k, v)
        )
        latest = q[computed - self.w : computed]
        return scores_of(
            self.method,
            latest,
            keys,
            values,
            self.w,
            allocator_window=self.allocator_window,
            scored_by_output=self.scored_by_output,
        )

    def guarded(self, end: int) -> int:
        """Return the number of protected tokens before `end`."""
        return sum(at < end for at in self.protected)

    @property
    def chunk(self):
        """Return the tokens in a chunk, None if tokens are selected one by one."""
        if self.scored_by_output and self.method in ref.OUTPUT_SCORERS:
            return None
        return ref.CHUNKS.get(self.method)

    def pack(self, computed: int, cap: int, lengths: list[int]) -> None:
        shape, w = self.shape, self.w
        layer_scores = [self.scores(layer, computed) for layer in range(shape.layers)]
        if self.counts is None:
            # The host's bound on the longest layer, from lengths alone.
            max_tokens = (self.max_layer_pages + computed // BLOCK - self.first_block) * BLOCK
            stats = [layer_stats for _, layer_stats in layer_scores]
            always_kept = w + self.guarded(computed - w)
            shares = budgets(
                self.method, stats, shape.layers, max_tokens, cap, always_kept, lengths
            )
            low = max(-(-always_kept // BLOCK), 1)
            self.counts = round_to_pages(shares, cap, low, [n // BLOCK for n in lengths])
        size = self.chunk
        for layer, (scores, _) in enumerate(layer_scores):
            keep = self.counts[layer] * BLOCK - w
            past = lengths[layer] - w
            kept = kept_slots_per_head(scores, self.held[layer], past, keep, size, self.protected)
            for kv, positions in enumerate(self.held[layer]):
                self.held[layer][kv] = [positions[j] for j in kept[kv]] + positions[past:]
        self.first_block, self.pages = computed // BLOCK, cap
        self.packed_at.append(computed)


@pytest.fixture(scope="module")
def any_method(model):
    bounds = {"decode_budget": BUDGET, "decode_interval": INTERVAL}
    config = settings(**bounds, allow_override=",".join(METHODS))
    with engine(model, additional_config=config, max_num_seqs=4, max_model_len=1024) as llm:
        yield llm


@pytest.mark.parametrize("method", METHODS[3:4] if V2 else METHODS)
def test_decode_budget_keeps_the_reference_tokens(method, any_method):
    """Once packed, a request holds at most the blocks of its budget and interval, and one more."""
    with any_method.lent() as llm:
        seen, free, packed = llm.record_attention(), llm.free_blocks, []
        prompt = tokens(PROMPT, seed=5)
        llm.submit("r", prompt, OUTPUT_TOKENS, extra_args={"kv_compress": method})
        while llm.llm.llm_engine.has_unfinished_requests():
            llm.step()
            (request,) = llm.scheduler.running or [None]
            if request is not None:
                held = llm.num_blocks_held(request.request_id)
                assert free - llm.free_blocks == held
                (footprint,) = llm.footprints() or [None]
                if footprint is not None and footprint.frozen:
                    packed.append(footprint.first_block * BLOCK)
                    assert held <= BUDGET // BLOCK + INTERVAL // BLOCK + 1
    replay = Replay(method, SHAPES["llama-gqa"], seen)
    replay.steps(PROMPT, PROMPT + OUTPUT_TOKENS - 1)
    assert sorted(set(packed)) == replay.packed_at
    assert len(replay.packed_at) >= 3


def held_positions(llm, seen, prompt):
    """Return ``[L][Hkv]`` lists of the prompt positions that a compressed request's pages hold."""
    held = []
    for layer, (keys, _) in enumerate(packed_pages(llm)):
        heads, dim = keys.shape[0], keys.shape[2]
        prompt_keys = torch.cat([part.flatten(1) for part in seen[layer]["k"]])[:prompt]
        prompt_keys = prompt_keys.view(prompt, heads, dim)
        positions = [
            {prompt_keys[i, h].numpy().tobytes(): i for i in range(prompt)} for h in range(heads)
        ]
        tail = list(range(prompt // BLOCK * BLOCK, prompt))
        held.append(
            [[positions[h][key.numpy().tobytes()] for key in keys[h]] + tail for h in range(heads)]
        )
    return held


@model_runner_v1_only
def test_decode_budget_after_a_compressed_prompt(checkpoints_folder):
    """Layers then hold different numbers of tokens, and none gets more pages than it holds."""
    name, method, prompt, budget, num_output = "llama-gqa", "pyramidkv", 401, 160, 200
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
        llm.submit("r", tokens(prompt, seed=5), num_output)
        while not llm.compressor.compressed:
            llm.step()
        held = held_positions(llm, seen, prompt)
        (footprint,) = llm.footprints()
        pages, max_layer_pages, first = (
            footprint.pages,
            footprint.max_layer_pages,
            footprint.first_block,
        )
        llm.drain()
    replay = Replay(method, shape, seen, prompt, budget, num_output)
    replay.held, replay.pages, replay.max_layer_pages, replay.first_block = (
        held,
        pages,
        max_layer_pages,
        first,
    )
    replay.interval = 2 * INTERVAL
    assert len({len(heads[0]) for heads in held}) > 1
    replay.steps(prompt, prompt + num_output - 1)
    assert len(replay.packed_at) >= 2
    assert sum(replay.counts) == shape.layers * budget // BLOCK


LENGTHS = (20, 150, 301, 64, 97, 260)
PROMPTS = [tokens(length, seed=40 + length) for length in LENGTHS[: 3 if V2 else None]]
NUM_OUTPUT = 60 if V2 else 130
BOUNDED = settings("cake", 0.3, decode_budget=BUDGET, decode_interval=INTERVAL)


@pytest.fixture(scope="module")
def single_outputs(model):
    """The output of each prompt when it runs alone."""
    with engine(model, additional_config=BOUNDED, enable_prefix_caching=False) as llm:
        return [llm.generate([prompt], NUM_OUTPUT)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 1024},
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
    """Nor on chunk sizes, the prefix cache or async scheduling."""
    with engine(model, additional_config=BOUNDED, **more) as llm:
        free = llm.free_blocks
        assert llm.generate(PROMPTS, NUM_OUTPUT) == single_outputs
        if "async_scheduling" in more:
            assert llm.core.batch_queue is not None
            llm.finish_in_flight_steps()
        assert llm.generate(PROMPTS[::-1], NUM_OUTPUT)[::-1] == single_outputs
        assert llm.free_blocks == free


@model_runner_v1_only
def test_parallel_samples_have_separate_decode_budgets(model):
    """n=2: each sample is a request, and the prompt's blocks are shared until one is packed."""
    sampled = {"temperature": 1.0, "top_k": 20}
    with engine(model, additional_config=BOUNDED) as llm:
        separate = [llm.outputs(PROMPTS, NUM_OUTPUT, seed=seed, **sampled) for seed in (7, 8)]
        together = llm.outputs(PROMPTS, NUM_OUTPUT, n=2, seed=7, **sampled)
    for result, pair in zip(together, zip(*separate, strict=True), strict=True):
        samples = [list(sample.token_ids) for sample in result.outputs]
        assert samples == [list(single.outputs[0].token_ids) for single in pair]
        assert samples[0] != samples[1]


@model_runner_v1_only
def test_preempted_request_continues_as_a_prompt_of_the_same_tokens(model):
    """Before the output is packed, in the step before its packing, and between two packings."""
    prompts = PROMPTS[1:3]
    # The budget is in tokens, because a ratio would apply to the longer prompt.
    config = settings("cake", 100, decode_budget=128, decode_interval=INTERVAL)
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        free, preemptions = llm.free_blocks, llm.watch_preemptions()
        for i, prompt in enumerate(prompts):
            llm.submit(str(i), prompt, NUM_OUTPUT)
        seen_frozen, outputs = set(), {}
        for step in range(1000):
            if step in (20, 75, 110):
                assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
            for request_id, output in llm.step().items():
                outputs[request_id] = list(output.outputs[0].token_ids)
            seen_frozen |= {footprint.frozen for footprint in llm.footprints()}
            if not llm.llm.llm_engine.has_unfinished_requests():
                break
        assert seen_frozen == {False, True}
        assert llm.free_blocks == free
        assert {len(times) for times in preemptions.values()} == {3}
        requests = [(p, outputs[str(i)], preemptions[str(i)], None) for i, p in enumerate(prompts)]
        llm.assert_match_solo_runs(requests, NUM_OUTPUT)
