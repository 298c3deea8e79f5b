"""Requests that share prompts: the prefix cache holds only blocks that match their hash."""

import pytest

from checkpoints import tokens
from engines import BLOCK, V2, engine, model_runner_v1_only, settings

NUM_OUTPUT = 8
PROMPT = tokens(400 if V2 else 900, seed=3)


@pytest.fixture(scope="module")
def single_outputs(model):
    """The output of each prompt when it runs alone, without a prefix cache."""
    with engine(model, additional_config=settings(), enable_prefix_caching=False) as llm:
        outputs: dict[tuple[int, ...], list[int]] = {}
        for pair in _pairs():
            for prompt in pair:
                if tuple(prompt) not in outputs:
                    outputs[tuple(prompt)] = llm.generate([prompt], NUM_OUTPUT)[0]
        return outputs


@pytest.fixture(scope="module")
def shared(model):
    with engine(model, additional_config=settings(), max_num_seqs=8, max_model_len=2048) as llm:
        yield llm


@pytest.fixture
def llm(shared):
    with shared.lent():
        yield shared


def _pairs() -> list[tuple[list[int], list[int]]]:
    shared = PROMPT[: len(PROMPT) * 2 // 3]
    return [
        (PROMPT, PROMPT),
        (shared + tokens(100, seed=8), shared + tokens(77, seed=9)),
        (PROMPT, PROMPT[:300]),
        (PROMPT[:300], PROMPT),
        (PROMPT, PROMPT[:100]),  # the second one is too short to be compressed
    ]


# Model Runner V2 skips the reverse of another pair, and the pair with a short prompt.
@pytest.mark.parametrize("pair", [0, 1, 3] if V2 else range(len(_pairs())))
def test_consecutive_requests_share_a_prefix(pair, llm, single_outputs):
    first, second = _pairs()[pair]
    for prompt in (first, second, second, first):
        assert llm.generate([prompt], NUM_OUTPUT)[0] == single_outputs[tuple(prompt)]
    repeated = llm.outputs([first], NUM_OUTPUT)[0]
    assert repeated.num_cached_tokens >= (len(first) - 32 - BLOCK) // BLOCK * BLOCK


@pytest.mark.parametrize("chunk", [96] if V2 else [96, 2048])
def test_concurrent_requests_share_a_prefix(chunk, llm, single_outputs, monkeypatch):
    """The second request starts while the first one prefills, is compressed or decodes."""
    monkeypatch.setattr(llm.scheduler, "max_num_scheduled_tokens", chunk)
    pairs = [_pairs()[1], _pairs()[1][::-1], _pairs()[2], _pairs()[3]]
    for pair in pairs[:2] if V2 else pairs:
        prefill_steps = -(-len(pair[0]) // chunk)
        delays = {0, 1, prefill_steps - 1, prefill_steps, prefill_steps + 2}
        for delay in {1, prefill_steps} if V2 else delays:
            assert llm.llm.reset_prefix_cache()
            llm.submit("0", pair[0], NUM_OUTPUT)
            for _ in range(delay):
                llm.step()
            llm.submit("1", pair[1], NUM_OUTPUT)
            outputs = llm.drain()
            expected = {str(i): single_outputs[tuple(prompt)] for i, prompt in enumerate(pair)}
            assert outputs == expected, delay


@model_runner_v1_only
def test_prefix_cache_has_no_blocks_computed_after_compression(llm):
    """Blocks from the tail on are computed from a compressed context, so they get no hash."""
    length = 300
    llm.submit("r", tokens(length, seed=4), 3 * BLOCK)
    for _ in range(2 * BLOCK + 5):
        llm.step()
    request = llm.running()[0]
    tail = llm.manager.req_to_blocks[request.request_id][length // BLOCK :]
    assert len(tail) >= 3
    assert all(block.block_hash is None for block in tail)
    assert all(block.block_hash is None for block in llm.packed_blocks(request.request_id))
    llm.drain()


def test_conversation_reuses_only_uncompressed_blocks(llm):
    """Each turn's prompt contains the last turn's output.

    Each output fills the block in which its prompt ended. No block of the output may be reused.
    """
    num_output = 10 if V2 else 40
    history, turns = PROMPT[:348], []
    for turn in range(3):
        result = llm.outputs([history], num_output)[0]
        turns.append((list(history), list(result.outputs[0].token_ids)))
        if turn:
            assert 0 < result.num_cached_tokens <= len(history) - 32
        assert (len(history) + num_output - 1) // BLOCK > len(history) // BLOCK
        history = history + turns[-1][1] + tokens(54, seed=turn)
    for history, output in turns:
        assert llm.llm.reset_prefix_cache()
        assert llm.generate([history], num_output)[0] == output


def test_trap_20_parallel_samples_share_a_prompt(llm):
    from vllm import SamplingParams

    free_before = llm.free_blocks
    sampling = {"max_tokens": NUM_OUTPUT, "ignore_eos": True, "seed": 7}
    params = SamplingParams(n=3, temperature=0.8, **sampling)
    first, second = (
        llm.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
        for _ in range(2)
    )
    samples = [list(sample.token_ids) for sample in first.outputs]
    assert samples == [list(sample.token_ids) for sample in second.outputs]
    assert all(len(sample) == NUM_OUTPUT for sample in samples)
    assert llm.compressor.compressed == 6
    assert llm.free_blocks == free_before
    greedy = SamplingParams(n=2, temperature=0.0001, **sampling)
    pair = llm.llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)[0]
    assert pair.outputs[0].token_ids == pair.outputs[1].token_ids
