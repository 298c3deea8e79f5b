"""Requests packed in k4v3: independence of other requests, blocks, and packed outputs."""

import math

import pytest
import torch

from checkpoints import SHAPES, make, tokens
from configuring import configure
from engines import BLOCK, V2, engine, model_runner_v1_only, settings
from group_replay import assert_never_written_again, assert_replay_matches, watch_added_groups
from kvcompress_kernels import k4v3
from vllm_kvcompress.engine.startup import configure as configure_module
from vllm_kvcompress.methods.page_plan import RECENT_TOKENS

MODEL, SHAPE = "qwen3", SHAPES["qwen3"]
LENGTHS = (900, 1500, 90, 1033)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
CONFIGS = {
    "cake": settings("cake", 0.5, packed_dtype="k4v3"),
    "everything": settings("snapkv", 1.0, packed_dtype="k4v3"),
    "look-ahead": settings("cake-chunk", 0.5, packed_dtype="k4v3", lookahead=6),
    "merging": settings("d2o", 0.5, packed_dtype="k4v3"),
    "outputs": settings("cake", 0.5, packed_dtype="k4v3", decode_interval=128),
}


def packed_engine(checkpoints_folder, name, **options):
    defaults = {"max_num_seqs": 8, "max_model_len": 2048}
    return engine(
        make(MODEL, checkpoints_folder), additional_config=CONFIGS[name], **defaults | options
    )


@pytest.mark.parametrize("name", ["everything"] if V2 else CONFIGS)
def test_output_does_not_depend_on_other_requests(checkpoints_folder, name):
    """Alone, in a batch, in chunks, after a prefix-cache hit, and after a preemption."""
    count = 270 if name == "outputs" else 14  # an output packs its first page after 256 tokens
    with packed_engine(checkpoints_folder, name, max_num_batched_tokens=700) as llm:
        free = llm.free_blocks
        together = llm.generate(PROMPTS, count)
        packed_prompts = llm.compressor.compressed
        assert packed_prompts == sum(length >= 128 for length in LENGTHS)
        # the second run finds the prompts' full blocks in the prefix cache
        assert llm.generate(PROMPTS, count) == together
        assert [llm.generate([prompt], count)[0] for prompt in PROMPTS] == together
        if name != "look-ahead":  # a resumed request has had its look-ahead
            llm.submit("cut", PROMPTS[0], count)
            while llm.compressor.compressed == 3 * packed_prompts:
                llm.step()
            cuts = llm.watch_preemptions()
            llm.preempt(llm.running()[0])
            (output,) = llm.drain().values()
            llm.assert_match_solo_runs([(PROMPTS[0], output, cuts["cut"], None)], count)
        assert llm.free_blocks == free


@model_runner_v1_only
@pytest.mark.parametrize(
    ("budget", "extra", "waits"),
    [
        (0.6, {}, [""]),
        (1.0, {}, []),
        (1.0, {"allow_override": "cake-chunk"}, [", if its budget drops tokens"]),
    ],
)
def test_the_log_names_a_look_ahead_only_if_a_prompt_may_wait(
    checkpoints_folder, monkeypatch, budget, extra, waits
):
    lines = []
    monkeypatch.setattr(
        configure_module.logger, "info", lambda text, *args: lines.append(text % args)
    )
    additional_config = settings("cake-chunk", budget, packed_dtype="k4v3", lookahead=32, **extra)
    configure(make(MODEL, checkpoints_folder), additional_config=additional_config)
    assert f"cake-chunk at a budget of {budget} packs kept tokens in k4v3" in lines
    waiting = "cake-chunk compresses a prompt after 32 output tokens"
    assert [line.removeprefix(waiting) for line in lines if waiting in line] == waits


@model_runner_v1_only
@pytest.mark.parametrize("name", ["cake", "outputs"])
def test_decoding_requests_hold_a_quarter_of_the_blocks_or_less(checkpoints_folder, name):
    with packed_engine(checkpoints_folder, name, max_num_batched_tokens=2048) as llm:
        free, prompt = llm.free_blocks, PROMPTS[1]
        llm.submit("r", prompt, 400)
        held = []
        while llm.scheduler.requests or not held:
            llm.step()
            held.append(free - llm.free_blocks)
        itemsize = llm.compressor.pool.itemsize
        page_tokens = k4v3.page_tokens(BLOCK, itemsize)
        # float32: pages of 256 tokens; 0.5 of 1,500 tokens is 750, in 3 blocks behind the first
        assert page_tokens == 256
        # the last 60 tokens are in 2 blocks
        assert held[2] == 1 + 3 + 2
        # 1,500 + 400 tokens in vLLM's 60 blocks; the last output token is never computed
        unpacked = math.ceil((1500 + 399) / BLOCK) - (1500 - RECENT_TOKENS) // BLOCK
        if name == "cake":
            assert held[-2] == 1 + 3 + unpacked
        else:
            # the interval of 128 tokens is rounded up to a page: one packing, of 8 blocks
            assert held[-2] == 1 + 3 + 1 + unpacked - 8


@model_runner_v1_only
@pytest.mark.parametrize("prompt_tokens", [1500, 90])
def test_output_groups_are_packed_once_and_every_step_reads_them(checkpoints_folder, prompt_tokens):
    """Codes and steps against float64, for compressed prompts and short ones."""
    prompt, count, block = tokens(prompt_tokens, seed=5), 560, BLOCK
    options = {"max_num_batched_tokens": 2048, "max_model_len": 2560}
    with packed_engine(checkpoints_folder, "outputs", **options) as llm:
        seen, pool = llm.record_attention(), llm.compressor.pool
        results = llm.watch_packing(lambda result: result)
        added = watch_added_groups(llm, seen)
        llm.submit("r", prompt, count)
        while len(seen.get(0, {"q": ()})["q"]) < count:
            llm.step()
        (slot,) = pool._slots.values()
        page_tokens = k4v3.page_tokens(block, pool.itemsize)
        assert len(added) >= 2
        assert_never_written_again(pool, added)
        total = pool._group_tokens[slot].tolist()
        kept = [0] * SHAPE.layers
        prompt_groups = [[torch.zeros(2, 0, 64, dtype=torch.float64)] * 2] * SHAPE.layers
        if results:
            kept = [
                (result := results[0]).pack_request.plan.layer_tokens(n)
                for n in results[0].counts.tolist()
            ]
            kept = [n - result.pack_request.plan.tail - block for n in kept]
        assert total == [n + sum(each.tokens for each in added) for n in kept]
        assert pool._num_packed[slot].tolist() == [1] * SHAPE.layers
        # an unpacked prompt's groups begin behind its first block, which stays in the cache's dtype
        first_end = (len(prompt) - RECENT_TOKENS) // block * block if results else block
        assert added[0].end - added[0].tokens == first_end
        every_page = {page for each in added for page in each.pages.flatten().tolist()}
        for layer, num_tokens in enumerate(kept):
            num_pages = math.ceil(total[layer] / page_tokens)
            columns = pool._packed[slot, layer, 1 : 1 + num_pages].tolist()
            own = [page for page in columns if page not in every_page]
            if num_tokens:
                groups = k4v3.read_pages(pool.byte_pages, torch.tensor(own), pool.itemsize)
                parts = k4v3.dequantise(groups, torch.float64)
                prompt_groups[layer] = [
                    part.transpose(0, 1).flatten(1, 3)[:, :num_tokens] for part in parts
                ]
            assert len(columns) == len(set(columns))
        llm.drain()

    positions = [*range(len(prompt), len(prompt) + count, 37), len(prompt) + count - 2]
    for layer in range(SHAPE.layers):
        first = (len(prompt), first_end if results else 0, prompt_groups[layer])
        assert_replay_matches(SHAPE, seen, added, layer, first, positions)


@model_runner_v1_only
def test_the_first_block_keeps_its_place_and_its_hash(checkpoints_folder):
    """Packing two prompts with one first block neither moves the block nor frees it."""
    first_prompt, second_prompt = PROMPTS[0], PROMPTS[0][:BLOCK] + PROMPTS[1][BLOCK:]
    with packed_engine(checkpoints_folder, "cake", max_num_batched_tokens=2048) as llm:
        free, prompts = llm.free_blocks, (first_prompt, second_prompt)
        alone = [llm.generate([prompt], 60)[0] for prompt in prompts]
        held = []
        for count, prompt in enumerate(prompts, 3):
            llm.submit(str(count), prompt, 60)
            while llm.compressor.compressed < count:
                llm.step()
            blocks = llm.manager.req_to_blocks[llm.running()[-1].request_id]
            assert all(
                block.is_null for block in blocks[1 : (len(prompt) - RECENT_TOKENS) // BLOCK]
            )
            held.append(blocks[0])
        assert held[0] is held[1]
        assert held[0].ref_cnt == 2
        assert held[0].block_hash is not None
        outputs = llm.drain()
        assert [outputs["3"], outputs["4"]] == alone
        assert llm.free_blocks == free


def test_trap_23_blocks_that_held_groups_are_zeroed(checkpoints_folder):
    """Also if their request is preempted, and before the next step runs."""
    with packed_engine(checkpoints_folder, "cake", max_num_batched_tokens=2048) as llm:
        pool, states, zeroed = llm.compressor.pool, llm.scheduler.states, []
        zero = pool.zero

        def watching(blocks):
            zero(blocks)
            zeroed.append(set(blocks))

        pool.zero = watching
        for _ in range(2):
            llm.submit("r", PROMPTS[0], 6)
            while not (packed := [b for state in states for b in state.packed_blocks]):
                llm.step()
            blocks = {block.block_id for block in packed}
            pages = pool.flat_ids_in_all_layers(torch.tensor(sorted(blocks)))
            assert pool.byte_pages[pages].any()
            if not zeroed:
                llm.preempt(llm.running()[0])
                assert not any(state.packed_blocks for state in states)
            llm.drain()
            llm.generate([PROMPTS[2]], 2)
            assert blocks in zeroed
            assert not llm.scheduler.step_builder._deferred_free.zero_blocks
            untouched = blocks - {block.block_id for block in llm.pool.blocks if block.ref_cnt}
            hashless = {b for b in untouched if llm.pool.blocks[b].block_hash is None}
            pages = pool.flat_ids_in_all_layers(torch.tensor(sorted(hashless), dtype=torch.int64))
            assert not pool.pages[pages].isnan().any()
