"""KVCOMPRESS_OFF: vLLM runs as vLLM alone, whatever flags, aliases and requests say."""

import logging
import os
import subprocess
import sys

import pytest

from checkpoints import make, tokens
from configuring import configure
from engines import engine, model_runner_v1_only, settings
from test_command_line import engine_args
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.off_switch import OFF_SWITCH, is_switched_off

PROMPTS = [tokens(length, seed=length) for length in (600, 500, 60)]
NEW = 12
EVERYTHING = settings(
    "cake-chunk",
    0.4,
    packed_dtype="k4v3",
    lookahead=32,
    allow_override="all",
    budget_bounds="0.1:0.5",
    alias={"small": "cake:0.2", "full": "off"},
    usage=True,
    protect="system",
)
OFF = {"compress": "off", "alias": {"small": "off", "full": "off"}, "usage": True}
MLA = dict(
    architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", kv_lora_rank=64,
    q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("qwen3", checkpoints_folder)  # heads of 64, which k4v3 needs


@pytest.fixture
def switched_off(monkeypatch):
    monkeypatch.setenv(OFF_SWITCH, "1")


@pytest.fixture
def warnings(monkeypatch):
    """Return the warnings of this package's logger, as logged."""
    lines = []
    monkeypatch.setattr(
        logging.getLogger("vllm.kvcompress"),
        "warning",
        lambda text, *args: lines.append(text % args),
    )
    return lines


# -- the variable ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", True), ("true", True), (" YES ", True), ("on", True),
        ("", False), ("0", False), ("False", False), ("no", False), ("off", False),
    ],
)  # fmt: skip
def test_the_values_of_the_switch(monkeypatch, value, expected):
    monkeypatch.setenv(OFF_SWITCH, value)
    assert is_switched_off() is expected


def test_another_value_is_refused_before_the_model_loads(monkeypatch, model, capsys):
    monkeypatch.setenv(OFF_SWITCH, "off" + "f" * 99)
    rule = r"^KVCOMPRESS_OFF must be 1 or 0, got 'offff.*\.\.\..*; set it to 1 to turn"
    with pytest.raises(ConfigError, match=rule):
        configure(model)
    with pytest.raises(SystemExit, match="2"):
        engine_args(model)
    assert "error: KVCOMPRESS_OFF must be 1" in capsys.readouterr().err


def test_without_the_switch_settings_stay_as_they_are(model):
    config = configure(model, additional_config=EVERYTHING)
    assert config.additional_config["kvcompress"]["compress"] == "cake-chunk"
    assert "Compressing" in config.scheduler_config.scheduler_cls


# -- flags and settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        (["--kv-compress", "cake", "--kv-budget-bounds", "0.1:0.5"], "needs allow_override"),
        (["--kv-budget", "0.2"], "need a method"),
        (["--kv-compress", "newer-method"], "choose from"),
        (["--kv-compress", "cake", "--kv-budget", "2.5"], "got '2.5'"),
        (["--kv-compress-config", '{"compress": "cake", "newer": 1}'], "'newer' is unknown"),
        (["--kv-compress", "cake", "--kv-compress-config", "{bad"], "must be a JSON object"),
        (["--kv-compress", "cake", "--kv-alias", "new=newer-method:0.2"], "'newer-method'"),
        (["--kv-compress", "cake", "--kv-window", "8", "--kv-probe", "4"], "needs --kv-max-whole"),
        (["--kv-compress", "cake", "--kv-lookahead", "8"], ""),
    ],
)
def test_no_flag_stops_the_server(switched_off, model, warnings, flags, warning):
    args = engine_args(model, *flags, "--kv-usage", "--kv-alias", "small=cake:0.2")
    aliases = {"small": "off"} | ({"new": "off"} if "new=" in "".join(flags) else {})
    kept = {"compress": "off", "usage": True}
    found = args.additional_config["kvcompress"]
    assert found.pop("alias") == aliases
    assert found == kept
    reported = [line for line in warnings if "wrong settings do not stop the server" in line]
    assert len(reported) == bool(warning)
    assert all(warning in line for line in reported)


def test_an_alias_that_is_a_name_of_the_model_is_served_as_that_name(switched_off, model):
    flags = ["--served-model-name", "llama", "small", "--kv-compress", "cake"]
    args = engine_args(model, *flags, "--kv-alias", "small=cake:0.2", "--kv-alias", "b=cake:0.2")
    assert args.additional_config["kvcompress"]["alias"] == {"b": "off"}


def test_flags_and_offline_settings_carry_the_same_settings_to_all_processes(switched_off, model):
    flags = ["--kv-compress", "cake", "--kv-allow-override", "all", "--kv-usage"]
    aliases = ["--kv-alias", "small=cake:0.2", "--kv-alias", "full=off"]
    args = engine_args(model, *flags, *aliases)
    assert args.additional_config["kvcompress"] == OFF
    other = {"other": 1}
    for given in (EVERYTHING, {"kvcompress": {**OFF, "newer": 1}}):
        config = configure(model, additional_config={**other, **given})
        assert config.additional_config == {**other, "kvcompress": OFF}
    for given in ({}, {"kvcompress": "cake"}, {"kvcompres": {"compress": "cake"}}):
        config = configure(model, additional_config=given)
        assert config.additional_config["kvcompress"] == {"compress": "off"}


def test_aliases_that_the_rust_front_end_cannot_serve_do_not_stop_it(
    switched_off, model, monkeypatch, warnings
):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    configure(model, additional_config=EVERYTHING)
    assert any("starts without its aliases: --kv-alias: the Rust" in line for line in warnings)


# -- vLLM's own classes ----------------------------------------------------------------------------


def classes_and_sizes(config):
    """Return everything that compression changes in a configuration."""
    return {
        "worker": config.parallel_config.worker_cls,
        "scheduler": config.scheduler_config.scheduler_cls,
        "backend": config.attention_config.backend,
        "block": config.cache_config.block_size,
        "blocks": config.cache_config.num_gpu_blocks_override,
        "tokens": config.scheduler_config.max_num_batched_tokens,
    }


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({}, MLA),
        ({}, {"attn_logit_softcapping": 50.0}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"head_dim": 64}),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, {}),
        ({"pipeline_parallel_size": 3, "distributed_executor_backend": "mp"}, {}),
        ({"max_model_len": 128}, {}),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, {}),
        (
            {
                "speculative_config": {
                    "method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3,
                },
                "additional_config": settings(decode_budget=256),
            },
            {},
        ),
    ],
    ids=[
        "head dim", "mla", "soft cap", "fp8", "connector", "stages", "short", "scheduler", "drafts",
    ],
)  # fmt: skip
def test_what_compression_refuses_starts_as_vllm_alone(monkeypatch, edited, options, changes):
    path = edited(**changes)
    compressed = {"additional_config": EVERYTHING} | options
    with pytest.raises(ConfigError):
        configure(path, **compressed)
    alone = configure(path, **options | {"additional_config": {}})
    monkeypatch.setenv(OFF_SWITCH, "1")
    config = configure(path, **compressed)
    assert classes_and_sizes(config) == classes_and_sizes(alone)
    assert config.additional_config["kvcompress"]["compress"] == "off"


def test_the_engine_is_vllms_own_and_ignores_all_settings_of_requests(monkeypatch, model):
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    asks = [
        {"kv_compress": "cake-chunk", "kv_budget": 0.2},
        {"kv_budget": 0.2},
        {"kv_alias": "small"},
        {"kv_budget": "many", "kv_bugdet": 1},
    ]
    with engine(model, additional_config={}, enable_prefix_caching=False) as llm:
        plain, free = llm.generate(PROMPTS, NEW), llm.free_blocks
    monkeypatch.setenv(OFF_SWITCH, "1")
    with engine(model, additional_config=EVERYTHING, enable_prefix_caching=False) as llm:
        assert type(llm.scheduler) is Scheduler
        assert not hasattr(llm.worker, "compressor")
        assert type(llm.worker).__module__.startswith("vllm.v1.worker.")
        (group,) = llm.scheduler.kv_cache_config.kv_cache_groups
        assert type(group.kv_cache_spec) is FullAttentionSpec
        backends = [
            each.backend for groups in llm.worker.model_runner.attn_groups for each in groups
        ]
        assert {backend.__module__.split(".")[0] for backend in backends} == {"vllm"}
        assert llm.free_blocks == free
        assert llm.generate(PROMPTS, NEW) == plain
        for ask in asks:
            outputs = llm.outputs(PROMPTS, NEW, extra_args=ask)
            assert [list(each.outputs[0].token_ids) for each in outputs] == plain
            assert [each.kv_compress for each in outputs] == [None] * len(PROMPTS)


@model_runner_v1_only
def test_no_hook_stays_in_a_requests_way(model):
    """In a process of its own, because other tests install hooks in this one."""
    script = """
import vllm_kvcompress
from vllm.engine.arg_utils import EngineArgs
vllm_kvcompress.register()
settings = {"compress": "cake", "allow_override": "all", "protect": "system"}
EngineArgs(model=MODEL, skip_tokenizer_init=True, additional_config={"kvcompress": settings}
    ).create_engine_config()
from vllm_kvcompress.engine.startup.vllm_hooks import VLLM_HOOKS
import importlib
for hook in VLLM_HOOKS:
    module, _, name = hook.target.partition(":")
    if hook.name.startswith("frontend."):
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        if "vllm_kvcompress" in getattr(getattr(found, "__code__", None), "co_filename", ""):
            print("hook", name)
"""
    script = script.replace("MODEL", repr(model))
    environment = {**os.environ, OFF_SWITCH: "1"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    hooks = [line for line in result.stdout.splitlines() if line.startswith("hook ")]
    assert hooks == ["hook StatLoggerManager.__init__"]
