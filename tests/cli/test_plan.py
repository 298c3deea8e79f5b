"""``kvcompress plan``: its figures equal the engine's, and its errors are one sentence."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoints import make, tokens
from engines import BLOCK, engine, settings
from plans import CPU_FLAGS, held_blocks, make_forecast, plan_on_cpu
from processor import needs_avx512
from site_patches import WITHOUT_VLLM
from vllm_kvcompress.commands.plan.gpu_memory import defaults_for
from vllm_kvcompress.commands.plan.model_shape import read_config, shape_of
from vllm_kvcompress.commands.plan.next_turn import packed_tokens
from vllm_kvcompress.engine.device_memory import device_bytes
from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.model_traits import traits_of
from vllm_kvcompress.planning.request import PlannedRequest
from vllm_kvcompress.settings.config import CompressionConfig


@pytest.fixture(scope="module")
def llm(tiny):
    config = settings("cake", 0.2, allow_override="all")
    with engine(tiny, additional_config=config, max_model_len=2048, max_num_seqs=64) as running:
        yield running


@pytest.mark.engine
@pytest.mark.parametrize("output", [2, 40])
@pytest.mark.parametrize(
    ("length", "method", "budget"),
    [
        (1000, "cake", 0.2),
        (1024, "snapkv", 0.1),
        (1025, "streamingllm", 0.05),
        (513, "tova", 200),
        (500, "d2o", 0.5),
        (200, "cake", 1.0),  # keeps everything
        (100, "cake", 0.2),  # too short
    ],
)
def test_blocks_equal_the_engines(llm, tiny, length, method, budget, output):
    config = {"compress": method, "budget": budget, "min_prompt": 128}
    forecast = make_forecast(tiny, length, output, config)
    held = held_blocks(llm, tokens(length, seed=1), output, kv_compress=method, kv_budget=budget)
    assert len(held) == output
    assert held[0] == forecast.on.decoding
    assert held[-1] == forecast.on.end
    held = held_blocks(llm, tokens(length, seed=1), output, kv_compress="off")
    assert held[0] == forecast.off.prefill == forecast.off.decoding == forecast.on.prefill
    assert held[-1] == forecast.off.end


@pytest.mark.engine
def test_blocks_and_bytes_with_a_decode_budget_equal_the_engines(tiny):
    """For a short prompt and a compressed one. The bytes include the query ring."""
    config = settings("cake", 0.2, decode_budget=96, decode_interval=64)
    forecast_of = partial(make_forecast, tiny, longest=2048, requests=64)
    with engine(tiny, additional_config=config, max_model_len=2048, max_num_seqs=64) as llm:
        for length, output in ((45, 300), (700, 250)):
            forecast = forecast_of(length, output, config["kvcompress"])
            held = held_blocks(llm, tokens(length, seed=1), output)
            assert (held[0], max(held)) == (forecast.on.decoding, forecast.on.end)
            assert max(held) < forecast.off.end
        compression = active_settings(llm.worker.vllm_config.additional_config)
        assert forecast.extra_bytes == device_bytes(llm.worker.vllm_config, compression)
        ring = llm.compressor.pool.ring
    without = forecast_of(700, 250, settings("cake", 0.2)["kvcompress"])
    assert forecast.extra_bytes - without.extra_bytes >= ring._queries.nbytes


# -- kept tokens in k4v3 ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def k4v3_llm(wide):
    config = settings("cake", 0.2, allow_override="all", packed_dtype="k4v3")
    with engine(wide, additional_config=config, max_model_len=2048, max_num_seqs=64) as running:
        yield running


@pytest.mark.engine
@pytest.mark.parametrize("packed_dtype", ["k4v3", "auto"])
@pytest.mark.parametrize(
    ("length", "method", "budget"),
    [(1000, "cake", 0.4), (1025, "snapkv", 0.1), (1500, "cake", 1.0), (1100, "d2o", 0.8)],
)
def test_blocks_in_each_format_equal_the_engines(
    k4v3_llm, wide, length, method, budget, packed_dtype
):
    """A float32 block of 32 tokens holds 256 tokens in k4v3."""
    config = {"compress": method, "budget": budget, "min_prompt": 128, "packed_dtype": packed_dtype}
    forecast = make_forecast(wide, length, 40, config)
    xargs = {"kv_compress": method, "kv_budget": budget, "kv_packed_dtype": packed_dtype}
    held = held_blocks(k4v3_llm, tokens(length, seed=1), 40, **xargs)
    assert held[0] == forecast.on.decoding
    assert held[-1] == forecast.on.end
    page_tokens = 256 if packed_dtype == "k4v3" else BLOCK
    assert (forecast.packed_dtype, forecast.page_tokens) == (packed_dtype, page_tokens)
    if packed_dtype == "k4v3":
        # the first block and the tail stay in 16 bits, at 1.0 up to 7 blocks behind the last page
        unpacked = 1 + (2 if budget < 1.0 else 7)
        assert forecast.on.decoding <= length * budget // 256 + unpacked < forecast.off.decoding


@pytest.mark.engine
def test_blocks_in_k4v3_after_a_look_ahead_equal_the_engines(wide):
    config = settings("cake-chunk", 0.6, packed_dtype="k4v3", lookahead=16)
    with engine(wide, additional_config=config, max_model_len=2048) as llm:
        held = held_blocks(llm, tokens(700, seed=1), 70)
    forecast = make_forecast(wide, 700, 70, config["kvcompress"])
    assert held[15] == forecast.on.looking
    assert (held[16], held[-1]) == (forecast.on.decoding, forecast.on.end)
    # The first block and the last two are in the cache's dtype.
    assert forecast.on.decoding == 3 + 2 < forecast.auto.on.decoding / 2.5


@pytest.mark.engine
@pytest.mark.parametrize("pieces", [{}, {"max_whole": 256, "piece": 96}])
def test_blocks_of_a_prompt_that_drops_no_token_have_no_look_ahead(wide, pieces):
    config = settings("cake-chunk", 1.0, packed_dtype="k4v3", lookahead=32, **pieces)
    with engine(wide, additional_config=config, max_model_len=2048) as llm:
        held = held_blocks(llm, tokens(700, seed=1), 70)
    forecast = make_forecast(wide, 700, 70, config["kvcompress"], longest=2048)
    assert (held[-70], held[-1]) == (forecast.on.decoding, forecast.on.end)
    assert (forecast.lookahead, forecast.on.looking) == (0, forecast.on.decoding)
    assert forecast.on.prefill <= forecast.off.prefill == 22
    assert forecast.kept_tokens == 700


def test_a_prompt_that_drops_no_token_is_planned_without_a_look_ahead(wide, plan_text):
    """Its output may be shorter than the look-ahead that lower budgets have."""
    config = {"compress": "cake-chunk", "packed_dtype": "k4v3", "min_prompt": 128}
    every = make_forecast(wide, 700, 8, {**config, "budget": 1.0})
    assert (every.left_whole, every.lookahead) == (None, 0)
    assert every.on.prefill == every.off.prefill
    some = make_forecast(wide, 700, 70, {**config, "budget": 0.6})
    assert (some.lookahead, some.on.prefill) == (32, some.off.prefill + 1)
    # Rounded up to whole pages, this budget keeps every token, but not in the cache's dtype.
    rounded = make_forecast(wide, 740, 70, {**config, "budget": 0.95})
    assert (rounded.kept_tokens, rounded.lookahead, rounded.auto.lookahead) == (740, 0, 32)

    def text(budget):
        flags = ("--kv-budget", budget, "--kv-packed-dtype", "k4v3")
        return plan_text(wide, "--len", 2000, *flags, *CPU_FLAGS)

    assert "look-ahead" in text(0.6)
    assert "look-ahead" not in text(1.0)


@pytest.mark.engine
def test_blocks_of_outputs_in_k4v3_equal_the_engines(wide):
    config = settings("cake", 0.6, packed_dtype="k4v3", decode_interval=256)
    with engine(wide, additional_config=config, max_model_len=2048) as llm:
        held = held_blocks(llm, tokens(700, seed=1), 700)
    forecast = make_forecast(wide, 700, 700, config["kvcompress"])
    assert (held[0], max(held)) == (forecast.on.decoding, forecast.on.end)
    del config["kvcompress"]["decode_interval"]
    assert make_forecast(wide, 700, 700, config["kvcompress"]).on.end > 2 * forecast.on.end


@pytest.mark.engine
def test_blocks_of_a_prompt_in_pieces_in_k4v3_equal_the_engines(wide):
    config = settings("cake", 1.0, packed_dtype="k4v3", max_whole=256, piece=96)
    forecast = make_forecast(wide, 1500, 70, config["kvcompress"], longest=2048)
    with engine(wide, additional_config=config, max_model_len=2048) as llm:
        held = held_blocks(llm, tokens(1500, seed=1), 70)
    # a step's blocks are counted after its packing
    assert max(held) <= forecast.on.prefill < forecast.off.prefill // 2
    assert (held[-70], held[-1]) == (forecast.on.decoding, forecast.on.end)
    assert forecast.in_pieces.held_tokens is None
    assert forecast.auto.left_whole


def test_a_budget_in_k4v3_is_rounded_up_to_larger_pages(wide):
    """At 1.0, every token is packed, and 16-bit blocks hold 4 times as many."""
    load = dict(dtype="bfloat16", block_size=16)
    config = {"compress": "cake", "packed_dtype": "k4v3", "min_prompt": 128}
    some = make_forecast(wide, 1000, 8, {**config, "budget": 0.3}, **load)
    assert (some.page_tokens, some.pages, some.on.decoding) == (64, 3 * 4, 1 + 4 + 3)
    assert (some.budget_tokens, some.kept_tokens) == (300, 16 + 4 * 64 + 40)
    assert some.auto.on == make_forecast(wide, 1000, 8, {**config, "budget": 0.3,
        "packed_dtype": "auto"}, **load).on  # fmt: skip
    every = make_forecast(wide, 1000, 8, {**config, "budget": 1.0}, **load)
    assert (every.kept_tokens, every.pages, every.on.decoding) == (1000, 3 * 14, 1 + 14 + 6)
    assert every.auto.left_whole == "compressing it to this budget would free no block"
    assert every.left_whole is None
    short = make_forecast(wide, 130, 8, {**config, "budget": 1.0}, block_size=128)
    assert (short.page_tokens, short.left_whole) == (1024, every.auto.left_whole)


def test_the_plan_shows_both_formats(plan_text, plan_json, wide):
    flags = ["--len", 2000, "--kv-budget", 0.4, "--kv-packed-dtype", "k4v3", "--kv-memory", 0.1]
    cpu_flags = ["--device", "cpu", "--dtype", "bfloat16"]
    flags += ["--block-size", 128]  # more than the plugin asks for
    text = plan_text(wide, *flags, *cpu_flags)
    assert "per request │ off │ auto │ k4v3 │ │" in text.replace("┃", "│")
    assert "--kv-packed-dtype k4v3" in text
    assert (
        "In k4v3, a block holds 512 kept tokens of each layer. This prompt keeps 720 tokens per"
        " layer (36.0%) at a budget of 800, because kept tokens fill whole blocks. A"
        " smaller --block-size comes closer." in text
    )
    forecast = plan_json(wide, *flags, *cpu_flags)
    assert (forecast["packed_dtype"], forecast["page_tokens"]) == ("k4v3", 512)
    assert forecast["settings"]["packed_dtype"] == "k4v3"
    auto = forecast["auto"]
    assert (auto["packed_dtype"], auto["page_tokens"], auto["auto"]) == ("auto", 128, None)
    assert auto["request_on"]["decoding_blocks"] > 2 * forecast["request_on"]["decoding_blocks"]
    assert auto["pool_on"]["decoding"] < forecast["pool_on"]["decoding"]

    def formats(*given):
        plan = plan_json(wide, "--len", 2000, *given)
        return plan["packed_dtype"], plan["budget"], plan["auto"] is None

    assert formats("--kv-budget", 0.3) == ("auto", 0.3, True)
    # the recommended settings: k4v3 has run on CPUs only
    assert formats() == ("auto", 0.2, True)
    assert formats("--device", "cpu") == ("k4v3", 0.6, False)
    assert formats("--device", "cpu", "--kv-cache-dtype", "fp8") == ("auto", 0.2, True)


def test_k4v3_is_recommended_on_cpus_only(plan_text, wide, tiny):
    def text(model, *flags):
        return plan_text(model, "--len", 2000, *flags)

    gpu = "Recommended: --kv-compress cake-chunk --kv-budget 0.2. No GPU has run --kv-packed-dtype"
    shares = (
        "took these shares of their 16-bit memory: 28% at --kv-budget 1.0, 18% at --kv-budget 0.6,"
        " 14% at --kv-budget 0.4."
    )
    packed = ("--kv-packed-dtype", "k4v3", "--kv-budget", 0.4)
    on_gpu, on_cpu = text(wide), text(wide, "--device", "cpu")
    assert gpu in on_gpu
    assert "Recommended: --kv-compress cake-chunk --kv-packed-dtype k4v3. Measured" in on_cpu
    assert shares in on_gpu
    assert shares in on_cpu
    slower = "but 1.20 times on a Xeon with AMX."
    assert slower in on_cpu
    assert slower not in on_gpu + text(wide, "--device", "cpu", "--dtype", "float32")
    assert "┃ k4v3, untested ┃" in text(wide, *packed)
    assert "┃ k4v3 ┃" in text(wide, *packed, "--device", "cpu")
    small_heads = text(tiny, "--device", "cpu")
    assert "Recommended: --kv-compress cake-chunk --kv-budget 0.2. vLLM's" in small_heads
    assert " per GPU" in on_gpu
    assert "GPU" not in on_cpu


@pytest.mark.parametrize(
    ("changes", "biased"),
    [
        ({}, False),
        (dict(attention_bias=False), False),
        (dict(attention_bias=True), True),
        (dict(model_type="qwen2"), True),  # its configs do not say it
        (dict(model_type="qwen3", attention_bias=False), False),
    ],
)
def test_fp8_is_named_with_its_risk(plan_text, plan_json, tiny, tmp_path, changes, biased):
    config = {**json.loads(Path(tiny, "config.json").read_text()), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = plan_text(tmp_path, "--len", 2000)
    assert "How much outputs change depends on the model. To measure it, pass the URL" in text
    assert ("This model's keys have biases" in text) == biased
    forecast = plan_json(tmp_path, "--len", 2000)
    assert forecast["shape"]["key_biases"] == biased


def test_a_budget_that_whole_blocks_change_is_named(plan_text, plan_json, tiny):
    text = partial(plan_text, tiny, "--kv-budget", 0.2, "--device", "cpu", "--len")
    forecast = plan_json(tiny, "--kv-budget", 0.2, "--device", "cpu", "--len", 1414)
    kept, budget = round(forecast["kept_tokens"]), forecast["budget_tokens"]
    assert (abs(kept - budget) > 0.05 * budget, budget) == (True, 282)
    assert (
        f"This prompt keeps {kept} tokens per layer ({kept / 1414:.1%}) at a budget of 282, because"
        " kept tokens fill whole blocks. A smaller --block-size comes closer."
    ) in text(1414)
    protected = "because kept tokens fill whole blocks and hold the protected tokens."
    assert protected in text(1414, "--protected", 300)
    assert "This prompt keeps" not in text(1414, "--block-size", 16)
    assert "This prompt keeps" not in text(900)  # not compressed


# -- what the next turn of a chat finds in the prefix cache ----------------------------------------


def next_hit(llm, seed: int, length: int, output: int, **params) -> int:
    """Return the tokens that a second turn after a prompt of `length` tokens finds cached.

    Its output only needs to be long enough for the method to compress the prompt, because
    uncompressed prompts are cached to their end.
    """
    prompt = tokens(length, seed=seed)
    (first,) = llm.generate([prompt], output, **params)
    following = prompt + first + tokens(64, seed=seed + 1)
    (second,) = llm.outputs([following], min(output, 40), **params)
    return int(second.num_cached_tokens)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("length", "output", "method", "expected"),
    [
        (1000, 100, "cake", 1000 // BLOCK * BLOCK),
        (100, 100, "cake", 199 // BLOCK * BLOCK),  # not compressed
        (1000, 100, "h2o", 0),  # reads the queries of all tokens
    ],
)
def test_cached_tokens_of_the_next_turn_equal_the_engines(tiny, length, output, method, expected):
    config = {"compress": method, "budget": 0.2, "min_prompt": 128}
    hits = plan_on_cpu(tiny, length, output, config).next_hits
    xargs = {"kv_compress": method, "kv_budget": 0.2}
    seed = 1000 + 10 * output + length + len(method)
    # Not the shared engine: other tests have ended engines of this process since it started.
    allowed = settings("cake", 0.2, allow_override="all")
    with engine(tiny, additional_config=allowed, max_model_len=2048) as llm:
        on = next_hit(llm, seed, length, output, extra_args=xargs)
        off = next_hit(llm, seed + 5000, length, output, extra_args={"kv_compress": "off"})
    assert on == hits.on == expected
    assert off == hits.off == (length + output - 1) // BLOCK * BLOCK


@pytest.mark.engine
@pytest.mark.parametrize(
    ("length", "output", "changes"),
    [
        (700, 40, {"budget": 1.0}),
        (1500, 40, {"budget": 1.0, "max_whole": 256, "piece": 96}),
        (100, 290, {"budget": 0.6, "decode_interval": 256}),
        (700, 150, {"packed_dtype": "auto", "decode_budget": 96, "decode_interval": 64}),
        (100, 150, {"packed_dtype": "auto", "decode_budget": 96, "decode_interval": 64}),
        (100, 290, {"compress": "h2o", "packed_dtype": "auto", "decode_budget": 96,
                    "min_prompt": 2000}),
        (1500, 40, {"packed_dtype": "auto", "max_whole": 700, "piece": 256}),
        (1500, 40, {"packed_dtype": "auto", "max_whole": 700, "piece": 256, "probe": 0}),
    ],
)  # fmt: skip
def test_cached_tokens_after_repeated_packing_equal_the_engines(wide, length, output, changes):
    config = settings(**{"budget": 0.2, "packed_dtype": "k4v3", **changes})
    hits = plan_on_cpu(wide, length, output, config["kvcompress"], longest=2560).next_hits
    with engine(wide, additional_config=config, max_model_len=2560) as llm:
        assert next_hit(llm, 7, length, output) == hits.on < hits.off


@pytest.mark.engine
def test_cached_tokens_after_a_look_ahead_equal_the_engines(tiny):
    """An output that ends within the look-ahead is cached to its end."""
    config = settings("cake-chunk", 0.2, lookahead=32)
    with engine(tiny, additional_config=config, max_model_len=2048) as llm:
        for output, expected in ((100, 1032), (20, 1019)):
            hits = plan_on_cpu(tiny, 1000, output, config["kvcompress"]).next_hits
            assert next_hit(llm, output, 1000, output) == hits.on == expected // BLOCK * BLOCK


def test_cached_tokens_of_a_model_with_windows_are_not_counted(tmp_path):
    """vLLM alone finds only the prompt's."""
    hits = plan_on_cpu(make("gpt-oss", tmp_path), 500, 100, settings()["kvcompress"]).next_hits
    assert hits is None


def test_the_next_turn_is_shown_where_prefix_caching_is_on(plan_text, tiny):
    text = partial(plan_text, tiny, "--len", 1790, "--max-tokens", 300, "--device", "cpu")
    line = (
        "Next turn of a chat: 1,792 of this request's 2,090 tokens are in the prefix cache, instead"
        " of 2,048 without compression."
    )
    assert line in text()
    assert "Next turn" not in text("--no-enable-prefix-caching")
    assert "Next turn" not in text("--kv-min-prompt", 4000)


# -- conversations that stay warm between turns ----------------------------------------------------

REUSE = {"compress": "cake-chunk", "budget": 1.0, "packed_dtype": "k4v3", "reuse": "grid"}
BFLOAT16 = dict(dtype="bfloat16", block_size=16)
"""Blocks of 16 tokens, and packed pages of 64."""


@pytest.mark.parametrize(
    ("prompt", "output", "page", "grid", "late"),
    [
        # Tokens in the first block and in pages behind it. The last output token is not computed.
        (1040, 1, 64, 16 + 2 * 512, 16 + 16 * 64),
        (1039, 1, 64, 16 + 1 * 512, 16 + 15 * 64),
        (1000, 40, 64, 16 + 1 * 512, 16 + 15 * 64),
        (1000, 41, 64, 16 + 2 * 512, 16 + 15 * 64),
        (1000, 489, 64, 16 + 2 * 512, 16 + 15 * 64 + 512),
        (1000, 488, 64, 16 + 2 * 512, 16 + 15 * 64),
        (2000, 1200, 192, 16 + 5 * 576, 16 + 10 * 192 + 2 * 576),  # 512 fill no whole pages
    ],
)
def test_tokens_that_a_request_leaves_in_packed_pages_are_counted(prompt, output, page, grid, late):
    load = dict(block_size=16, page_tokens=page, prompt=prompt, output=output)
    for reuse, expected in (("grid", grid), ("late", late)):
        parsed = CompressionConfig.parse({**REUSE, "reuse": reuse, "min_prompt": 128})
        assert packed_tokens(PlannedRequest(settings=parsed, num_layers=3, **load)) == expected


@pytest.mark.engine
@pytest.mark.parametrize(
    ("length", "count"), [(1300, 30), (100, 700), (1056, 1), (600, 489), (543, 2), (544, 1)]
)
@pytest.mark.parametrize("reuse", ["grid", "late"])
def test_tokens_of_the_next_turn_equal_the_engines(reusing_llms, wide, length, count, reuse):
    llm = reusing_llms[reuse]
    config = {"compress": "cake", "budget": 1.0, "packed_dtype": "k4v3", "reuse": reuse}
    prompt = tokens(length, seed=length)
    (output,) = llm.outputs([prompt], count)
    following = prompt + list(output.outputs[0].token_ids) + tokens(40, seed=1)
    (found,) = llm.outputs([following], 1)
    assert found.num_cached_tokens == plan_on_cpu(wide, length, count, config).next_hits.on


@pytest.fixture(scope="module")
def reusing_llms(wide):
    def reusing(reuse):
        config = settings("cake", 1.0, packed_dtype="k4v3", reuse=reuse)
        del config["kvcompress"]["min_prompt"]
        return engine(wide, additional_config=config, max_model_len=2048)

    with reusing("grid") as grid, reusing("late") as late:
        yield {"grid": grid, "late": late}


def test_warm_conversations_are_counted_in_the_planned_pool(wide):
    """A block of 3 layers with 2 KV heads of 64 in 16 bits has 24 KiB."""
    load = dict(memory_gib=2200 * 24 / 2**20, longest=16384, **BFLOAT16)
    plan = plan_on_cpu(wide, 8000, 449, REUSE, **load)
    warm = plan.warm
    # the first block, 128 packed ones, and 240 tokens that do not fill a cell
    blocks_on = 1 + 16 * 512 // 64 + 240 // 16
    assert (warm.blocks_off, warm.blocks_on) == (8448 // 16, blocks_on)
    assert (warm.off, warm.fp8, warm.on) == (2199 // 528, 4399 // 528, 2199 // blocks_on)
    assert (plan.next_hits.off, plan.next_hits.on) == (8448, 8448)
    # one layer's tokens, in blocks of all 3 layers
    assert warm.scratch_bytes == -(-16384 // (16 * 3)) * 24 * 1024
    unknown = plan_on_cpu(wide, 8000, 449, REUSE, **BFLOAT16).warm
    assert (unknown.blocks_on, unknown.off, unknown.fp8, unknown.on) == (144, None, None, None)


def test_prompts_that_leave_no_packed_pages_stay_as_in_vllm(wide):
    cell_and_block = 512 + 16
    for length, changes in ((400, {"min_prompt": 0}), (cell_and_block, {"min_prompt": 600})):
        plan = plan_on_cpu(wide, length, 100, {**REUSE, **changes}, memory_gib=1, **BFLOAT16)
        assert plan.forecast.left_whole is not None
        assert plan.warm.on == plan.warm.off
        assert plan.warm.blocks_on == plan.warm.blocks_off == (length + 99) // 16
        assert plan.next_hits.on <= plan.next_hits.off
    assert plan_on_cpu(wide, 8000, 449, {**REUSE, "reuse": "off"}, **BFLOAT16).warm is None
    with pytest.raises(ConfigError, match="--kv-reuse needs prefix caching"):
        plan_on_cpu(wide, 8000, 449, REUSE, prefix_caching=False, **BFLOAT16)


def test_the_plan_shows_warm_conversations_with_reuse(plan_text, plan_json, wide):
    packed = ("--kv-compress", "cake-chunk", "--kv-budget", 1.0, "--kv-packed-dtype", "k4v3")
    flags = ("--len", 8000, "--max-tokens", 449, "--max-model-len", 8192 + 4096, *packed)
    flags += ("--device", "cpu", "--dtype", "bfloat16", "--block-size", 16)
    flags += ("--kv-memory", 2200 * 24 / 2**20)
    text = partial(plan_text, wide, *flags)
    shown = text("--kv-reuse", "grid")
    assert "--kv-packed-dtype k4v3 --kv-reuse grid" in shown
    assert "│ blocks cached between turns │ 528 │ 528 │ 144 │ 3.7x │" in shown
    assert "│ idle conversations kept warm │ 4 │ 4 │ 15 │ 3.8x │" in shown
    assert (
        "A conversation is a prompt and its output, 8,449 tokens. Between turns it stays warm until"
        " running requests take its blocks. With vLLM's --kv-cache-dtype fp8 alone, 8 stay warm."
    ) in shown
    assert (
        "Reuse reserves 6.0 MiB of scratch memory at startup: one layer's keys and values for"
        " --max-model-len tokens."
    ) in shown
    assert "warm" not in text()
    plan = plan_json(wide, *flags, "--kv-reuse", "grid")
    assert (plan["warm"]["off"], plan["warm"]["fp8"], plan["warm"]["on"]) == (4, 8, 15)
    assert plan["settings"]["reuse"] == "grid"


def test_the_largest_request_may_choose_the_larger_format(wide):
    config = {"compress": "cake", "budget": 0.1, "min_prompt": 128, "packed_dtype": "k4v3"}

    def worst(**extra):
        return make_forecast(wide, 1000, 8, {**config, **extra}).worst

    may_choose = worst(allow_override="cake", budget_bounds="0.05:0.5")
    auto = make_forecast(wide, 1000, 8, {**config, "budget": 0.5, "packed_dtype": "auto"})
    assert (may_choose.asks, may_choose.blocks) == ("cake at 0.5 in auto", auto.on)
    # Requests that may not choose a format get an alias's budget in the alias's format.
    alias = worst(packed_dtype="auto", alias="small=cake:0.9:k4v3")
    small = make_forecast(wide, 1000, 8, {**config, "budget": 0.9})
    assert (alias.asks, alias.blocks) == ("the model name small", small.on)


@pytest.mark.engine
def test_bytes_equal_the_engines(llm, tiny):
    settings_dict = settings("cake", 0.2, allow_override="all")["kvcompress"]
    forecast = make_forecast(tiny, 1000, 24, settings_dict, longest=2048, requests=64)
    config = llm.worker.vllm_config
    cache = llm.scheduler.kv_cache_config
    taken = sum(tensor.size for tensor in cache.kv_cache_tensors)
    assert forecast.block_bytes * cache.num_blocks == taken
    compression = active_settings(config.additional_config)
    assert forecast.extra_bytes == device_bytes(config, compression)
    assert 0 < forecast.table_bytes < forecast.extra_bytes


@needs_avx512
@pytest.mark.engine
def test_bytes_of_a_quantised_cache_equal_the_engines(tiny):
    settings_dict = settings("cake", 0.2, decode_budget=96)
    options = dict(max_model_len=2048, max_num_seqs=64, kv_cache_dtype="fp8")
    with engine(tiny, additional_config=settings_dict, **options) as llm:
        cache, config = llm.scheduler.kv_cache_config, llm.worker.vllm_config
        taken = sum(tensor.size for tensor in cache.kv_cache_tensors)
        compression = active_settings(config.additional_config)
        extra = device_bytes(config, compression)
    forecast_of = partial(make_forecast, tiny, 1000, 24, settings_dict["kvcompress"])
    forecast_of = partial(forecast_of, longest=2048, requests=64)
    forecast = forecast_of(cache_dtype="fp8")
    assert forecast.block_bytes * cache.num_blocks == taken
    assert forecast.extra_bytes == extra
    plain = forecast_of()
    assert plain.block_bytes == 4 * forecast.block_bytes
    assert plain.on.prefill == forecast.on.prefill


@pytest.mark.engine
def test_the_planned_number_of_requests_fits_the_engine(tiny):
    """They all run at once, without preemption, in a pool of the planned size."""
    settings_dict, length, output = settings(budget=0.2)["kvcompress"], 640, 40
    memory = 100 * make_forecast(tiny, length, output, settings_dict).block_bytes / 2**30
    forecast = make_forecast(tiny, length, output, settings_dict, memory_gib=memory)
    assert forecast.pool_on.blocks == 99
    count = forecast.pool_on.beside_prefill
    assert count > 2 * forecast.pool_off.decoding
    limits = dict(max_num_batched_tokens=length, max_num_seqs=64, max_model_len=length + output)
    options = dict(additional_config=settings(budget=0.2), enable_prefix_caching=False)
    with engine(tiny, blocks=100, **limits, **options) as llm:
        preemptions = llm.watch_preemptions()
        for i in range(count):
            llm.submit(str(i), tokens(length, seed=i), output)
        max_running, finished = 0, {}
        while llm.llm.llm_engine.has_unfinished_requests():
            finished.update(llm.step())
            max_running = max(max_running, len(llm.running()))
        assert max_running == count == len(finished)
        assert not preemptions


def test_the_command_prints_the_forecast_without_vllm(run, tiny):
    flags = ["--len", 1000, "--max-tokens", 70, "--kv-budget", 0.1, "--kv-min-prompt", 500]
    flags += ["--kv-memory", 0.01, "--kv-compress", "snapkv", *CPU_FLAGS]
    result = run("plan", tiny, *flags, "--json", site=WITHOUT_VLLM)
    assert result.returncode == 0, result.stderr
    forecast = json.loads(result.stdout)
    settings_dict = {"compress": "snapkv", "budget": 0.1, "min_prompt": 500}
    expected = make_forecast(tiny, 1000, 70, settings_dict, memory_gib=0.01)
    assert forecast["request_on"]["end_blocks"] == expected.on.end
    assert forecast["request_on"]["end_bytes"] == expected.on.end * expected.block_bytes
    assert forecast["pool_on"]["decoding"] == expected.pool_on.decoding
    assert forecast["settings"] == {"compress": "snapkv", "budget": 0.1, "min_prompt": 500}
    text = run("plan", tiny, *flags, site=WITHOUT_VLLM)
    assert text.returncode == 0
    row = next(line for line in text.stdout.splitlines() if "all decoding" in line)
    cells = [cell.strip() for cell in row.split("│")]
    assert cells[2:4] == [str(expected.pool_off.decoding), str(expected.pool_on.decoding)]
    assert "must hold" not in text.stdout


MERGES_IN_FP8 = (
    "merges tokens, which would have to be quantised again in a fp8 KV cache; choose a"
    " method that does not merge, or set --kv-cache-dtype auto"
)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("nowhere/a/model --len 10", "there is no folder nowhere/a/model"),
        ("owner/model --len 10", "nor a model whose config.json is on the Hugging Face hub"),
        ("TINY --len 9 --gpu-memory-utilization 1.5", "must be in (0, 1], got 1.5"),
        ("--kv-compress caek", "did you mean 'cake'"),
        ("--kv-compress off", "needs a compression method"),
        ("--kv-budget 1.5", "budget must be a ratio in (0, 1]"),
        ("--kv-memory 0.0001", "the KV pool must hold one uncompressed prompt"),
        ("--tp 3", "--tp must divide the model's 4 heads"),
        ("--dtype fp8", "--dtype must be auto or one of"),
        ("--mamba-ssm-cache-dtype fp8", "dtype must be auto or one of"),
        ("--kv-cache-dtype nvfp4", "set --kv-cache-dtype auto"),
        *(
            (f"--kv-cache-dtype fp8 --kv-compress d2o --dtype {dtype}", MERGES_IN_FP8)
            for dtype in ("bfloat16", "float32")  # not values of --kv-cache-dtype
        ),
        ("--kv-packed-dtype k4v3", "k4v3 needs a head dim that is a multiple of 8 and at least 64"),
        (
            "--kv-packed-dtype k4v3 --kv-cache-dtype fp8",
            "packed_dtype=k4v3 cannot be combined with a fp8 KV cache",
        ),
        ("--kv-packed-dtype k4v4", "did you mean 'k4v3'?"),
        (
            "--kv-packed-dtype k4v3 --kv-decode-budget 512",
            "packed_dtype=k4v3 cannot be combined with --kv-decode-budget 512",
        ),
        ("--gpu-memory 1", "leaves nothing for the KV cache: the weights take"),
        ("--gpu-memory 80 --device cpu", "give --kv-memory"),
        ("--kv-budget-bounds 0.1:0.5", "--kv-allow-override all"),
        ("--kv-allow-override caek", "did you mean 'cake'"),
        ("--kv-alias tiny@half=caek:0.5", "did you mean 'cake'"),
        ("--max-model-len 100", "--max-model-len must be at least --len plus --max-tokens"),
        ("--kv-compress-config {", "must be a JSON object"),
        ("--speculative-config []", "--speculative-config must be a JSON object, got '[]'"),
        (
            '--speculative-config {"method":"ngram"}',
            "must set num_speculative_tokens to an integer of at least 1",
        ),
        (
            '--speculative-config {"method":"eagle"}',
            "with method eagle needs a model, but it names none",
        ),
        (
            '--speculative-config {"method":"mtp"}',
            "has no num_nextn_predict_layers or mtp_num_hidden_layers or",
        ),
        (
            '--speculative-config {"model":"m/m","num_speculative_tokens":1}',
            "drafting with draft_model is not",
        ),
        (
            "--kv-compress dynamickv --kv-decode-budget 64",
            "--kv-decode-budget cannot bound outputs by 'dynamickv'",
        ),
        (
            "--kv-decode-budget 64 --kv-decode-interval 128 --block-size 48",
            "must be a multiple of the KV block's 48 tokens, got 128; set it to 96",
        ),
    ],
)
def test_an_invalid_option_is_one_sentence_and_status_2(run_in_process, tiny, flags, sentence):
    arguments = f"TINY --len 2000 {flags}" if flags.startswith("--") else flags
    result = run_in_process("plan", *arguments.replace("TINY", tiny).split())
    assert result.status == 2
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("kvcompress: error: ")
    assert sentence in line


def test_tensor_parallelism_splits_a_block_down_to_one_kv_head(tiny):
    settings_dict = settings()["kvcompress"]
    forecasts = (make_forecast(tiny, 1000, 8, settings_dict, ranks=n) for n in (1, 2, 4))
    one, two, four = (forecast.block_bytes for forecast in forecasts)
    assert one == 2 * two
    assert four == two  # four ranks replicate the two KV heads


def test_a_hub_name_is_read_from_the_hub_cache(tiny, run, tmp_path):
    home = tmp_path / "hub"
    snapshot = home / "models--owner--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (home / "models--owner--tiny" / "refs").mkdir()
    (home / "models--owner--tiny" / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(Path(tiny, "config.json").read_text())
    environment = {"HF_HUB_CACHE": str(home), "HF_HUB_OFFLINE": "1"}
    result = run("plan", "owner/tiny", "--len", 2000, "--json", environment=environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["shape"]["layers"] == 4


# -- vLLM's defaults -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "gib", "ranks"),
    [*(("cuda", gib, 1) for gib in (24, 69.9, 70, 80, 141, 159.9, 160, 180)), ("cpu", 64, 2)],
)
def test_defaults_equal_vllms(device, gib, ranks, monkeypatch):
    """Compares with `EngineArgs.get_batch_defaults` on a platform with that much memory."""
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    platform = SimpleNamespace(
        get_device_total_memory=lambda: int(gib * 2**30),
        get_device_name=lambda: "NVIDIA H100",
        is_tpu=lambda: False,
        is_cpu=lambda: device == "cpu",
        is_device_capability=lambda capability: capability == (9, 0),
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens_, requests = arg_utils.EngineArgs.get_batch_defaults(ranks)
    server = UsageContext.OPENAI_API_SERVER
    forecast = defaults_for(device, gib, ranks)
    assert (forecast.batched_tokens, forecast.max_num_seqs) == (tokens_[server], requests[server])


def test_concurrency_is_limited_by_max_num_seqs(tiny, plan_text):
    settings_dict = settings(budget=0.1)["kvcompress"]
    few = make_forecast(tiny, 1000, 8, settings_dict, memory_gib=1, requests=4)
    assert (few.pool_off.decoding, few.pool_on.decoding, few.pool_on.beside_prefill) == (4, 4, 4)
    default = make_forecast(tiny, 1000, 8, settings_dict, memory_gib=1, requests=None)
    assert default.pool_on.decoding == default.pool_on.most == 128  # vLLM's default on a CPU
    output = plan_text(tiny, "--len", 1000, "--kv-memory", 1, "--max-num-seqs", 4, *CPU_FLAGS)
    assert "More requests would fit, but --max-num-seqs is 4." in output


def test_the_largest_request_that_overrides_allow(tiny):
    """Uses the same check of methods and budgets as the server."""

    def forecast_for(method: str, budget: float, **extra_options):
        settings_dict = {"compress": method, "budget": budget, "min_prompt": 128, **extra_options}
        return make_forecast(tiny, 1000, 8, settings_dict, memory_gib=0.1, requests=1024)

    bounds = "0.05:0.5,64:128"
    bounded = forecast_for("cake", 0.1, allow_override="cake,snapkv", budget_bounds=bounds)
    assert bounded.worst.blocks == forecast_for("cake", 0.5).on
    assert bounded.worst.asks in ("cake at 0.5", "snapkv at 0.5")
    assert bounded.pool_on.decoding > bounded.worst.pool.decoding > bounded.pool_off.decoding
    unbounded = forecast_for("cake", 0.1, allow_override="cake")
    assert (unbounded.worst.asks, unbounded.worst.blocks) == ("cake at 1.0", unbounded.off)
    with_off = forecast_for("cake", 0.1, allow_override="off,cake", budget_bounds="0.05:0.5")
    assert (with_off.worst.asks, with_off.worst.blocks) == ("off", with_off.off)
    off = forecast_for("off", 0.1, allow_override="tova", budget_bounds="0.05:0.5")
    assert off.on == off.off
    assert "choose a method" in off.left_whole
    assert forecast_for("cake", 0.1).worst is None


def test_the_largest_request_that_aliases_allow(tiny):
    def worst_case(method: str, alias: dict, **extra_options):
        config = settings(method, 0.1, min_prompt=128, alias=alias, **extra_options)
        return make_forecast(tiny, 1000, 8, config["kvcompress"]).worst

    def blocks_of(method: str, budget: float):
        config = settings(method, budget, min_prompt=128)
        return make_forecast(tiny, 1000, 8, config["kvcompress"]).on

    larger = worst_case("cake", {"tiny@half": "snapkv:0.5", "tiny@less": "cake:0.05"})
    assert (larger.asks, larger.blocks) == ("the model name tiny@half", blocks_of("snapkv", 0.5))
    smaller = worst_case("cake", {"tiny@less": "cake:0.05"})
    assert (smaller.asks, smaller.blocks) == ("cake at 0.1", blocks_of("cake", 0.1))
    with_off = worst_case("cake", {"tiny@full": "off", "tiny@half": "cake:0.5"})
    assert with_off.asks == "the model name tiny@full"
    assert worst_case("off", {"tiny@half": "cake:0.5"}).asks == "off"
    # Budget bounds do not apply to aliases, and requests may use an alias's budget with any method.
    choices = {"allow_override": "snapkv", "budget_bounds": "0.05:0.3"}
    with_override = worst_case("cake", {"tiny@more": "cake:0.8"}, **choices)
    assert with_override.blocks == blocks_of("cake", 0.8)


@pytest.mark.parametrize(
    ("flags", "parsed", "asks"),
    [
        (
            "--kv-alias tiny@half=snapkv:0.5 --kv-alias tiny@less=cake:0.1",
            {"alias": {"tiny@half": "snapkv:0.5", "tiny@less": "cake:0.1"}},
            "the model name tiny@half",
        ),
        (
            "--kv-allow-override cake,snapkv --kv-budget-bounds 0.05:0.5",
            {"allow_override": ["cake", "snapkv"]},
            "cake at 0.5",
        ),
    ],
)
def test_clients_choices_are_parsed_as_by_the_server(
    plan_text, plan_json, tiny, flags, parsed, asks
):
    arguments = [tiny, "--len", 2000, *flags.split(), *CPU_FLAGS]
    shown = plan_text(*arguments)
    assert f"The largest request that clients may choose ({asks}) holds" in shown
    forecast = plan_json(*arguments)
    assert parsed.items() <= forecast["settings"].items()
    worst = forecast["worst"]
    assert (worst["asks"], worst["pool"]) == (asks, None)
    assert worst["request"]["end_blocks"] > forecast["request_on"]["end_blocks"]


def test_a_server_that_compresses_only_on_request_is_planned(plan_text, plan_json, tiny):
    flags = ["--len", 2000, "--kv-compress", "off", "--kv-allow-override", "cake", *CPU_FLAGS]
    assert "only requests that choose a method are compressed" in plan_text(tiny, *flags)
    forecast = plan_json(tiny, *flags)
    assert forecast["window"] is None
    assert forecast["request_on"] == forecast["request_off"]


# -- models that are refused (all of them: tests/engine/test_refused_models.py) --------------------

MLA = dict(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", kv_lora_rank=64,
           q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)  # fmt: skip


def test_a_refused_model_is_an_error_with_status_2(run_in_process, tiny, tmp_path):
    config = {**json.loads(Path(tiny, "config.json").read_text()), **MLA}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run_in_process("plan", tmp_path, "--len", 2000)
    assert result.status == 2
    assert "MLA models keep one latent per token" in result.err
    assert "without --kv-compress" in result.err


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (dict(model_type="qwen2", sliding_window=4096), None),  # off by default
        (dict(model_type="qwen2", sliding_window=4096, use_sliding_window=False), None),
        (dict(model_type="qwen2", sliding_window=4096, use_sliding_window=True), 4096),
        (dict(model_type="mistral", sliding_window=None), None),
        (dict(model_type="mistral", sliding_window=0), None),
    ],
)
def test_a_sliding_window_counts_only_if_it_is_enabled(config, window):
    assert traits_of(config).window == window


def test_shape_of_the_demo_model(demo_model):
    shape = shape_of(read_config(demo_model))
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (30, 9, 3, 64)
    assert (shape.dtype, shape.longest) == ("bfloat16", 8192)


def test_the_plan_shows_how_many_preempted_requests_fit_into_host_memory(wide, plan_text):
    """A block of 3 layers with 2 KV heads of 64 in 16 bits has 24 KiB, and a slot 96 KiB."""
    config = {"compress": "cake", "budget": 0.5, "park": 40 * 96 / 2**20}
    forecast = plan_on_cpu(wide, 2000, 100, config, **BFLOAT16).forecast
    assert forecast.parked == 40 // -(-forecast.on.end // 4) == 2
    without = plan_on_cpu(wide, 2000, 100, {**config, "park": None}, **BFLOAT16).forecast
    assert without.parked is None
    with pytest.raises(ConfigError, match="park must be at least one slot of 4 KV blocks"):
        plan_on_cpu(wide, 2000, 100, {**config, "park": 95 / 2**20}, **BFLOAT16)
    flags = ("--len", 2000, "--device", "cpu", "--dtype", "bfloat16", "--kv-park", 0.5)
    assert "Host memory holds the pages of" in plan_text(wide, *flags)
