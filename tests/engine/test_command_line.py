"""Command-line flags: the settings that they become, and the errors of wrong ones."""

import argparse
import re

import pytest

from added_methods import installed, write_package
from configuring import configure
from vllm_kvcompress.engine.startup.cli_args import add_flags
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.config import CompressionConfig

# -- the command line ------------------------------------------------------------------------


ALIASES = ["--kv-alias", "fast=tova:64", "--kv-alias", "slow=off"]


def parse(*arguments: str) -> argparse.Namespace:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *(word for word in arguments if word != "--model")])
    args.model = args.model_tag  # as the command does first
    return args


def engine_args(*arguments: str):
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs.from_cli_args(parse(*arguments))


def test_flags_reach_additional_config(model):
    parsed = engine_args(
        "--model",
        model,
        "--kv-compress",
        "snapkv",
        "--kv-budget",
        "0.1",
        "--kv-window",
        "16",
        "--kv-min-prompt",
        "99",
        "--kv-compress-config",
        '{"scorer_params": {"kernel": 5}, "window": 8}',
        "--additional-config",
        '{"other": 1}',
    )
    assert parsed.additional_config == {
        "other": 1,
        "kvcompress": {
            "compress": "snapkv",
            "budget": 0.1,
            "window": 16,  # a flag wins over the JSON object
            "min_prompt": 99,
            "scorer_params": {"kernel": 5},
        },
    }


@pytest.mark.parametrize("method", ["off", "cake"])
def test_the_value_none_leaves_a_flag_unset(method, model):
    def settings(budget, max_whole):
        flags = ["--kv-compress", method, "--kv-decode-budget", budget, "--kv-max-whole", max_whole]
        return engine_args(model, *flags).additional_config["kvcompress"]

    assert settings("none", "none") == {"compress": method}
    if method != "off":
        asked = {"compress": method, "decode_budget": 512, "max_whole": 4096}
        assert settings("512", "4096") == asked


def test_flags_win_over_additional_config(model):
    json_text = '{"kvcompress": {"compress": "cake", "budget": 0.5, "window": 8}}'
    parsed = engine_args("--model", model, "--additional-config", json_text, "--kv-budget", "0.1")
    assert parsed.additional_config["kvcompress"] == {
        "compress": "cake",
        "budget": 0.1,
        "window": 8,
    }
    wrong = ("--additional-config", '{"kvcompress": "cake"}', "--kv-budget", "0.1")
    with pytest.raises(SystemExit, match="2"):
        engine_args("--model", model, *wrong)


def test_the_help_names_the_methods_of_other_packages(tmp_path):
    with installed(write_package(tmp_path, code="raise OSError")):
        parser = argparse.ArgumentParser()
        add_flags(parser)
        assert "random, custom. Of other packages: evens (kvcompress-evens)." in " ".join(
            parser.format_help().split()
        )


def test_a_whole_number_is_tokens_and_a_decimal_is_a_ratio(model):
    for text, budget in (("1024", 1024), ("1.0", 1.0), ("0.25", 0.25)):
        parsed = engine_args("--model", model, "--kv-compress", "cake", "--kv-budget", text)
        value = parsed.additional_config["kvcompress"]["budget"]
        assert (value, type(value)) == (budget, type(budget))


def test_the_format_of_kept_tokens_is_set_for_the_server_and_for_aliases(model):
    flags = ["--kv-compress", "cake", "--kv-packed-dtype", "k4v3"]
    flags += ["--kv-alias", "small=cake-chunk:0.4:k4v3", "plain=cake:0.2:auto"]
    parsed = engine_args("--model", model, *flags)
    assert parsed.additional_config["kvcompress"] == {
        "compress": "cake",
        "packed_dtype": "k4v3",
        "alias": {"small": "cake-chunk:0.4:k4v3", "plain": "cake:0.2:auto"},
    }


def test_without_flags_nothing_is_added(model):
    assert engine_args("--model", model).additional_config == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-compress", "caek"], "did you mean 'cake'"),
        (["--kv-compress", "cake", "--kv-budget", "0"], "ratio in (0, 1]"),
        (["--kv-compress", "cake", "--kv-budget", "-1"], "ratio in (0, 1]"),
        (["--kv-compress", "cake", "--kv-budget", "1.5"], "got '1.5'"),
        (["--kv-compress", "cake", "--kv-budget", "ten"], "got 'ten'"),
        (["--kv-compress", "cake", "--kv-budget", "nan"], "got 'nan'"),
        (["--kv-compress", "cake", "--kv-window", "-3"], "greater than or equal to 0"),
        (["--kv-compress", "cake", "--kv-min-prompt", "x"], "valid integer"),
        (["--kv-compress", "cake", "--kv-min-output", "1"], "greater than or equal to 2"),
        (["--kv-compress", "cake", "--kv-pressure", "1.5"], "less than or equal to 1"),
        (["--kv-compress", "cake", "--kv-allow-override", "cakee"], "did you mean 'cake'"),
        (["--kv-compress", "cake", "--kv-budget-bounds", "0.5:0.1"], "must be MIN:MAX"),
        (["--kv-compress", "cake", "--kv-alias", "fast"], "must be NAME=METHOD:BUDGET"),
        (["--kv-compress", "cake", "--kv-alias", "fast=cake"], "must be NAME=METHOD:BUDGET"),
        (["--kv-compress", "cake", "--kv-alias", "fast=cake:0.2", "--kv-alias", "b=x:1"], "'x'"),
        (["--kv-compress", "cake", "--kv-alias", "fast=cake:0.2:k4v4"], "did you mean 'k4v3'"),
        (["--kv-compress", "cake", "--kv-packed-dtype", "int4"], "choose from ['auto', 'k4v3']"),
        (["--kv-compress", "cake", "--kv-compress-config", "[1]"], "JSON object"),
        (["--kv-compress", "cake", "--kv-compress-config", "{"], "JSON object"),
        (["--kv-compress", "cake", "--kv-budget", "1_000"], "got '1_000'"),
        (["--kv-compress", "cake", "--kv-budget", "\u0660.\u0662"], "ratio in (0, 1]"),
        (["--kv-compress", "cake", "--kv-min-prompt", "1_000"], "digits 0 to 9"),
        (["--kv-compress-config", '{"compress": "cake", "compress": "off"}'], "is given twice"),
        (
            ["--kv-compress-config", '{"compress": "cake", "scorer_params": {"a": 1, "a": 2}}'],
            "'a' is given twice",
        ),
        (
            ["--additional-config", '{"kvcompress": {"compress": "cake", "compress": "off"}}'],
            "'compress' is given twice",
        ),
        (
            ["--additional-config", '{"kvcompress": {}, "kvcompress": {"compress": "off"}}'],
            "'kvcompress' is given twice",
        ),
    ],
)
def test_wrong_flags_end_with_one_sentence(arguments, message, capsys, model):
    with pytest.raises(SystemExit) as status:
        parse("--model", model, *arguments)
    assert status.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--additional-config", '{"kvcompres": {"compress": "cake"}}'], "did you mean 'kvcomp"),
        (["--additional-config", '{"kv_compress": {"compress": "cake"}}'], "got 'kv_compress'"),
        (["--additional-config", '{"KVCompress": {"compress": "cake"}}'], "got 'KVCompress'"),
        (["--additional-config", '{"vllm_kvcompress": {}}'], "got 'vllm_kvcompress'"),
        (["--additional-config", '{"kv_budget": 0.1}'], "write {'kvcompress': {'budget': 0.1}}"),
        (["--kv-compress", "cake", "--additional-config", '{"kv-compres": 1}'], "did you mean"),
        (["--additional-config.kvcompres.compress", "cake"], "did you mean 'kvcompress'"),
        (["--kv-budget", "0.1"], "need a method"),
        (["--kv-allow-override", "all"], "need a method"),
        (["--kv-alias", "fast=cake:0.2"], "need a method"),
        (["--kv-usage"], "need a method"),
        (["--kv-compress", "cake", *ALIASES, "--kv-alias", "fast=off"], "'fast' is given twice"),
        (["--kv-compress", "cake", *ALIASES, "--served-model-name", "m", "slow"], "of the model"),
        (["--kv-compress", "cake", *ALIASES, "--lora-modules", "slow=/x"], "of a LoRA module"),
        (
            [
                "--additional-config",
                '{"kvcompress": {"compress": "off", "alias": "m=off"}}',
                "--served-model-name",
                "m",
            ],
            "of the model",
        ),
        (["--kv-compress", "cake", "--kv-budget-bounds", "0.1:0.5"], "--kv-allow-override all"),
        (
            ["--kv-compress", "tova", "--kv-budget", "20", "--kv-allow-override", "snapkv"],
            "allow_override='snapkv': budget=20",
        ),
        (
            ["--kv-compress", "cake", "--kv-budget", "20"],
            "cannot hold the observation window of 32",
        ),
        (
            ["--kv-compress", "cake", "--kv-compress-config", '{"budgit": 1}'],
            "did you mean 'budget'",
        ),
    ],
)
def test_settings_that_contradict_each_other(arguments, message, capsys, model):
    with pytest.raises(SystemExit, match="2"):
        engine_args("--model", model, *arguments)
    assert re.search(f"^vllm: error: .*{message}", capsys.readouterr().err.splitlines()[-1])


def test_flags_for_requests_reach_the_configuration(model):
    args = engine_args(
        "--model",
        model,
        "--kv-compress",
        "off",
        "--kv-allow-override",
        "off,tova",
        "--kv-budget",
        "20",
        "--kv-budget-bounds",
        "0.05:0.5,16:64",
        "--kv-pressure",
        "0.5",
        "--kv-min-output",
        "9",
        *ALIASES,
        "--kv-usage",
    )
    args.skip_tokenizer_init = True
    config = args.create_engine_config()
    settings_ = CompressionConfig.parse(config.additional_config["kvcompress"])
    assert settings_.allow_override == ("off", "tova")
    assert settings_.budget_bounds == ((0.05, 0.5), (16, 64))
    assert (settings_.pressure, settings_.min_output, settings_.budget) == (0.5, 9, 20)
    assert [str(alias) for alias in settings_.alias] == ["fast=tova:64", "slow=off"]
    assert settings_.usage
    assert "Compressing" in config.scheduler_config.scheduler_cls


def test_an_unsupported_model_ends_the_command_with_one_sentence(edited, capsys):
    args = engine_args("--model", edited(attn_logit_softcapping=50.0), "--kv-compress", "cake")
    args.skip_tokenizer_init = True
    with pytest.raises(SystemExit, match="2"):
        args.create_engine_config()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "vllm: error: --kv-compress cake: scores are computed before the soft cap"
    )


def test_aliases_are_refused_with_the_rust_front_end(model, monkeypatch):
    """The Rust front end would answer aliases with 404."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    named = {"kvcompress": {"compress": "off", "alias": {"slow": "off"}}}
    with pytest.raises(ConfigError, match=r"^--kv-alias: the Rust front end .*; unset VLLM_USE_"):
        configure(model, additional_config=named)
    configure(model, additional_config={"kvcompress": {"compress": "off"}})


@pytest.mark.parametrize("other", ["compressor", "compression", "weights", "kv_connector"])
def test_settings_of_other_plugins_are_ignored(other, model):
    assert engine_args(model, "--additional-config", f'{{"{other}": 1, "x": 2}}').additional_config
    configure(model, additional_config={other: {"compress": 1}})


def test_a_misspelt_key_is_refused_offline_too(model):
    with pytest.raises(ConfigError, match="got 'kvcompres'; did you mean 'kvcompress'"):
        configure(model, additional_config={"kvcompres": {"compress": "cake"}})


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"budget": 99999999999999999999}, "--kv-budget"),
        ({"budget": 4097}, "--kv-budget"),
        ({"decode_budget": 4097}, "--kv-decode-budget"),
        ({"min_prompt": 4097}, "--kv-min-prompt"),
        ({"min_output": 4097}, "--kv-min-output"),
        ({"decode_budget": 512, "decode_interval": 8192}, "--kv-decode-interval"),
        ({"max_whole": 10**20}, "--kv-max-whole"),
        ({"max_whole": 2048, "piece": 8192}, "--kv-piece"),
        ({"alias": {"many": "cake:4097"}}, "the budget of --kv-alias many"),
        ({"allow_override": "all", "budget_bounds": [[4097, 5000]]}, "the smallest of --kv-budget"),
    ],
)
def test_lengths_above_max_model_len_are_refused(model, asked, name):
    longest = 4096
    with pytest.raises(ConfigError, match=f"{name}.* must be at most --max-model-len 4096,.* got"):
        configure(
            model,
            max_model_len=longest,
            additional_config={"kvcompress": {"compress": "cake", **asked}},
        )


def test_lengths_up_to_max_model_len_are_accepted(model):
    raw_settings = {"compress": "cake", "budget": 4096, "min_prompt": 4096, "allow_override": "all"}
    raw_settings["budget_bounds"] = "100:99999999"
    configure(model, max_model_len=4096, additional_config={"kvcompress": raw_settings})


def test_every_request_output_has_the_attribute_kv_compress(model):
    """With compression off the attribute exists and is None."""
    from vllm.outputs import RequestOutput

    configure(model, additional_config={})
    plain = RequestOutput("a", "", [1], None, [], finished=True)
    assert plain.kv_compress is None
