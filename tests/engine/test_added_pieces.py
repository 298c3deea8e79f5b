"""Prompts in pieces by methods which add up attention: H2O and D2O, against float64.

`test_prompts_in_pieces` has what every method shares, `test_added_attention` how answers go on.
Here a token's sum begins with its own row, whichever piece that is in, and is of what was held when
each row was computed; D2O merges what it drops at every boundary.
"""

import math

import numpy as np
import pytest
from prometheus_client import REGISTRY

import methods_reference as ref
from checkpoints import SHAPES, make, tokens
from engines import BLOCK, V2, engine, first_runner, settings
from test_added_attention import Sums
from test_decode_budgets import INTERVAL, Replay, rounded
from test_prompts_in_pieces import PIECE, WHOLE, Prompt

BOUND, ANSWER, WINDOW = 160, 170, {"h2o": 8, "d2o": 0}


def piecewise(method, budget, **more):
    own = {"window": WINDOW[method]} if WINDOW[method] else {}
    return settings(method, budget, max_whole=WHOLE, piece=PIECE, **own, **more)


class Added(Sums, Prompt):
    """A prompt in pieces, and behind it an answer that is bounded by `BOUND`."""

    def __init__(self, method, shape, seen, prompt, budget) -> None:
        super().__init__(method, shape, seen, prompt, budget)
        self.last = prompt + ANSWER
        self.paid = [[np.zeros(0) for _ in range(shape.kv_heads)] for _ in range(shape.layers)]
        self.boundaries: list[int] = []

    def after(self, computed: int) -> None:
        if computed > self.prompt:
            Replay.after(self, computed)
            return
        Prompt.after(self, computed)
        if computed == self.prompt:
            self.boundaries, self.packed_at, self.budget = self.packed_at, [], BOUND

    def pack_prompt(self, computed, cap, tail, low, lengths) -> None:
        before = [[list(own) for own in heads] for heads in self.held]
        if self.method == "h2o":
            super().pack_prompt(computed, cap, tail, low, lengths)
        else:
            self.merge_prompt(computed, cap, tail, low, lengths)
        for layer, heads in enumerate(before):
            for kv, own in enumerate(heads):
                kept = [own.index(at) for at in self.held[layer][kv]]
                self.paid[layer][kv] = self.paid[layer][kv][kept]

    def merge_prompt(self, computed, cap, tail, low, lengths) -> None:
        """A tail counts as recent, and takes in what is near it."""
        layers = self.shape.layers
        most = (self.most_pages + computed // BLOCK - self.first_block) * BLOCK + tail
        sums = [np.stack(heads) for heads in self.paid]
        given = ref.d2o_budgets(sums, cap * BLOCK + layers * tail, most)
        given = ref.apportion(given, sum(given), lengths)
        full = [length // BLOCK for length in lengths]
        pages = rounded([n - tail for n in given], cap, low, full)
        for layer in range(layers):
            k, v = (self.parts[layer, name] for name in "kv")
            for kv, own in enumerate(self.held[layer]):
                n = pages[layer] * BLOCK + tail
                chosen = ref.heavy_recent(self.paid[layer][kv], n)
                assert chosen[n - tail :] == list(range(len(own) - tail, len(own)))
                new_k, new_v, self.tau[layer][kv] = ref.merge(
                    k[own, kv], v[own, kv], chosen, threshold=self.tau[layer][kv]
                )
                self.held[layer][kv] = kept = [own[at] for at in chosen]
                k[kept, kv], v[kept, kv] = new_k, new_v
        self.most_pages = min(most // BLOCK, cap - (layers - 1) * low)
        self.first_block, self.pages = computed // BLOCK, cap
        self.packed_at.append(computed)


# With a tail and without one; chunks that end between blocks. What the runner gives, the rows of
# each step, is the same for all that adds them up.
@pytest.mark.parametrize(
    ("method", "length"), [("h2o", 531), ("d2o", 531), ("d2o", 480)][: 1 if V2 else None]
)
def test_every_token_reads_what_the_reference_holds(method, length, checkpoints_folder):
    name, budget = "llama-gqa", int(length * 0.4)
    config = piecewise(method, 0.4, decode_budget=BOUND, decode_interval=2 * INTERVAL)
    with engine(
        make(name, checkpoints_folder),
        additional_config=config,
        max_num_seqs=4,
        max_model_len=1024,
        max_num_batched_tokens=70,
    ) as llm:
        seen, free = llm.record_attention(), llm.free_blocks
        llm.submit("r", tokens(length, seed=5), ANSWER)
        llm.drain()
        assert llm.free_blocks == free
    replay = Added(method, SHAPES[name], seen, length, budget)
    replay.interval = 2 * INTERVAL
    for position in range(length + ANSWER - 1):
        replay.step(position)
    assert replay.boundaries[-1] == length
    assert len(replay.boundaries) >= 3
    assert replay.packed_at
    if method == "d2o":
        assert not any(math.isnan(tau) for heads in replay.tau for tau in heads)


LENGTHS = (150, 420, 531, 96)
PROMPTS = [tokens(length, seed=40 + length) for length in LENGTHS]
PROMPTS[1][:300] = PROMPTS[2][:300]


@first_runner
@pytest.mark.parametrize("method", ["h2o", "d2o"])
def test_a_prompt_depends_on_its_own_tokens(method, checkpoints_folder, keep_async_scheduling):
    """Not on its neighbours, chunks, cached blocks or how steps are scheduled."""
    model, config = make("llama-gqa", checkpoints_folder), piecewise(method, 0.4)
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        alone = [llm.generate([prompt], 30)[0] for prompt in PROMPTS]
        assert llm.compressor.compressed == 3
        (info,) = REGISTRY._names_to_collectors["vllm:kv_compress_info"].collect()
        # no probe judges, whatever the settings say
        assert {(each.labels["probe"], each.labels["probe_first"]) for each in info.samples} == {
            ("0", "0")
        }
    crowd = dict(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=1024)
    with engine(model, additional_config=config, async_scheduling=True, **crowd) as llm:
        free = llm.free_blocks
        assert llm.generate(PROMPTS, 30) == alone
        assert llm.generate(PROMPTS[::-1], 30)[::-1] == alone
        llm.settle()
        assert llm.free_blocks == free
