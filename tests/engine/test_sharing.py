"""Requests that share prompts: the cache holds what the hash says, whoever was compressed."""

import pytest

from checkpoints import make, tokens
from engines import BLOCK, V2, engine, first_runner, settings

NEW = 8
PROMPT = tokens(400 if V2 else 900, seed=3)


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-gqa", checkpoints_folder)


@pytest.fixture(scope="module")
def alone(model):
    """What each prompt answers in an engine of its own, without a prefix cache."""
    with engine(model, additional_config=settings(), enable_prefix_caching=False) as llm:
        memory: dict[tuple[int, ...], list[int]] = {}

        def answer(prompt: list[int], new: int = NEW) -> list[int]:
            key = (*prompt, -new)
            if key not in memory:
                memory[key] = llm.generate([prompt], new)[0]
            return memory[key]

        pairs = _pairs()
        yield {tuple(p): answer(p) for pair in pairs for p in pair}


def _pairs() -> list[tuple[list[int], list[int]]]:
    shared = PROMPT[: len(PROMPT) * 2 // 3]
    return [
        (PROMPT, PROMPT),
        (shared + tokens(100, seed=8), shared + tokens(77, seed=9)),
        (PROMPT, PROMPT[:300]),
        (PROMPT[:300], PROMPT),
        (PROMPT, PROMPT[:100]),  # the second stays under the threshold
    ]


# on Model Runner V2, not what is another pair in the other order, or left whole
@pytest.mark.parametrize("pair", [0, 1, 3] if V2 else range(len(_pairs())))
def test_one_after_the_other_in_either_order(pair, model, alone):
    first, second = _pairs()[pair]
    with engine(model, additional_config=settings()) as llm:
        for prompt in (first, second, second, first):
            assert llm.generate([prompt], NEW)[0] == alone[tuple(prompt)]
        again = llm.outputs([first], NEW)[0]
        assert again.num_cached_tokens >= (len(first) - 32 - BLOCK) // BLOCK * BLOCK


@pytest.mark.parametrize("chunk", [96, 8192])
def test_overlapping(chunk, model, alone):
    """The second starts while the first prefills, is compressed or decodes, in either order."""
    with engine(
        model,
        additional_config=settings(),
        max_num_batched_tokens=chunk,
        max_num_seqs=4,
        max_model_len=2048,
    ) as llm:
        pairs = [_pairs()[1], _pairs()[1][::-1], _pairs()[2], _pairs()[3]]
        for pair in pairs[:2] if V2 else pairs:
            prefill = -(-len(pair[0]) // chunk)
            delays = {0, 1, prefill - 1, prefill, prefill + 2}
            for delay in {1, prefill} if V2 else delays:
                assert llm.llm.reset_prefix_cache()
                llm.submit("0", pair[0], NEW)
                for _ in range(delay):
                    llm.step()
                llm.submit("1", pair[1], NEW)
                got = {key.split("-")[0]: value for key, value in llm.drain().items()}
                assert got == {"0": alone[tuple(pair[0])], "1": alone[tuple(pair[1])]}, delay


@first_runner
def test_the_cache_keeps_prompt_blocks_and_nothing_computed_after(model):
    """Blocks from the tail on were computed against a compressed context: no hash for them."""
    length = 300
    with engine(model, additional_config=settings()) as llm:
        llm.submit("r", tokens(length, seed=4), 3 * BLOCK)
        for _ in range(2 * BLOCK + 5):
            llm.step()
        request = llm.running()[0]
        tail = llm.manager.req_to_blocks[request.request_id][length // BLOCK :]
        assert len(tail) >= 3
        assert all(block.block_hash is None for block in tail)
        assert all(block.block_hash is None for block in llm.manager._packed[request.request_id])
        llm.drain()


def test_a_conversation_whose_history_was_compressed(model):
    """Each turn's prompt contains the last turn's answer; only uncompressed blocks are reused.

    Every answer fills the block in which its prompt ended: none of its own may be found again.
    """
    new = 10 if V2 else 40
    with engine(model, additional_config=settings()) as llm:
        history, turns = PROMPT[:348], []
        for turn in range(3):
            output = llm.outputs([history], new)[0]
            turns.append((list(history), list(output.outputs[0].token_ids)))
            if turn:
                assert 0 < output.num_cached_tokens <= len(history) - 32
            assert (len(history) + new - 1) // BLOCK > len(history) // BLOCK
            history = history + turns[-1][1] + tokens(54, seed=turn)
    with engine(model, additional_config=settings(), enable_prefix_caching=False) as llm:
        for history, answer in turns:
            assert llm.generate([history], new)[0] == answer


def test_trap_20_parallel_samples_share_a_prompt(model):
    with engine(model, additional_config=settings(), max_num_seqs=8) as llm:
        from vllm import SamplingParams

        free = llm.free_blocks
        params = SamplingParams(n=3, temperature=0.8, seed=7, max_tokens=NEW, ignore_eos=True)
        one = llm.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
        two = llm.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
        texts = [list(o.token_ids) for o in one.outputs]
        assert texts == [list(o.token_ids) for o in two.outputs]
        assert all(len(t) == NEW for t in texts)
        assert llm.compressor.compressed == 6
        assert llm.free_blocks == free
        greedy = SamplingParams(n=2, temperature=0.0001, seed=7, max_tokens=NEW, ignore_eos=True)
        both = llm.llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)[0]
        assert both.outputs[0].token_ids == both.outputs[1].token_ids
