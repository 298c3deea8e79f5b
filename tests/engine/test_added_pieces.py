"""Prompts in pieces with methods that accumulate attention, H2O and D2O, against float64.

`test_prompts_in_pieces` tests the parts common to all methods, and `test_added_attention` tests
growing outputs. Here a token's sum starts with its own query and includes only attention over the
tokens that were kept when each query ran. D2O merges dropped tokens at every piece boundary.
"""

import math

import numpy as np
import pytest
from prometheus_client import REGISTRY

import methods_reference as ref
from checkpoints import SHAPES, tokens
from engines import BLOCK, engine, settings
from recordings import recorded
from test_added_attention import Sums
from test_decode_budgets import INTERVAL, Replay, round_to_pages
from test_prompts_in_pieces import MAX_WHOLE, PIECE, PieceReplay

BOUND, ANSWER, WINDOW = 160, 170, {"h2o": 8, "d2o": 0}


def pieces_settings(method, budget, **more):
    window = {"window": WINDOW[method]} if WINDOW[method] else {}
    return settings(method, budget, max_whole=MAX_WHOLE, piece=PIECE, **window, **more)


class PieceSumsReplay(Sums, PieceReplay):
    """Float64 replay of a prompt in pieces, followed by an output with decode budget `BOUND`."""

    def __init__(self, method, shape, seen, prompt, budget) -> None:
        super().__init__(method, shape, seen, prompt, budget)
        self.last = prompt + ANSWER
        self.paid = [[np.zeros(0) for _ in range(shape.kv_heads)] for _ in range(shape.layers)]
        self.boundaries: list[int] = []

    def after(self, computed: int) -> None:
        if computed > self.prompt:
            Replay.after(self, computed)
            return
        PieceReplay.after(self, computed)
        if computed == self.prompt:
            self.boundaries, self.packed_at, self.budget = self.packed_at, [], BOUND

    def pack_prompt(self, computed, cap, tail, low, lengths) -> None:
        before = [[list(positions) for positions in heads] for heads in self.held]
        if self.method == "h2o":
            super().pack_prompt(computed, cap, tail, low, lengths)
        else:
            self.merge_prompt(computed, cap, tail, low, lengths)
        for layer, heads in enumerate(before):
            for kv, positions in enumerate(heads):
                kept = [positions.index(at) for at in self.held[layer][kv]]
                self.paid[layer][kv] = self.paid[layer][kv][kept]

    def merge_prompt(self, computed, cap, tail, low, lengths) -> None:
        """Merge dropped tokens into kept ones; the tail counts as recent and is merged into."""
        layers = self.shape.layers
        max_tokens = (self.max_layer_pages + computed // BLOCK - self.first_block) * BLOCK + tail
        sums = [np.stack(heads) for heads in self.paid]
        layer_tokens = ref.d2o_budgets(sums, cap * BLOCK + layers * tail, max_tokens)
        layer_tokens = ref.apportion(layer_tokens, sum(layer_tokens), lengths)
        full = [length // BLOCK for length in lengths]
        pages = round_to_pages([n - tail for n in layer_tokens], cap, low, full)
        for layer in range(layers):
            k, v = (self.parts[layer, name] for name in "kv")
            for kv, positions in enumerate(self.held[layer]):
                n = pages[layer] * BLOCK + tail
                chosen = ref.heavy_recent(self.paid[layer][kv], n)
                assert chosen[n - tail :] == list(range(len(positions) - tail, len(positions)))
                new_k, new_v, self.tau[layer][kv] = ref.merge(
                    k[positions, kv], v[positions, kv], chosen, threshold=self.tau[layer][kv]
                )
                self.held[layer][kv] = kept = [positions[at] for at in chosen]
                k[kept, kv], v[kept, kv] = new_k, new_v
        self.max_layer_pages = min(max_tokens // BLOCK, cap - (layers - 1) * low)
        self.first_block, self.pages = computed // BLOCK, cap
        self.packed_at.append(computed)


# With and without a tail, and with chunks that end inside a block.
@pytest.mark.parametrize(("method", "length"), [("h2o", 531), ("d2o", 531), ("d2o", 480)])
def test_every_step_matches_the_reference(method, length, model):
    config = pieces_settings(method, 0.4, decode_budget=BOUND, decode_interval=2 * INTERVAL)
    run = recorded(model, config, tokens(length, seed=5), ANSWER, max_num_batched_tokens=70)
    replay = PieceSumsReplay(method, SHAPES["llama-gqa"], run.seen, length, int(length * 0.4))
    replay.interval = 2 * INTERVAL
    replay.steps(0, length + ANSWER - 1)
    assert replay.boundaries[-1] == length
    assert len(replay.boundaries) >= 3
    assert replay.packed_at
    if method == "d2o":
        assert not any(math.isnan(tau) for heads in replay.tau for tau in heads)


LENGTHS = (150, 420, 531, 96)
PROMPTS = [tokens(length, seed=40 + length) for length in LENGTHS]
PROMPTS[1][:300] = PROMPTS[2][:300]


@pytest.mark.parametrize("method", ["h2o", "d2o"])
def test_outputs_depend_only_on_the_prompt(method, model, async_scheduling_allowed):
    """Outputs do not depend on concurrent requests, chunks, cached blocks or scheduling."""
    config = pieces_settings(method, 0.4)
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        alone = [llm.generate([prompt], 30)[0] for prompt in PROMPTS]
        assert llm.compressor.compressed == 3
        (info,) = REGISTRY._names_to_collectors["vllm:kv_compress_info"].collect()
        # these methods use no probe, whatever the settings say
        assert {
            (sample.labels["probe"], sample.labels["probe_first"]) for sample in info.samples
        } == {("0", "0")}
    crowd = dict(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=1024)
    with engine(model, additional_config=config, async_scheduling=True, **crowd) as llm:
        free = llm.free_blocks
        assert llm.generate(PROMPTS, 30) == alone
        assert llm.generate(PROMPTS[::-1], 30)[::-1] == alone
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
