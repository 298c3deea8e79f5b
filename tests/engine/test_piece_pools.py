"""Requests longer than the KV pool: startup, outputs and refusals."""

import pytest

from checkpoints import tokens
from engines import BLOCK, engine, settings

LONGEST, PIECE = 2048, 96
# blocks for a quarter of the longest sequence, and the null block
POOL = LONGEST // BLOCK // 4 + 1


def quarter_pool_settings(method="cake", budget=160, **options):
    return settings(method, budget, window=8, max_whole=POOL * BLOCK // 2, piece=PIECE, **options)


@pytest.fixture(scope="module")
def small(model):
    config = quarter_pool_settings(allow_override="off,snapkv", budget_bounds="32:2048")
    with engine(model, additional_config=config, max_model_len=LONGEST, blocks=POOL) as llm:
        yield llm


def test_prompts_four_times_the_pool_are_served(small, model):
    """Two concurrent prompts give the same outputs as in a pool that holds both."""
    prompts = [tokens(1900, seed=1), tokens(1333, seed=2)]
    free = small.free_blocks
    outputs = small.generate(prompts, 20)
    assert small.free_blocks == free
    with engine(model, additional_config=quarter_pool_settings(), max_model_len=LONGEST) as large:
        assert large.generate(prompts, 20) == outputs
        assert (
            large.scheduler.step_builder.stats.planned["cake"] == 0
            or large.compressor.compressed == 2
        )


@pytest.mark.parametrize(("method", "max_pages"), [("cake", 48), ("snapkv", 32)])
def test_page_tables_are_as_wide_as_a_layer_can_hold(method, max_pages, model):
    """Page tables are bounded by what a layer can hold, after a long prompt and with a full pool.

    CAKE has a budget in tokens here, and SnapKV gives all layers equal budgets.
    """
    short_length, outputs = 250, {}
    max_tokens = (POOL - 1) * BLOCK - short_length + 1
    for blocks in (POOL, 2 * LONGEST // BLOCK):
        config = quarter_pool_settings(method, min_prompt=short_length + 1)
        with engine(model, additional_config=config, max_model_len=LONGEST, blocks=blocks) as llm:
            pool, all_pages = llm.compressor.pool, LONGEST // BLOCK
            assert pool._tables.shape[2] == pool._packed.shape[2] == pool.max_layer_pages
            assert pool.max_layer_pages == (max_pages if blocks == POOL else all_pages)
            # in the small pool the output ends when the pool is full
            requested_tokens = LONGEST - short_length if blocks == POOL else max_tokens
            outputs[blocks] = [
                *llm.generate([tokens(1900, seed=1)], 80),
                *llm.generate([tokens(short_length, seed=2)], requested_tokens),
            ]
    small, large = outputs.values()
    assert small == large
    assert len(small[1]) == max_tokens


def test_without_pieces_the_engine_does_not_start(model):
    with (
        pytest.raises(ValueError, match="KV cache"),
        engine(model, additional_config=settings("cake"), max_model_len=LONGEST, blocks=POOL),
    ):
        pass


def test_a_pool_below_the_largest_footprint_does_not_start(model):
    """The pool must hold the kept tokens and one piece."""
    with (
        pytest.raises(ValueError, match="KV cache"),
        engine(
            model,
            additional_config=quarter_pool_settings(budget=800),
            max_model_len=LONGEST,
            blocks=POOL,
        ),
    ):
        pass


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"kv_compress": "off"}, "stays uncompressed; choose a method"),
        ({"kv_budget": 1500}, "choose a smaller budget"),
    ],
)
def test_requests_that_never_fit_the_pool_are_refused(small, extra_args, message):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=message) as refusal:
        small.generate([tokens(1900, seed=1)], 4, extra_args=extra_args)
    assert f"blocks of the KV cache, which has {POOL - 1}" in str(refusal.value)
    assert small.generate([tokens(POOL * BLOCK // 3, seed=1)], 4, extra_args=extra_args)


def test_a_request_that_bypasses_the_front_end_fails(small, monkeypatch):
    """A request that bypasses the front end's check must not wait forever or block the queue."""
    from vllm_kvcompress.engine.frontend import api
    from vllm_kvcompress.engine.scheduling import scheduler

    lines = []
    monkeypatch.setattr(scheduler.logger, "error", lambda line, *args: lines.append(line % args))
    prompt = tokens(1900, seed=1)
    expected = small.generate([prompt], 4)[0]
    monkeypatch.setattr(api, "check_fits_pool", lambda *_: None)
    small.submit("large-\n\x1b[2J", prompt, 4, extra_args={"kv_compress": "off"})
    small.submit("other", prompt, 4)
    completions = {}
    while small.llm.llm_engine.has_unfinished_requests():
        completions |= {name: output.outputs[0] for name, output in small.step().items()}
    (large,) = (each for name, each in completions.items() if name != "other")
    assert large.finish_reason == "error"
    assert not large.token_ids
    assert list(completions["other"].token_ids) == expected
    assert len(lines) == 1
    assert lines[0].startswith(r"request 'large-\n\x1b[2J")
    assert lines[0].isprintable()


@pytest.mark.parametrize(
    "extra_args", [{"kv_compress": "off"}, {}], ids=["uncompressed", "compressed"]
)
def test_an_output_ends_when_the_pool_is_full(small, extra_args):
    """Without a decode budget, the output ends when the pool is full instead of being preempted."""
    length = 300 if extra_args else 1504
    (output,) = small.outputs([tokens(length, seed=4)], LONGEST - length, extra_args=extra_args)
    completion = output.outputs[0]
    assert completion.finish_reason == "length"
    max_blocks = POOL - 1 if extra_args else POOL - 1 - 160 // BLOCK + length // BLOCK
    assert len(completion.token_ids) == max_blocks * BLOCK - length + 1
    assert small.free_blocks == POOL - 1


def test_outputs_with_a_decode_budget_outgrow_the_pool(model):
    """Outputs of ten times the decode budget follow a prompt longer than the pool and a short one.

    Neither is preempted, although each is longer than the pool. After a forced preemption, both are
    computed again piece by piece, although the short prompt was uncompressed before.
    """
    config = quarter_pool_settings(decode_budget=64, decode_interval=32)
    prompts, output_tokens = {"behind": tokens(700, seed=5), "long": tokens(30, seed=6)}, 640
    with engine(model, additional_config=config, max_model_len=LONGEST, blocks=POOL) as llm:
        free, cuts = llm.free_blocks, llm.watch_preemptions()
        for name, prompt in prompts.items():
            llm.submit(name, prompt, output_tokens)
        for _ in range(600):
            llm.step()
        assert not cuts
        assert llm.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert [len(output) for output in llm.drain().values()] == [output_tokens] * 2
        assert cuts.keys() == prompts.keys()
        assert all(POOL * BLOCK < counts[0] < output_tokens for counts in cuts.values())
        assert llm.free_blocks == free


def test_long_prompts_are_always_compressed(model):
    """A prompt longer than the pool is compressed regardless of `pressure` and `min_output`."""
    config = quarter_pool_settings(pressure=1.0, min_output=64)
    with engine(model, additional_config=config, max_model_len=LONGEST, blocks=POOL) as llm:
        for budget in (1, 2):
            assert len(llm.generate([tokens(1900, seed=1)], budget)[0]) == budget
        assert llm.compressor.compressed == 2
