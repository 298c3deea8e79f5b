"""When a prompt is left whole: told by reason, and the same from admission to the end."""

import pytest

from checkpoints import make, tokens
from engines import BLOCK, engine, first_runner, settings

pytestmark = first_runner

NEW = 8


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-gqa", checkpoints_folder)


def test_every_reason_is_told(model, watched):
    some = settings("cake", 0.3, min_output=6, allow_override="all")
    with engine(model, additional_config=some) as llm:
        llm.generate([tokens(127, seed=1)], NEW)
        llm.generate([tokens(128, seed=1)], NEW)
        llm.generate([tokens(400, seed=2)], 5)
        llm.generate([tokens(400, seed=2)], 6)
        llm.generate([tokens(400, seed=3)], NEW, extra_args={"kv_compress": "off"})
        llm.generate([tokens(400, seed=3)], NEW, extra_args={"kv_budget": 1.0})
        llm.generate([tokens(400, seed=3)], NEW, extra_args={"kv_budget": 400})
        llm.generate([tokens(400, seed=3)], NEW, extra_args={"kv_budget": 2**63})
        llm.settle()
        assert llm.compressor.compressed == 2
    assert watched("skipped") == {
        "short_prompt": 1,
        "short_output": 1,
        "off": 1,
        "within_budget": 3,
    }
    assert watched("planned") == watched("packed") == {"cake": 2}


def test_low_pressure_to_the_block(model, watched):
    """The prompt that fills the pool to the share is compressed, the one before it is not."""
    blocks = 40
    prompts = [tokens(length, seed=length) for length in (19 * BLOCK, 20 * BLOCK, 20 * BLOCK + 1)]
    with engine(
        model,
        additional_config=settings("cake", 0.3, pressure=0.5),
        blocks=1 + blocks,
        max_model_len=1024,
        enable_prefix_caching=False,
    ) as llm:
        done = []
        for prompt in prompts:
            before = llm.compressor.compressed
            llm.generate([prompt], NEW)
            done.append(llm.compressor.compressed - before)
        assert done == [0, 1, 1]
        llm.settle()
    assert watched("skipped") == {"low_pressure": 1}


@pytest.mark.parametrize(("pressure", "compressed"), [(0.69, 1), (0.7, 0)])
def test_the_pressure_of_windows_counts(pressure, compressed, checkpoints_folder):
    """14 blocks of 417 tokens, and at most 18 of three groups with windows: 32 of 46."""
    with engine(
        make("gemma3", checkpoints_folder),
        additional_config=settings("cake", 0.4, pressure=pressure),
        blocks=1 + 46,
        max_num_batched_tokens=64,
        max_model_len=512,
        max_num_seqs=2,
        enable_prefix_caching=False,
    ) as llm:
        free, most = llm.free_blocks, 0
        llm.submit("r", tokens(417, seed=1), 20)
        while llm.running() or not most:
            llm.step()
            most = max(most, free - llm.free_blocks)
        assert llm.compressor.compressed == compressed
        assert 14 < most <= 32


def test_the_pressure_of_others_counts(model):
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
        # 6, 12, then 18 of 30 blocks: the first two came to an empty pool
        assert llm.compressor.compressed == 2
        llm.drain()


@pytest.mark.parametrize("crowded", [False, True])
def test_a_decision_stays_through_preemption(model, crowded):
    """Admitted to an empty pool and computed again in a full one, and the other way round."""
    prompt, other = tokens(300, seed=5), tokens(700, seed=6)  # 10 and 22 blocks of 40
    with engine(
        model,
        additional_config=settings("cake", 0.3, pressure=0.6),
        blocks=1 + 40,
        max_model_len=1024,
        enable_prefix_caching=False,
    ) as llm:
        packed = llm.watch_packing(lambda finished: finished.pack_request.request_id[0])
        if crowded:
            llm.submit("other", other, 200)
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
            llm.submit("other", other, 200)
        llm.drain()
    # it was computed again: compressed as before, or left whole although the pool is full now
    assert packed == (["r", "r"] if crowded else ["o"])


def test_a_request_that_waits_is_judged_when_it_is_admitted(model):
    """It came when the pool was full, and is admitted when nobody else is there."""
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
