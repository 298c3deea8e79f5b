"""Decode budgets with methods that accumulate attention, H2O and D2O, against float64.

`test_decode_budgets` tests the parts common to all methods. Here each token has the sum of the
attention of all queries since the start of the prompt, and keeps it when it is packed. D2O merges
dropped tokens into kept ones, with a threshold that changes over time.
"""

import math

import numpy as np
import pytest
import torch

import methods_reference as ref
from checkpoints import SHAPES, make, tokens
from engines import BLOCK, engine, settings
from recordings import recorded
from test_decode_budgets import BUDGET, INTERVAL, OUTPUT_TOKENS, PROMPT, Replay, round_to_pages
from vllm_kvcompress.engine.device_memory import sizes_of
from vllm_kvcompress.planning.memory import sum_bytes_per_block


class Sums(Replay):
    """Float64 replay that also tracks the accumulated attention of every kept token, by KV head."""

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
        sums = np.stack(self.paid[layer])
        return sums[:, : sums.shape[1] - self.w], sums

    def pack(self, computed, cap, lengths):
        before = [[list(positions) for positions in heads] for heads in self.held]
        if self.method == "h2o":
            super().pack(computed, cap, lengths)
        else:
            self.merge(computed, cap, lengths)
        for layer, heads in enumerate(before):
            for kv, positions in enumerate(heads):
                kept = [positions.index(at) for at in self.held[layer][kv]]
                self.paid[layer][kv] = self.paid[layer][kv][kept]

    def merge(self, computed, cap, lengths):
        """Apply D2O: keep sinks, heavy and recent tokens, and merge similar dropped tokens in."""
        shape = self.shape
        if self.counts is None:
            max_tokens = (self.max_layer_pages + computed // BLOCK - self.first_block) * BLOCK
            sums = [np.stack(heads) for heads in self.paid]
            layer_tokens = ref.d2o_budgets(sums, cap * BLOCK, max_tokens)
            layer_tokens = ref.apportion(layer_tokens, sum(layer_tokens), lengths)
            self.counts = round_to_pages(layer_tokens, cap, 1, [n // BLOCK for n in lengths])
        for layer in range(shape.layers):
            k, v = (self.parts[layer, name] for name in "kv")
            for kv, positions in enumerate(self.held[layer]):
                chosen = ref.heavy_recent(self.paid[layer][kv], self.counts[layer] * BLOCK)
                new_k, new_v, self.tau[layer][kv] = ref.merge(
                    k[positions, kv], v[positions, kv], chosen, threshold=self.tau[layer][kv]
                )
                self.held[layer][kv] = [positions[at] for at in chosen]
                k[self.held[layer][kv], kv], v[self.held[layer][kv], kv] = new_k, new_v
        self.first_block, self.pages = computed // BLOCK, cap
        self.packed_at.append(computed)


@pytest.mark.parametrize("method", ["h2o", "d2o"])
def test_every_step_matches_the_reference(method, model):
    config = settings(method, decode_budget=BUDGET, decode_interval=INTERVAL)
    prompt = tokens(PROMPT, seed=5)
    run = recorded(model, config, prompt, OUTPUT_TOKENS, max_num_batched_tokens=32)
    replay = Sums(method, SHAPES["llama-gqa"], run.seen)
    replay.steps(PROMPT, PROMPT + OUTPUT_TOKENS - 1)
    assert len(replay.packed_at) >= 3


def kept_tokens_of(llm, move, prompt):
    """Return the kept positions ``[L][Hkv]`` of a compressed prompt, with their keys and values."""
    pool, layers = llm.compressor.pool, []
    tables, _ = pool.row_tables([0], 64)
    for layer, count in enumerate(move.counts.tolist()):
        kept_tokens = count * BLOCK
        tail = torch.arange(prompt // BLOCK * BLOCK, prompt)
        pages = tables[0, layer, : count + 1]
        keys, values = llm.compressor.packer.mover.read(pages)
        keys, values = keys.permute(1, 0, 3, 2).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)
        heads = []
        for kv, kept in enumerate(move.kept[layer, :, :kept_tokens].long()):
            positions = torch.cat([kept, tail])
            count_held = len(positions)
            heads.append((positions.tolist(), keys[kv, :count_held], values[kv, :count_held]))
        layers.append(heads)
    return layers


@pytest.mark.parametrize("method", ["h2o", "d2o"])
def test_output_continues_from_the_prompts_kept_tokens(method, checkpoints_folder):
    """The output continues with the prompt's attention sums (tail included) and thresholds."""
    name, prompt, budget, output_tokens = "llama-gqa", 401, 160, 200
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
        original_move = mover.move

        def recording_move(move):
            moves.append(move)
            return original_move(move)

        mover.move = recording_move
        llm.submit("r", tokens(prompt, seed=5), output_tokens)
        while not llm.compressor.compressed:
            llm.step()
        (footprint,) = llm.footprints()
        start = footprint.pages, footprint.max_layer_pages, footprint.first_block
        llm.step()
        kept_layers = kept_tokens_of(llm, moves[0], prompt)
        if method == "d2o":
            (thresholds,) = llm.compressor.pool.thresholds.read(
                [*llm.compressor.pool._slots.values()]
            )
        llm.drain()
    replay = Sums(method, shape, seen, prompt, budget, output_tokens)
    replay.pages, replay.max_layer_pages, replay.first_block = start
    replay.interval = 2 * INTERVAL
    for layer, heads in enumerate(kept_layers):
        for kv, (positions, keys, values) in enumerate(heads):
            replay.held[layer][kv] = positions
            replay.paid[layer][kv] = replay.paid[layer][kv][positions]
            replay.parts[layer, "k"][positions, kv] = keys.double().numpy()
            replay.parts[layer, "v"][positions, kv] = values.double().numpy()
            if method == "d2o":
                replay.tau[layer][kv] = thresholds[layer, kv].item()
    replay.steps(prompt, prompt + output_tokens - 1)
    assert len(replay.packed_at) >= 2


LENGTHS = (20, 150, 301, 64)
NUM_OUTPUT = 120  # also packs the output of the shortest prompt
PROMPTS = [tokens(length, seed=40 + length) for length in LENGTHS]
BOTH = settings("h2o", 0.4, decode_budget=96, decode_interval=INTERVAL, allow_override="d2o")
OVERRIDES = [{"kv_compress": method} for method in ("h2o", "d2o")]


def test_outputs_depend_only_on_the_prompt(model, async_scheduling_allowed):
    """Outputs do not depend on concurrent requests, chunks, the prefix cache or scheduling."""
    with engine(model, additional_config=BOTH, enable_prefix_caching=False) as llm:
        alone = [
            [llm.generate([prompt], NUM_OUTPUT, extra_args=override)[0] for prompt in PROMPTS]
            for override in OVERRIDES
        ]
        pool = llm.compressor.pool
        blocks = llm.worker.vllm_config.cache_config.num_gpu_blocks
        block_bytes = sum_bytes_per_block(sizes_of(llm.worker.vllm_config), llm.worker.settings)
        assert pool.sums._sums.nbytes <= blocks * block_bytes < 1.1 * pool.sums._sums.nbytes
    assert alone[0] != alone[1]
    crowd = dict(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=1024)
    with engine(model, additional_config=BOTH, async_scheduling=True, **crowd) as llm:
        free = llm.free_blocks
        for order in (1, -1):
            for index, override in enumerate(OVERRIDES):
                for prompt_index, prompt in list(enumerate(PROMPTS))[::order]:
                    llm.submit(f"{index}.{prompt_index}", prompt, NUM_OUTPUT, extra_args=override)
            outputs = llm.drain()
            assert [[outputs[f"{i}.{p}"] for p in range(4)] for i in range(2)] == alone
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free

    tight = dict(blocks=14, max_model_len=416, enable_prefix_caching=False)
    with engine(model, additional_config=BOTH, **tight) as llm:
        in_place = llm.watch_packing(lambda finished: finished.pack_request.in_place)
        for index, override in enumerate(OVERRIDES):
            (output,) = llm.generate([PROMPTS[2]], 110, extra_args=override)
            assert output == alone[index][2][:110]
        assert in_place == [True, True], "the pool should have no free blocks beside the prompt"


def test_preempted_request_continues_as_a_prompt_of_its_tokens(model):
    """After a preemption, sums and thresholds are recomputed and do not include the first run."""
    prompts = PROMPTS[1:3]
    # The budget is in tokens, because a ratio would apply to the longer prompt after a preemption.
    config = settings("h2o", 100, decode_budget=128, decode_interval=INTERVAL, allow_override="d2o")
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        cuts, outputs = llm.watch_preemptions(), {}
        for i, (prompt, override) in enumerate(zip(prompts, OVERRIDES, strict=True)):
            llm.submit(str(i), prompt, 150, extra_args=override)
        for step in range(1000):
            if step in (20, 90, 120):
                assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
            for request_id, output in llm.step().items():
                outputs[request_id] = list(output.outputs[0].token_ids)
            if not llm.llm.llm_engine.has_unfinished_requests():
                break
        assert {len(request_cuts) for request_cuts in cuts.values()} == {3}
        requests = [
            (prompt, outputs[str(i)], cuts[str(i)], override)
            for i, (prompt, override) in enumerate(zip(prompts, OVERRIDES, strict=True))
        ]
        llm.assert_match_solo_runs(requests, 150)


def test_unpacked_request_does_not_change_sums_of_shared_blocks(model):
    """The short request shares blocks through the prefix cache, and their sums are shared too."""
    prompt = tokens(100, seed=3)
    config = settings("h2o", decode_budget=160, decode_interval=INTERVAL)
    same_prefix = prompt[:96] + tokens(4, seed=4)
    with engine(model, additional_config=config) as llm:
        added, add = [], llm.compressor.adder.add

        def recording_add(additions):
            added.extend(addition.request_id.split("-")[0] for addition, _ in additions)
            add(additions)

        llm.compressor.adder.add = recording_add
        llm.submit("long", prompt, 150)
        for _ in range(3):
            llm.step()
        llm.submit("short", same_prefix, 45)
        llm.step()
        long_blocks, short_blocks = (
            {block.block_id for block in llm.manager.req_to_blocks[request.request_id]}
            for request in llm.running()
        )
        assert len(long_blocks & short_blocks) == 3, "the requests should share three blocks"
        done = llm.drain()
        assert set(added) == {"long"}
    with engine(model, additional_config=config, enable_prefix_caching=False) as llm:
        assert done["long"] == llm.generate([prompt], 150)[0]
        assert done["short"] == llm.generate([same_prefix], 45)[0]


def test_budget_above_the_length_changes_nothing(model):
    prompts = [PROMPTS[0], PROMPTS[3]]
    with engine(model, max_num_seqs=4, max_model_len=1024) as llm:
        expected = llm.generate(prompts, 200)
    config = settings("d2o", decode_budget=1024, decode_interval=INTERVAL, allow_override="h2o")
    with engine(model, additional_config=config, max_num_seqs=4, max_model_len=1024) as llm:
        for override in OVERRIDES:
            assert llm.generate(prompts, 200, extra_args=override) == expected
        assert not llm.scheduler.step_builder.stats.repacked_answers
