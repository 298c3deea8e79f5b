"""``kvcompress plan`` of models whose layers keep a state, with vLLM's flags for that."""

import json

import pytest

from test_state_blocks import REAL


@pytest.mark.parametrize(
    ("flags", "block", "states"),
    [
        ([], 544, 6),
        (["--mamba-ssm-cache-dtype", "float32"], 1056, 6),
        (["--no-enable-prefix-caching"], 544, 3),
        (["--enable-prefix-caching", "--mamba-ssm-cache-dtype", "auto"], 544, 6),
    ],
)
def test_they_are_typed_as_for_the_server(flags, block, states, typed, tmp_path):
    config = {**REAL["Qwen3-Next-80B"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = typed("plan", tmp_path, "--len", 16000, "--kv-budget", "0.2", *flags, "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["block_size"] == block
    assert found["request_off"]["end_blocks"] == -(-(16000 + 255) // block) + states


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv-max-whole", 4096], "set --kv-probe 0, got 32"),
        (["--enable-prefix-caching"], "add --no-enable-prefix-caching"),
    ],
)
def test_what_the_engine_refuses_is_not_planned(flags, said, typed, tmp_path):
    config = {**REAL["Granite-4-H-small"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = ["plan", tmp_path, "--len", 16000, "--kv-budget", "0.2"]
    done = typed(*line, *flags)
    assert done.status == 2
    assert said in " ".join(done.err.split())
    assert typed(*line).status == 0
