"""Everything that cannot work is refused before a model loads, in one sentence with a cure."""

import argparse
import json
import re
from pathlib import Path

import pytest

import vllm_kvcompress
from checkpoints import make, tokens
from engines import engine, settings
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.errors import ConfigError, SeamError

vllm_kvcompress.register()


def configure(model: str, **options):
    """Exactly what LLM() and ``vllm serve`` do before they load anything."""
    from vllm.engine.arg_utils import EngineArgs

    config = options.pop("additional_config", settings())
    arguments = EngineArgs(
        model=model, skip_tokenizer_init=True, additional_config=config, **options
    )
    return arguments.create_engine_config()


@pytest.fixture
def edited(checkpoints_folder, tmp_path):
    """A checkpoint folder whose config.json was changed."""

    def edit(**changes) -> str:
        original = Path(make("llama-gqa", checkpoints_folder), "config.json")
        config = json.loads(original.read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return str(tmp_path)

    return edit


@pytest.fixture(scope="module")
def model(checkpoints_folder):
    return make("llama-gqa", checkpoints_folder)


def test_a_supported_model_is_configured(model):
    config = configure(model)
    assert config.parallel_config.worker_cls.endswith("CompressingCPUWorker")
    assert config.scheduler_config.scheduler_cls.endswith("CompressingScheduler")
    assert config.additional_config["kvcompress"]["compress"] == "cake"


def test_the_settings_are_part_of_vllms_hash(model):
    hashes = {
        configure(model, additional_config=settings(budget=budget)).compute_hash()
        for budget in (0.1, 0.2, 0.1)
    }
    assert len(hashes) == 2


BLOOM = dict(
    architectures=["BloomForCausalLM"], model_type="bloom", n_layer=2, n_head=4, hidden_size=128
)
LINEAR = ["full_attention", "linear_attention", "full_attention", "full_attention"]
MAMBA = dict(
    architectures=["MambaForCausalLM"], model_type="mamba", state_size=16, num_hidden_layers=2
)
WHISPER = dict(
    architectures=["WhisperForConditionalGeneration"], model_type="whisper", d_model=64,
    encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
)  # fmt: skip
MLA = dict(
    architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", kv_lora_rank=64,
    q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason", "cure"),
    [
        (BLOOM, "ALiBi", "without --kv-compress"),
        (MLA, "MLA", "without --kv-compress"),
        (
            dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=512),
            "sliding window of 512",
            "--disable-sliding-window",
        ),
        (dict(attn_logit_softcapping=50.0), "soft cap of 50.0", "without --kv-compress"),
        (
            dict(layer_types=LINEAR),
            r"this model has \['full_attention', 'linear_attention'\]",
            "without --kv-compress",
        ),
        (dict(num_kv_shared_layers=2), "share KV caches, and 2 of", "without --kv-compress"),
        (MAMBA, "state-space layers", "without --kv-compress"),
        (WHISPER, "encoder-decoder models", "without --kv-compress"),
    ],
    ids=lambda v: None if isinstance(v, dict) else "",
)
def test_trap_12_models_that_cannot_work(edited, changes, reason, cure):
    with pytest.raises(ConfigError, match=reason) as refusal:
        configure(edited(**changes))
    assert cure in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "reason", "cure"),
    [
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "KV connectors",
            "--kv-transfer-config",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative decoding",
            "--speculative-config",
        ),
        ({"kv_cache_dtype": "fp8"}, "quantised KV caches", "--kv-cache-dtype auto"),
        ({"pipeline_parallel_size": 2}, "one rank", "--pipeline-parallel-size 1"),
        ({"scheduler_cls": "somebody.Else"}, "own scheduler", "--scheduler-cls"),
        ({"worker_cls": "somebody.Elses"}, "vLLM's own workers", "--worker-cls"),
        ({"runner": "pooling"}, "only generating models", "without --kv-compress"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_trap_09_10_11_options_that_cannot_work(model, options, reason, cure):
    with pytest.raises((ConfigError, ValueError), match=reason) as refusal:
        configure(model, **options)
    assert cure in str(refusal.value)


@pytest.mark.parametrize(
    ("part", "name", "value", "reason", "cure"),
    [
        (
            *("parallel_config", "decode_context_parallel_size", 2),
            *("context parallelism", "--decode-context-parallel-size 1"),
        ),
        (
            *("parallel_config", "prefill_context_parallel_size", 2),
            *("context parallelism", "--prefill-context-parallel-size 1"),
        ),
        (
            *("model_config", "disable_cascade_attn", False),
            *("cascade attention", "--no-disable-cascade-attn"),
        ),
        (*("parallel_config", "enable_dbo", True), *("dual-batch overlap", "--enable-dbo")),
        (
            *("cache_config", "kv_sharing_fast_prefill", True),
            *("share KV caches", "--kv-sharing-fast-prefill"),
        ),
    ],
)
def test_what_a_cpu_or_this_vllm_does_not_let_one_ask_for(model, part, name, value, reason, cure):
    """vLLM refuses or ignores these on a CPU, so the check is called on its configuration."""
    from vllm_kvcompress.engine.refusals import refuse_unsupported

    config = configure(model)
    object.__setattr__(getattr(config, part), name, value)
    with pytest.raises(ConfigError, match=reason) as refusal:
        refuse_unsupported(config, CompressionConfig.parse(settings()["kvcompress"]))
    assert cure in str(refusal.value)


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0.0", "0.12.1"])
def test_an_untested_vllm_is_refused(model, version, monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(SeamError, match=rf"vLLM {version} is untested.*install a vLLM in"):
        configure(model)
    configure(model, additional_config={})  # without the setting nobody asks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compress": "caek"}, "did you mean 'cake'"),
        ({"compress": "cake", "budgte": 0.1}, "did you mean 'budget'"),
        ({"compress": "cake", "budget": 0}, r"budget must be a ratio in \(0, 1\]"),
        ({"compress": "cake", "budget": -1}, "got -1"),
        ({"compress": "cake", "budget": 1.5}, "got 1.5"),
        ({"compress": "cake", "budget": "ten"}, "got 'ten'"),
        ({"compress": "cake", "budget": float("nan")}, "got nan"),
        ({"compress": "cake", "budget": 32}, "cannot hold the window of 32"),
        ("cake", "must be an object"),
    ],
)
def test_wrong_settings_are_refused_before_the_model_is_read(given, message, model, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(EngineArgs, "create_model_config", lambda self: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=message):
        configure(model, additional_config={"kvcompress": given})


# -- the command line ------------------------------------------------------------------------


def parse(*arguments: str) -> argparse.Namespace:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(list(arguments))


def engine_args(*arguments: str):
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs.from_cli_args(parse(*arguments))


def test_flags_reach_additional_config(model):
    got = engine_args(
        *("--model", model, "--kv-compress", "snapkv", "--kv-budget", "0.1"),
        *("--kv-window", "16", "--kv-min-prompt", "99"),
        *("--kv-compress-config", '{"scorer_params": {"kernel": 5}, "window": 8}'),
        *("--additional-config", '{"other": 1}'),
    )
    assert got.additional_config == {
        "other": 1,
        "kvcompress": {
            "compress": "snapkv",
            "budget": 0.1,
            "window": 16,  # a flag wins over the JSON object
            "min_prompt": 99,
            "scorer_params": {"kernel": 5},
        },
    }


def test_flags_win_over_additional_config_and_a_wrong_one_is_refused(model):
    given = '{"kvcompress": {"compress": "cake", "budget": 0.5, "window": 8}}'
    got = engine_args("--model", model, "--additional-config", given, "--kv-budget", "0.1")
    assert got.additional_config["kvcompress"] == {"compress": "cake", "budget": 0.1, "window": 8}
    wrong = ("--additional-config", '{"kvcompress": "cake"}', "--kv-budget", "0.1")
    with pytest.raises(SystemExit, match="2"):
        engine_args("--model", model, *wrong)


def test_a_whole_number_is_tokens_and_a_decimal_is_a_ratio(model):
    for text, budget in (("1024", 1024), ("1.0", 1.0), ("0.25", 0.25)):
        got = engine_args("--model", model, "--kv-compress", "cake", "--kv-budget", text)
        value = got.additional_config["kvcompress"]["budget"]
        assert (value, type(value)) == (budget, type(budget))


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
        (["--kv-compress", "cake", "--kv-compress-config", "[1]"], "JSON object"),
        (["--kv-compress", "cake", "--kv-compress-config", "{"], "JSON object"),
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
        (["--kv-budget", "0.1"], "need a method"),
        (["--kv-allow-override", "all"], "need a method"),
        (["--kv-compress", "cake", "--kv-budget-bounds", "0.1:0.5"], "--kv-allow-override all"),
        (
            ["--kv-compress", "tova", "--kv-budget", "20", "--kv-allow-override", "snapkv"],
            "allow_override='snapkv': budget=20",
        ),
        (["--kv-compress", "cake", "--kv-budget", "20"], "cannot hold the window of 32"),
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
    given = engine_args(
        *("--model", model, "--kv-compress", "off", "--kv-allow-override", "off,tova"),
        *("--kv-budget", "20", "--kv-budget-bounds", "0.05:0.5,16:64"),
        *("--kv-pressure", "0.5", "--kv-min-output", "9"),
    )
    given.skip_tokenizer_init = True
    config = given.create_engine_config()
    settings_ = CompressionConfig.parse(config.additional_config["kvcompress"])
    assert settings_.allow_override == ("off", "tova")
    assert settings_.budget_bounds == ((0.05, 0.5), (16, 64))
    assert (settings_.pressure, settings_.min_output, settings_.budget) == (0.5, 9, 20)
    assert "Compressing" in config.scheduler_config.scheduler_cls


def test_a_model_that_cannot_work_ends_the_command_with_one_sentence(edited, capsys):
    given = engine_args("--model", edited(attn_logit_softcapping=50.0), "--kv-compress", "cake")
    given.skip_tokenizer_init = True
    with pytest.raises(SystemExit, match="2"):
        given.create_engine_config()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("vllm: error: --kv-compress cake: scores are taken before the soft cap")


# -- requests ---------------------------------------------------------------------------------


def test_bad_prompts_are_vllms_to_refuse_and_the_engine_lives_on(model):
    from vllm.exceptions import VLLMValidationError

    with engine(model, additional_config=settings(), max_model_len=512) as llm:
        good = tokens(200, seed=1)
        first = llm.generate([good])
        for bad in ([], tokens(513, seed=2), tokens(5000, seed=3)):
            with pytest.raises((ValueError, VLLMValidationError), match=r"(?i)prompt|length|token"):
                llm.generate([bad])
        assert llm.generate([good]) == first
        assert len(llm.generate([tokens(511, seed=4)], 5)[0]) == 1
