"""Which prompts stay uncompressed: counts by reason, and decisions that last until the end."""

import pytest

from checkpoints import make, tokens
from engines import BLOCK, engine, settings

NEW = 8


def test_skipped_prompts_are_counted_by_reason(model, watched):
    config = settings("cake", 0.3, min_output=6, allow_override="all")
    with engine(model, additional_config=config) as llm:
        llm.generate([tokens(127, seed=1)], NEW)
        llm.generate([tokens(128, seed=1)], NEW)
        llm.generate([tokens(400, seed=2)], 5)
        llm.generate([tokens(400, seed=2)], 6)
        llm.generate([tokens(400, seed=3)], NEW, extra_args={"kv_compress": "off"})
        llm.generate([tokens(400, seed=3)], NEW, extra_args={"kv_budget": 1.0})
        llm.generate([tokens(400, seed=3)], NEW, extra_args={"kv_budget": 400})
        llm.generate([tokens(400, seed=3)], NEW, extra_args={"kv_budget": 8192})
        llm.finish_in_flight_steps()
        assert llm.compressor.compressed == 2
    assert watched("skipped") == {
        "short_prompt": 1,
        "short_output": 1,
        "off": 1,
        "within_budget": 3,
    }
    assert watched("planned") == watched("packed") == {"cake": 2}


def test_low_pressure_is_exact_to_the_block(model, watched):
    """Compression starts with the prompt whose blocks reach the `pressure` share of the pool."""
    blocks = 40
    prompts = [tokens(length, seed=length) for length in (19 * BLOCK, 20 * BLOCK, 20 * BLOCK + 1)]
    with engine(
        model,
        additional_config=settings("cake", 0.3, pressure=0.5),
        blocks=1 + blocks,
        max_model_len=1024,
        enable_prefix_caching=False,
    ) as llm:
        compressed = []
        for prompt in prompts:
            before = llm.compressor.compressed
            llm.generate([prompt], NEW)
            compressed.append(llm.compressor.compressed - before)
        assert compressed == [0, 1, 1]
        llm.finish_in_flight_steps()
    assert watched("skipped") == {"low_pressure": 1}


@pytest.mark.parametrize(("pressure", "compressed"), [(0.69, 1), (0.7, 0)])
def test_sliding_window_blocks_count_as_pressure(pressure, compressed, checkpoints_folder):
    """417 tokens take 14 blocks, and three sliding-window groups at most 18: 32 of 46 blocks."""
    with engine(
        make("gemma3", checkpoints_folder),
        additional_config=settings("cake", 0.4, pressure=pressure),
        blocks=1 + 46,
        max_num_batched_tokens=64,
        max_model_len=512,
        max_num_seqs=2,
        enable_prefix_caching=False,
    ) as llm:
        free, max_blocks = llm.free_blocks, 0
        llm.submit("r", tokens(417, seed=1), 20)
        while llm.running() or not max_blocks:
            llm.step()
            max_blocks = max(max_blocks, free - llm.free_blocks)
        assert llm.compressor.compressed == compressed
        assert 14 < max_blocks <= 32


def test_blocks_of_other_requests_count_as_pressure(model):
    prompt = tokens(6 * BLOCK, seed=4)
    with engine(
        model,
        additional_config=settings("cake", 0.3, pressure=0.5),
        blocks=1 + 30,
        max_model_len=512,
        enable_prefix_caching=False,
    ) as llm:
        llm.generate([prompt], NEW)
        assert llm.compressor.compressed == 0
        for name in "abcd":
            llm.submit(name, tokens(6 * BLOCK, seed=ord(name)), 40)
        llm.step()
        # 6, 12, then 18 of 30 blocks are used: the first two requests stay below the pressure
        assert llm.compressor.compressed == 2
        llm.drain()


@pytest.mark.parametrize("crowded", [False, True])
def test_a_decision_survives_preemption(model, crowded):
    """A request keeps its decision when it resumes in a pool with more or less pressure."""
    prompt, other_prompt = tokens(300, seed=5), tokens(700, seed=6)  # 10 and 22 blocks of 40
    with engine(
        model,
        additional_config=settings("cake", 0.3, pressure=0.6),
        blocks=1 + 40,
        max_model_len=1024,
        enable_prefix_caching=False,
    ) as llm:
        packed = llm.watch_packing(lambda finished: finished.pack_request.request_id[0])
        if crowded:
            llm.submit("other", other_prompt, 200)
            llm.step()
        llm.submit("r", prompt, 60)
        for _ in range(4):
            llm.step()
        assert packed == ["r"] * crowded
        assert llm.llm.reset_prefix_cache(reset_running_requests=True)
        if crowded:
            (name,) = (i for i in llm.scheduler.requests if i.startswith("other"))
            llm.llm.llm_engine.abort_request([name], internal=True)
        else:
            llm.submit("other", other_prompt, 200)
        llm.drain()
    # the request resumed: compressed as before, or uncompressed although the pool is full now
    assert packed == (["r", "r"] if crowded else ["o"])


def test_pressure_is_measured_at_admission(model):
    """A request that arrives while the pool is full is admitted to an empty pool."""
    with engine(
        model,
        additional_config=settings("cake", 0.9, pressure=0.6),
        blocks=1 + 24,
        max_model_len=700,
        max_num_seqs=1,
        enable_prefix_caching=False,
    ) as llm:
        llm.submit("first", tokens(640, seed=7), 4)
        llm.submit("waits", tokens(256, seed=8), 30)
        llm.step()
        assert llm.compressor.compressed == 1
        llm.drain()
        assert llm.compressor.compressed == 1
