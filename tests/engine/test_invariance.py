"""A compressed request's output depends only on its own tokens."""

import pytest

from checkpoints import tokens
from engines import V2, engine, settings

COUNT = 6 if V2 else 64
LENGTHS = [150 + 7 * (i % 60) for i in range(COUNT)]
PROMPTS = [tokens(length, seed=1000 + i) for i, length in enumerate(LENGTHS)]
FEW = PROMPTS[:4] if V2 else PROMPTS[:8]
NEW = 6 if V2 else 10


@pytest.fixture(scope="module")
def solo_outputs(model):
    """Return the output of each prompt alone, prefilled in one chunk without the prefix cache."""
    with engine(model, additional_config=settings(), enable_prefix_caching=False) as llm:
        return [llm.generate([prompt], NEW)[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def shared(model):
    with engine(model, additional_config=settings(), max_num_seqs=128, max_model_len=2048) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    with shared.lent():
        yield shared


@pytest.mark.parametrize("chunk", [64] if V2 else [64, 256])
def test_chunk_size_does_not_change_outputs(chunk, llm, solo_outputs, monkeypatch):
    monkeypatch.setattr(llm.scheduler, "max_num_scheduled_tokens", chunk)
    assert llm.generate(FEW, NEW) == solo_outputs[: len(FEW)]
    assert llm.compressor.compressed == len(FEW)


@pytest.mark.parametrize("size", [4] if V2 else [8, 64])
def test_batch_size_does_not_change_outputs(size, llm, solo_outputs):
    assert llm.generate(PROMPTS[:size], NEW) == solo_outputs[:size]
    backwards = llm.generate(PROMPTS[:size][::-1], NEW)
    assert backwards[::-1] == solo_outputs[:size]


def test_prefix_cache_hits_do_not_change_outputs(llm, solo_outputs):
    cold = llm.generate(FEW, NEW)
    warm = llm.generate(FEW, NEW)
    hits = llm.outputs(FEW[:2], NEW)
    assert all(output.num_cached_tokens > 0 for output in hits)
    assert cold == warm == solo_outputs[: len(FEW)]


def test_a_window_split_over_chunks_gives_the_same_output(model, monkeypatch):
    """With chunks shorter than the window, the window's queries come from several steps."""
    with engine(model, additional_config=settings(window=48), enable_prefix_caching=False) as llm:
        expected = llm.generate(FEW[:2], NEW)
        monkeypatch.setattr(llm.scheduler, "max_num_scheduled_tokens", 16)
        assert llm.generate(FEW[:2], NEW) == expected
        assert llm.compressor.compressed == 4


def test_trap_03_async_scheduling_does_not_change_outputs(
    model, solo_outputs, async_scheduling_allowed
):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    with engine(model, additional_config=settings(), async_scheduling=True) as llm:
        assert isinstance(llm.scheduler, AsyncScheduler)
        assert llm.core.batch_queue is not None
        assert llm.generate(FEW, NEW) == solo_outputs[: len(FEW)]
        assert llm.compressor.compressed == len(FEW)


def test_a_preempted_request_matches_one_that_prefilled_the_same_tokens(model):
    length, new, blocks = (150, 20, 14) if V2 else (320, 76, 23)
    prompts = [tokens(length, seed=i) for i in range(4)]
    with engine(
        model,
        additional_config=settings("cake", 0.5),
        blocks=1 + blocks,
        max_model_len=192 if V2 else 512,
        enable_prefix_caching=False,
    ) as llm:
        cuts = llm.watch_preemptions()
        for i, prompt in enumerate(prompts):
            llm.submit(str(i), prompt, new)
        outputs = llm.drain()
        assert llm.free_blocks == blocks
    assert len(outputs) == 4
    assert cuts, "no request was preempted: the pool is too large"
    with engine(model, additional_config=settings("cake", 0.5), enable_prefix_caching=False) as llm:
        requests = [(p, outputs[str(i)], cuts.get(str(i), []), None) for i, p in enumerate(prompts)]
        llm.assert_match_solo_runs(requests, new)
