"""Sequences longer than the KV pool: what starts, what is answered, and what is refused."""

import pytest

from checkpoints import make, tokens
from engines import BLOCK, engine, first_runner, settings

pytestmark = first_runner
LONGEST, PIECE = 2048, 96
# a quarter of the longest sequence, and the null block
POOL = LONGEST // BLOCK // 4 + 1


def quarter(method="cake", budget=160, **more):
    return settings(method, budget, window=8, max_whole=POOL * BLOCK // 2, piece=PIECE, **more)


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-gqa", checkpoints_folder)


@pytest.fixture(scope="module")
def small(model):
    config = quarter(allow_override="off,snapkv", budget_bounds="32:2048")
    with engine(model, additional_config=config, max_model_len=LONGEST, blocks=POOL) as llm:
        yield llm


def test_a_prompt_four_times_the_pool_is_answered(small, model):
    """As in a pool that would hold it whole; and two of them at once."""
    prompts = [tokens(1900, seed=1), tokens(1333, seed=2)]
    free = small.free_blocks
    answers = small.generate(prompts, 20)
    assert small.free_blocks == free
    with engine(model, additional_config=quarter(), max_model_len=LONGEST) as large:
        assert large.generate(prompts, 20) == answers
        assert (
            large.manager.compression_stats.planned["cake"] == 0 or large.compressor.compressed == 2
        )


@pytest.mark.parametrize(("method", "narrow"), [("cake", 48), ("snapkv", 32)])
def test_tables_are_no_wider_than_what_a_layer_may_hold(method, narrow, model):
    """A budget in tokens, or layers that share evenly; behind a long prompt, and a full pool."""
    short, answers = 250, {}
    most = (POOL - 1) * BLOCK - short + 1
    for blocks in (POOL, 2 * LONGEST // BLOCK):
        config = quarter(method, min_prompt=short + 1)
        with engine(model, additional_config=config, max_model_len=LONGEST, blocks=blocks) as llm:
            pool, plain = llm.compressor.pool, LONGEST // BLOCK
            assert pool._tables.shape[2] == pool._packed.shape[2] == pool.columns
            assert pool.columns == (narrow if blocks == POOL else plain)
            # where nothing ends it, the answer goes on for longer than is compared
            asked = LONGEST - short if blocks == POOL else most
            answers[blocks] = [
                *llm.generate([tokens(1900, seed=1)], 80),
                *llm.generate([tokens(short, seed=2)], asked),
            ]
    small, large = answers.values()
    assert small == large
    assert len(small[1]) == most


def test_vllm_alone_refuses_to_start(model):
    with (
        pytest.raises(ValueError, match="KV cache"),
        engine(model, additional_config=settings("cake"), max_model_len=LONGEST, blocks=POOL),
    ):
        pass


def test_a_pool_smaller_than_a_prompt_at_its_largest_does_not_start(model):
    """What it keeps and one piece."""
    with (
        pytest.raises(ValueError, match="KV cache"),
        engine(
            model,
            additional_config=quarter(budget=800),
            max_model_len=LONGEST,
            blocks=POOL,
        ),
    ):
        pass


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        ({"kv_compress": "off"}, "stand whole; ask for a method"),
        ({"kv_budget": 1500}, "ask for a smaller budget"),
    ],
)
def test_what_the_pool_can_never_hold_is_refused(small, ask, what):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=what) as refusal:
        small.generate([tokens(1900, seed=1)], 4, extra_args=ask)
    assert f"blocks of the KV cache, which has {POOL - 1}" in str(refusal.value)
    assert small.generate([tokens(POOL * BLOCK // 3, seed=1)], 4, extra_args=ask)


def test_one_that_comes_past_the_front_end_ends_with_an_error(small, monkeypatch):
    """It must not wait for ever, nor those behind it."""
    from vllm_kvcompress.engine.frontend import api

    prompt = tokens(1900, seed=1)
    want = small.generate([prompt], 4)[0]
    monkeypatch.setattr(api, "check_room", lambda *_: None)
    small.submit("large", prompt, 4, extra_args={"kv_compress": "off"})
    small.submit("other", prompt, 4)
    done = {}
    while small.llm.llm_engine.has_unfinished_requests():
        done |= {name.split("-")[0]: each.outputs[0] for name, each in small.step().items()}
    assert done["large"].finish_reason == "error"
    assert not done["large"].token_ids
    assert list(done["other"].token_ids) == want


@pytest.mark.parametrize("ask", [{"kv_compress": "off"}, {}], ids=["whole", "compressed"])
def test_an_answer_ends_with_the_pool(small, ask):
    """One that nothing bounds; it is not preempted for ever."""
    length = 300 if ask else 1504
    (output,) = small.outputs([tokens(length, seed=4)], LONGEST - length, extra_args=ask)
    answer = output.outputs[0]
    assert answer.finish_reason == "length"
    held = POOL - 1 if ask else POOL - 1 - 160 // BLOCK + length // BLOCK
    assert len(answer.token_ids) == held * BLOCK - length + 1
    assert small.free_blocks == POOL - 1


def test_with_a_decode_budget_it_goes_on(model):
    """An answer ten times its budget, behind prompts longer than the pool and behind a short one.

    Preempted it is computed again piece by piece, though its prompt stood whole. Until then nothing
    preempts it, though it is longer than the pool.
    """
    config = quarter(decode_budget=64, decode_interval=32)
    prompts, answer = {"behind": tokens(700, seed=5), "long": tokens(30, seed=6)}, 640
    with engine(model, additional_config=config, max_model_len=LONGEST, blocks=POOL) as llm:
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        for name, prompt in prompts.items():
            llm.submit(name, prompt, answer)
        for _ in range(600):
            llm.step()
        assert not cuts
        assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert [len(got) for got in llm.drain().values()] == [answer] * 2
        assert cuts.keys() == prompts.keys()
        assert all(POOL * BLOCK < at[0] < answer for at in cuts.values())
        assert llm.free_blocks == free


def test_a_prompt_is_packed_whatever_room_there_is(model):
    """Neither pressure nor the length of the answer let one stand whole that must not."""
    config = quarter(pressure=1.0, min_output=64)
    with engine(model, additional_config=config, max_model_len=LONGEST, blocks=POOL) as llm:
        for budget in (1, 2):
            assert len(llm.generate([tokens(1900, seed=1)], budget)[0]) == budget
        assert llm.compressor.compressed == 2
