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
