"""Answers that are bounded by methods which add up attention: H2O and D2O, against float64.

`test_decode_budgets` has what every method shares. Here each token has the sum of what all rows
since the prompt's first paid it, and goes on with that when it is packed; D2O merges what it drops
into what it keeps, by a threshold that moves.
"""

import math

import numpy as np
import pytest
import torch

import methods_reference as ref
from checkpoints import SHAPES, make, tokens
from engines import BLOCK, V2, engine, first_runner, settings
from test_decode_budgets import ANSWER, BUDGET, INTERVAL, PROMPT, Replay, rounded
from vllm_kvcompress.engine.worker.footprint import sizes_of
from vllm_kvcompress.planning.memory import sums_per_block


class Sums(Replay):
    """Also how much attention every held token was paid, per KV head."""

    def __init__(self, method, shape, seen, *args, **named) -> None:
        super().__init__(method, shape, seen, *args, **named)
        self.w = 0 if method == "d2o" else 8
        self.paid = [
            [ref.column_sums(q, k)[group].mean(0) for group in self.groups]
            for q, k in map(self.prompt_of, range(shape.layers))
        ]
        self.tau = [[math.nan] * shape.kv_heads for _ in range(shape.layers)]

    @property
    def groups(self):
        size = self.shape.heads // self.shape.kv_heads
        return [slice(kv * size, (kv + 1) * size) for kv in range(self.shape.kv_heads)]

    def prompt_of(self, layer):
        return [self.parts[layer, name][: self.prompt].transpose(1, 0, 2) for name in "qk"]

    def look(self, position):
        super().look(position)
        for layer in range(self.shape.layers):
            q, k = (self.parts[layer, name] for name in "qk")
            for kv, group in enumerate(self.groups):
                heads = range(group.start, group.stop)
                logits = (
                    np.asarray(q)[position] @ k[self.held[layer][kv], kv].T / math.sqrt(q.shape[2])
                )
                row = np.mean([ref.softmax(logits[h], self.sink(layer, h)) for h in heads], axis=0)
                self.paid[layer][kv] = np.append(self.paid[layer][kv], 0) + row

    def scores(self, layer, computed):
        own = np.stack(self.paid[layer])
        return own[:, : own.shape[1] - self.w], own

    def pack(self, computed, cap, lengths):
        before = [[list(own) for own in heads] for heads in self.held]
        if self.method == "h2o":
            super().pack(computed, cap, lengths)
        else:
            self.merge(computed, cap, lengths)
        for layer, heads in enumerate(before):
            for kv, own in enumerate(heads):
                kept = [own.index(at) for at in self.held[layer][kv]]
                self.paid[layer][kv] = self.paid[layer][kv][kept]

    def merge(self, computed, cap, lengths):
        """D2O's: sinks, heavy and recent tokens stay, and take in what is near enough to them."""
        shape = self.shape
        if self.counts is None:
            most = (self.most_pages + computed // BLOCK - self.first_block) * BLOCK
            sums = [np.stack(heads) for heads in self.paid]
            given = ref.d2o_budgets(sums, cap * BLOCK, most)
            given = ref.apportion(given, sum(given), lengths)
            self.counts = rounded(given, cap, 1, [n // BLOCK for n in lengths])
        for layer in range(shape.layers):
            k, v = (self.parts[layer, name] for name in "kv")
            for kv, own in enumerate(self.held[layer]):
                chosen = ref.heavy_recent(self.paid[layer][kv], self.counts[layer] * BLOCK)
                new_k, new_v, self.tau[layer][kv] = ref.merge(
                    k[own, kv], v[own, kv], chosen, threshold=self.tau[layer][kv]
                )
                self.held[layer][kv] = [own[at] for at in chosen]
                k[self.held[layer][kv], kv], v[self.held[layer][kv], kv] = new_k, new_v
        self.first_block, self.pages = computed // BLOCK, cap
        self.packed_at.append(computed)


@pytest.mark.parametrize("method", ["h2o", "d2o"][: 1 if V2 else None])
def test_every_step_reads_what_the_reference_holds(method, checkpoints_folder):
    name = "llama-gqa"
    with engine(
        make(name, checkpoints_folder),
        additional_config=settings(method, decode_budget=BUDGET, decode_interval=INTERVAL),
        max_num_seqs=4,
        max_model_len=1024,
        max_num_batched_tokens=32,
    ) as llm:
        seen, free = llm.record_attention(), llm.free_blocks
        llm.submit("r", tokens(PROMPT, seed=5), ANSWER)
        llm.drain()
        assert llm.free_blocks == free
    replay = Sums(method, SHAPES[name], seen)
    for position in range(PROMPT, PROMPT + ANSWER - 1):
        replay.step(position)
    assert len(replay.packed_at) >= 3


def held_of(llm, move, prompt):
    """What a compressed prompt holds: positions ``[L][Hkv]``, keys and values in that order."""
    pool, held = llm.compressor.pool, []
    tables, _ = pool.held([0], 64)
    for layer, count in enumerate(move.counts.tolist()):
        stays = count * BLOCK
        tail = torch.arange(prompt // BLOCK * BLOCK, prompt)
        pages = tables[0, layer, : count + 1]
        keys, values = llm.compressor.packer.mover.read(pages)
        keys, values = keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)
        heads = []
        for kv, kept in enumerate(move.kept[layer, :, :stays].long()):
            own = torch.cat([kept, tail])
            heads.append((own.tolist(), keys[kv, : len(own)], values[kv, : len(own)]))
        held.append(heads)
    return held


@first_runner
@pytest.mark.parametrize("method", ["h2o", "d2o"])
def test_an_answer_goes_on_from_what_its_prompt_kept(method, checkpoints_folder):
    """Its tokens' attention, tail included, and where it merges its thresholds are the prompt's."""
    name, prompt, budget, answer = "llama-gqa", 401, 160, 200
    shape, moves = SHAPES[name], []
    config = settings(method, 0.3, decode_budget=budget, decode_interval=2 * INTERVAL)
    with engine(
        make(name, checkpoints_folder),
        additional_config=config,
        max_num_seqs=4,
        max_model_len=1024,
        max_num_batched_tokens=150,
    ) as llm:
        seen, mover = llm.record_attention(), llm.compressor.packer.mover
        own = mover.move

        def moving(move):
            moves.append(move)
            return own(move)

        mover.move = moving
        llm.submit("r", tokens(prompt, seed=5), answer)
        while not llm.compressor.compressed:
            llm.step()
        (footprint,) = llm.holdings()
        start = footprint.pages, footprint.most_pages, footprint.first_block
        llm.step()
        held = held_of(llm, moves[0], prompt)
        if method == "d2o":
            (near,) = llm.compressor.pool.thresholds.read([*llm.compressor.pool._slots.values()])
        llm.drain()
    replay = Sums(method, shape, seen, prompt, budget, answer)
    replay.pages, replay.most_pages, replay.first_block = start
    replay.interval = 2 * INTERVAL
    for layer, heads in enumerate(held):
        for kv, (positions, keys, values) in enumerate(heads):
            replay.held[layer][kv] = positions
            replay.paid[layer][kv] = replay.paid[layer][kv][positions]
            replay.parts[layer, "k"][positions, kv] = keys.double().numpy()
            replay.parts[layer, "v"][positions, kv] = values.double().numpy()
            if method == "d2o":
                replay.tau[layer][kv] = near[layer, kv].item()
    for position in range(prompt, prompt + answer - 1):
        replay.step(position)
    assert len(replay.packed_at) >= 2


LENGTHS = (20, 150, 301, 64)
PROMPTS = [tokens(length, seed=40 + length) for length in LENGTHS]
BOTH = settings("h2o", 0.4, decode_budget=96, decode_interval=INTERVAL, allow_override="d2o")
ASKED = [{"kv_compress": method} for method in ("h2o", "d2o")]


@first_runner
def test_an_answer_depends_on_its_own_tokens(checkpoints_folder, keep_async_scheduling):
    """Not on its neighbours, chunks, the prefix cache or how steps are scheduled."""
    model = make("llama-gqa", checkpoints_folder)
    with engine(model, additional_config=BOTH, enable_prefix_caching=False) as llm:
        alone = [
            [llm.generate([prompt], 150, extra_args=asked)[0] for prompt in PROMPTS]
            for asked in ASKED
        ]
        pool = llm.compressor.pool
        blocks = llm.worker.vllm_config.cache_config.num_gpu_blocks
        each = sums_per_block(sizes_of(llm.worker.vllm_config), llm.worker.settings)
        assert pool.sums._sums.nbytes <= blocks * each < 1.1 * pool.sums._sums.nbytes
    assert alone[0] != alone[1]
    crowd = dict(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=1024)
    with engine(model, additional_config=BOTH, async_scheduling=True, **crowd) as llm:
        free = llm.free_blocks
        for turn in (1, -1):
            for index, asked in enumerate(ASKED):
                for at, prompt in list(enumerate(PROMPTS))[::turn]:
                    llm.submit(f"{index}.{at}", prompt, 150, extra_args=asked)
            got = {name.split("-")[0]: answer for name, answer in llm.drain().items()}
            assert [[got[f"{i}.{at}"] for at in range(4)] for i in range(2)] == alone
        llm.settle()
        assert llm.free_blocks == free

    tight = dict(blocks=14, max_model_len=416, enable_prefix_caching=False)
    with engine(model, additional_config=BOTH, **tight) as llm:
        in_place = llm.watch_packing(lambda finished: finished.pack_request.in_place)
        for index, asked in enumerate(ASKED):
            got = llm.generate([PROMPTS[2]], 110, extra_args=asked)[0]
            assert got == alone[index][2][:110]
        assert in_place == [True, True], "the pool was meant to have no room beside the prompt"


@first_runner
def test_preemption_goes_on_as_a_prompt_of_the_same_tokens(checkpoints_folder):
    """Sums and thresholds are of what is computed again: nothing of the first time is left."""
    model, prompts = make("llama-gqa", checkpoints_folder), PROMPTS[1:3]
    # in tokens: a ratio would be of a longer prompt then
    config = settings("h2o", 100, decode_budget=128, decode_interval=INTERVAL, allow_override="d2o")
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        cuts, got = llm.watch_preemptions(), {}
        for i, (prompt, asked) in enumerate(zip(prompts, ASKED, strict=True)):
            llm.submit(str(i), prompt, 150, extra_args=asked)
        for step in range(1000):
            if step in (20, 90, 120):
                assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
            for request_id, output in llm.step().items():
                got[request_id.split("-")[0]] = list(output.outputs[0].token_ids)
            if not llm.llm.llm_engine.has_unfinished_requests():
                break
        assert {len(each) for each in cuts.values()} == {3}
        for i, (prompt, asked) in enumerate(zip(prompts, ASKED, strict=True)):
            llm.alone(prompt, 150, got[str(i)], cuts[str(i)], extra_args=asked)


@first_runner
def test_an_answer_that_is_never_packed_leaves_a_neighbours_sums_alone(checkpoints_folder):
    """It may read the neighbour's blocks by the prefix cache, beside which those sums lie."""
    model, prompt = make("llama-gqa", checkpoints_folder), tokens(100, seed=3)
    config = settings("h2o", decode_budget=160, decode_interval=INTERVAL)
    beside = prompt[:96] + tokens(4, seed=4)
    with engine(model, additional_config=config) as llm:
        judged, add = [], llm.compressor.adder.add

        def adding(latest):
            judged.extend(pack_request.request_id.split("-")[0] for pack_request, _ in latest)
            add(latest)

        llm.compressor.adder.add = adding
        llm.submit("long", prompt, 150)
        for _ in range(3):
            llm.step()
        llm.submit("short", beside, 45)
        llm.step()
        own = [
            {block.block_id for block in llm.manager.req_to_blocks[request.request_id]}
            for request in llm.running()
        ]
        assert len(own[0] & own[1]) == 3, "the second was meant to read the first one's blocks"
        done = {name.split("-")[0]: answer for name, answer in llm.drain().items()}
        assert set(judged) == {"long"}
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        assert done["long"] == llm.generate([prompt], 150)[0]
        assert done["short"] == llm.generate([beside], 45)[0]


@first_runner
def test_what_holds_everything_changes_nothing(checkpoints_folder):
    path, prompts = make("llama-gqa", checkpoints_folder), [PROMPTS[0], PROMPTS[3]]
    with engine(path, max_num_seqs=4, max_model_len=1024) as llm:
        want = llm.generate(prompts, 200)
    config = settings("d2o", decode_budget=1024, decode_interval=INTERVAL, allow_override="h2o")
    with engine(path, additional_config=config, max_num_seqs=4, max_model_len=1024) as llm:
        for asked in ASKED:
            assert llm.generate(prompts, 200, extra_args=asked) == want
        assert not llm.manager.compression_stats.repacked
