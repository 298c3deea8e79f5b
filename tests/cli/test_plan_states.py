"""``kvcompress plan`` for models with recurrent states, with vLLM's flags for them."""

import json

import pytest

from test_state_blocks import REAL


@pytest.mark.parametrize(
    ("flags", "block", "state_blocks"),
    [
        ([], 544, 6),
        (["--mamba-ssm-cache-dtype", "float32"], 1056, 6),
        (["--no-enable-prefix-caching"], 544, 3),
        (["--enable-prefix-caching", "--mamba-ssm-cache-dtype", "auto"], 544, 6),
    ],
)
def test_block_size_and_state_blocks_follow_vllms_flags(
    flags, block, state_blocks, plan_json, tmp_path
):
    config = {**REAL["Qwen3-Next-80B"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    forecast = plan_json(tmp_path, "--len", 16000, "--kv-budget", "0.2", *flags)
    assert forecast["block_size"] == block
    assert forecast["request_off"]["end_blocks"] == -(-(16000 + 255) // block) + state_blocks


def test_the_effective_budget_in_long_blocks_is_named(plan_text, plan_json, tmp_path):
    config = {**REAL["Granite-4-H-small"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--len", 4000, "--kv-budget", 0.4, "--kv-packed-dtype", "k4v3")
    forecast = plan_json(tmp_path, *flags)
    kept, budget = forecast["kept_tokens"], forecast["budget_tokens"]
    assert abs(kept - budget) > budget / 20
    assert forecast["next_hits"] is None
    text = plan_text(tmp_path, *flags)
    assert f"This prompt keeps {kept:,.0f} tokens per layer ({kept / 4000:.1%}) at a budget" in text
    assert "because kept tokens fill whole blocks. Compression needs" in text  # no --block-size


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-max-whole", 4096], "set --kv-probe 0, got 32"),
        (["--enable-prefix-caching"], "add --no-enable-prefix-caching"),
    ],
)
def test_settings_that_the_engine_refuses_are_refused(flags, message, run_in_process, tmp_path):
    config = {**REAL["Granite-4-H-small"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", tmp_path, "--len", 16000, "--kv-budget", "0.2"]
    result = run_in_process(*arguments, *flags)
    assert result.status == 2
    assert message in " ".join(result.err.split())
    assert run_in_process(*arguments).status == 0
