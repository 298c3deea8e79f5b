"""Commands accept only numbers written with the digits 0 to 9 and no underscores."""

import json

import pytest
from typer.testing import CliRunner

from vllm_kvcompress.cli import app
from vllm_kvcompress.demo.__main__ import parse_args

INVALID_NUMBERS = ["1_000", "0_1", "\u0661\u0660", "\uff11\uff10"]


@pytest.mark.parametrize("number", INVALID_NUMBERS)
@pytest.mark.parametrize(
    "arguments",
    [
        *(["plan", "model", "--len", "4096", flag] for flag in ("--kv-window", "--block-size")),
        *(["plan", "model", "--len", "4096", flag] for flag in ("--kv-budget", "--kv-piece")),
        *(["plan", "model", "--len", "4096", flag] for flag in ("--kv-memory", "--gpu-memory")),
        ["plan", "model", "--len"],
        ["doctor", "--tokens"],
        ["doctor", "--kv-min-prompt"],
        ["health", "--timeout"],
        ["health", "--after"],
        *(["compare", flag] for flag in ("--count", "--seed", "--max-drop", "--timeout")),
    ],
    ids=" ".join,
)
def test_a_number_in_other_digits_is_refused(arguments, number):
    result = CliRunner().invoke(app, [*arguments, number], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert arguments[-1] in result.output
    assert "must be written with the digits 0 to 9" in " ".join(result.output.split())


@pytest.mark.parametrize("number", INVALID_NUMBERS)
@pytest.mark.parametrize("flag", ["--tokens", "--max-tokens", "--requests", "--port"])
def test_the_demo_refuses_a_number_in_other_digits(flag, number, capsys):
    assert vars(parse_args([flag, "10"]))[flag[2:].replace("-", "_")] == 10
    with pytest.raises(SystemExit, match="2"):
        parse_args([flag, number])
    assert "must be written with the digits 0 to 9" in capsys.readouterr().err


def test_a_plan_refuses_a_budget_that_no_prompt_can_exceed(tmp_path):
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
    config |= {"vocab_size": 1000, "intermediate_size": 1024, "model_type": "llama"}
    config |= {"torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", str(tmp_path), "--len", "4096", "--max-model-len", "8192", "--kv-budget"]
    result = CliRunner().invoke(app, [*arguments, "8193"])
    assert "--kv-budget must be at most --max-model-len 8192" in str(result.exception)
    assert CliRunner().invoke(app, [*arguments, "2048"]).exit_code == 0
