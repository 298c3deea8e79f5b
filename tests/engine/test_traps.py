"""Known failures of public KV-cache compression engines (docs/traps.md). Test names have the
numbers of the traps (`pytest -k trap`).

Traps of speculative decoding, KV connectors and quantised caches are refused (test_refusals.py).
"""

import pytest
import torch

from checkpoints import make, tokens
from engines import BLOCK, V2, engine, model_runner_v1_only, settings

PROMPT = tokens(420, seed=21)


@pytest.fixture(scope="module")
def shared(model):
    config = settings(allow_override="all")
    with engine(model, additional_config=config, max_num_seqs=4, max_model_len=1024) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    with shared.lent():
        yield shared


def packs_in_step(scheduler) -> list:
    """Return the packings planned for the step that is being scheduled."""
    entries = [state.entry for state in scheduler.states if state.entry is not None]
    return [entry.pack for entry in entries if entry.pack is not None]


def watch_packing(llm) -> list:
    """Return every compression of the engine, as (tokens computed so far, plan)."""

    def computed(finishing):
        running = {r.request_id: r for r in llm.scheduler.running}
        return running[
            finishing.pack_request.request_id
        ].num_computed_tokens, finishing.pack_request

    return llm.watch_packing(computed)


def test_trap_01_compression_follows_only_the_last_chunk(llm, monkeypatch):
    monkeypatch.setattr(llm.scheduler, "max_num_scheduled_tokens", 64)
    compressions = watch_packing(llm)
    llm.submit("r", PROMPT, 3)
    for _ in range(len(PROMPT) // 64):
        llm.step()
        assert not compressions
    llm.drain()
    assert [computed for computed, _ in compressions] == [len(PROMPT)]


def test_trap_02_shared_and_hashed_blocks_are_never_written(llm):
    llm.generate([PROMPT], 4)
    hashed = {b.block_id for b in llm.pool.blocks if b.block_hash is not None}
    assert len(hashed) == len(PROMPT) // BLOCK
    pages = llm.compressor.pool.pages
    ids = torch.tensor(sorted(hashed))
    flat = torch.cat([llm.compressor.pool.flat_ids(layer, ids) for layer in range(4)])
    before = pages[flat].clone()
    llm.generate([PROMPT + tokens(50, seed=1), PROMPT, PROMPT[:200]], 40)
    assert torch.equal(pages[flat], before)


def test_trap_02_a_full_prefix_hit_still_computes_a_window(llm):
    aligned = PROMPT[: 12 * BLOCK]
    first = llm.generate([aligned], 6)[0]
    again = llm.outputs([aligned], 6)[0]
    assert list(again.outputs[0].token_ids) == first
    assert again.num_cached_tokens == len(aligned) - BLOCK
    assert llm.compressor.compressed == 2


def test_trap_04_trap_05_slots_follow_original_positions(llm):
    """Every decoded token is in the slot of its position, not of the compressed length."""
    llm.submit("r", PROMPT, 60)
    llm.step()
    for _ in range(50):
        llm.step()
        request = llm.running()[0]
        blocks = llm.manager.req_to_blocks[request.request_id]
        position = request.num_computed_tokens - 1
        assert not blocks[position // BLOCK].is_null
        assert len(blocks) == position // BLOCK + 1
    llm.drain()


def test_trap_07_preemption_forgets_the_compression(llm):
    alone = llm.generate([PROMPT], 30)[0]
    llm.submit("r", PROMPT, 30)
    for _ in range(10):
        llm.step()
    request = llm.running()[0]
    had = list(request.all_token_ids)
    assert request.request_id in llm.compressor.pool
    assert llm.llm.reset_prefix_cache(reset_running_requests=True)
    assert llm.free_blocks == llm.pool.num_gpu_blocks - 1
    llm.step()
    assert llm.compressor.compressed == 3
    got = llm.drain()
    answer = next(iter(got.values()))
    cut = len(had) - len(PROMPT)
    assert answer[:cut] == alone[:cut]
    assert answer[cut:] == llm.generate([had], 30 - cut)[0]


@pytest.mark.parametrize("spare", [0, 3], ids=["in place", "into fresh blocks"])
def test_trap_07_preemption_in_the_step_that_planned_compression(spare, model, llm):
    """Priority scheduling preempts a prefill that it scheduled in the same step."""
    low, high, other = tokens(6 * BLOCK, seed=1), tokens(BLOCK, seed=2), tokens(4, seed=3)
    with engine(
        model,
        additional_config=settings("cake", 0.4),
        blocks=1 + 8 + spare,
        max_model_len=7 * BLOCK,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        long_prefill_token_threshold=2 * BLOCK,
    ) as small:
        taken, preempt = [], small.scheduler._preempt_request

        def preempting(request, *rest, **named):
            taken.append(len(packs_in_step(small.scheduler)))
            preempt(request, *rest, **named)
            assert not packs_in_step(small.scheduler)

        small.scheduler._preempt_request = preempting
        small.submit("other", other, 20)  # a prompt alone in its engine is not cut into chunks
        small.submit("low", low, 8, priority=5)
        small.step()
        small.submit("high", high, 8, priority=0)
        got = small.drain()
        assert taken == [1]
        assert small.free_blocks == 8 + spare
        assert small.compressor.compressed == 1
    for name, prompt in (("low", low), ("high", high)):
        assert got[name] == llm.generate([prompt], 8, extra_args={"kv_budget": 0.4})[0]


@model_runner_v1_only
def test_trap_10_block_tables_of_compressed_requests_are_not_by_position(llm, monkeypatch):
    assert llm.manager.has_positionally_stable_blocks is False
    llm.submit("r", PROMPT, 4)
    llm.step()
    name = llm.running()[0].request_id
    packed = {block.block_id for block in llm.packed_blocks(name)}
    assert packed
    back, pop = [], llm.manager.pop_blocks_for_free
    monkeypatch.setattr(
        llm.manager, "pop_blocks_for_free", lambda name: (back.extend(pop(name)), list(back))[1]
    )
    llm.drain()
    assert packed <= {block.block_id for block in back}
    assert llm.free_blocks == llm.pool.num_gpu_blocks - 1


def test_the_window_is_never_evicted(llm):
    kept = llm.watch_packing(lambda done: done.kept)
    llm.generate([PROMPT], 3, extra_args={"kv_compress": "streamingllm"})
    end = len(PROMPT) // BLOCK * BLOCK
    assert kept
    for positions in (layer for stack in kept for layer in stack):
        count = int((positions[0] >= 0).sum())
        expected = [*range(4), *range(end - count + 4, end)]
        assert positions[:, :count].tolist() == [expected] * len(positions)


@model_runner_v1_only
def test_trap_13_buffers_scale_with_requests_not_with_the_pool(llm):
    pool = llm.compressor.pool
    assert pool._packed.shape == (5, 4, 1024 // BLOCK)


def test_trap_14_huge_keys_do_not_overflow(model):
    with engine(model, additional_config=settings()) as llm:
        with torch.no_grad():
            for layer in llm.worker.model_runner.model.model.layers:
                layer.self_attn.qkv_proj.weight.mul_(60)
        out = llm.outputs([PROMPT], 6, logprobs=1)[0].outputs[0]
        assert llm.compressor.compressed == 1
        values = [v.logprob for step in out.logprobs for v in step.values()]
        assert all(value == value for value in values)


@model_runner_v1_only
def test_trap_15_block_counts_depend_on_lengths_only(llm):
    """Pages and blocks of a prompt do not depend on its token ids."""
    compressions = watch_packing(llm)
    for seed in range(4):
        llm.generate([tokens(420, seed=seed)], 2)
    plans = [pack_request.plan for _, pack_request in compressions]
    assert len(plans) == 4
    assert len(set(plans)) == 1


@model_runner_v1_only
def test_trap_16_requests_for_one_token_are_not_compressed(llm):
    """The only output token comes from the full cache, so compression would be wasted."""
    llm.generate([PROMPT], 1)
    assert llm.compressor.compressed == 0
    llm.generate([PROMPT], 2)
    assert llm.compressor.compressed == 1


@model_runner_v1_only
def test_trap_18_compressions_are_counted(llm):
    llm.generate([PROMPT, PROMPT[:100], PROMPT[:200]], 2)
    assert llm.compressor.compressed == 2


@pytest.mark.skipif(V2, reason="the layout of the cache does not depend on the model runner")
@pytest.mark.parametrize(("dtype", "block"), [("float32", 32), ("bfloat16", 32), ("bfloat16", 128)])
@pytest.mark.parametrize("name", ["llama-gqa", "llama-d80", "qwen3"])
def test_pages_contain_the_keys_and_values_that_vllm_wrote(name, dtype, block, checkpoints_folder):
    """The pages contain keys and values as the attention layers received them."""
    with engine(
        make(name, checkpoints_folder),
        additional_config=settings(min_prompt=8192),
        dtype=dtype,
        block_size=block,
        enable_prefix_caching=False,
    ) as llm:
        written = {}
        context = llm.worker.vllm_config.compilation_config.static_forward_context
        layers = sorted(context.items(), key=lambda item: int(item[0].split(".")[2]))
        for index, (_, layer) in enumerate(layers):
            update = layer.impl.do_kv_cache_update

            def record(lay, key, value, *rest, index=index, update=update):
                written.setdefault(index, (key.clone(), value.clone()))
                update(lay, key, value, *rest)

            layer.impl.do_kv_cache_update = record
        llm.submit("r", PROMPT, 4)
        llm.step()
        blocks = llm.manager.req_to_blocks[llm.running()[0].request_id]
        ids = torch.tensor([block.block_id for block in blocks])
        compressor = llm.compressor
        for index, (key, value) in written.items():
            pages = compressor.pool.flat_ids(index, ids)
            keys, values = compressor.packer.mover.read(pages)
            keys = keys.permute(0, 3, 1, 2).flatten(0, 1)[: len(PROMPT)]
            values = values.permute(0, 2, 1, 3).flatten(0, 1)[: len(PROMPT)]
            assert torch.equal(keys, key[: len(PROMPT)].view_as(keys))
            assert torch.equal(values, value[: len(PROMPT)].view_as(values))
        assert len(written) == len(layers)
        llm.drain()
