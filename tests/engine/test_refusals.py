"""Everything that cannot work is refused before a model loads, in one sentence with a cure."""

import argparse
import ast
import json
import re
from pathlib import Path

import pytest

import vllm_kvcompress
from checkpoints import make, tokens
from engines import engine, settings
from vllm_kvcompress.commands.model_shape import read_config, shape_of
from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.engine.startup.refusals import refuse_unsupported
from vllm_kvcompress.errors import ConfigError, SeamError
from vllm_kvcompress.model_traits import STATE_SPACE_ARCHITECTURES, traits_of

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


# -- models: one rule, the engine's and the one of `kvcompress plan` -------------------------------

MIXED = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
LINEAR = ["full_attention", "linear_attention", "full_attention", "full_attention"]
FP8 = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
COMPRESSED = dict(
    quant_method="compressed-tensors", format="float-quantized", ignore=[], config_groups={}
)
MODELOPT = dict(quant_method="modelopt", quant_algo="FP8", producer=dict(name="modelopt"))
MISTRAL = dict(architectures=["MistralForCausalLM"], model_type="mistral")
WITHOUT = "serve this model without --kv-compress"
EVERY = "every layer must be full attention, this model"
POOLING = f"only generating models decode, this one is for pooling; {WITHOUT}"


def declares(dtype: str, cache: str) -> str:
    return (
        f"quantised KV caches are not supported yet; set --kv-cache-dtype {dtype}, this checkpoint"
        f" declares {cache}"
    )


MODELS = {
    # name: (changes of a Llama's config.json, the sentence; empty for a model that is served)
    "llama": (dict(), ""),
    "null kv heads": (dict(num_key_value_heads=None), ""),
    "all full by number": (dict(attn_type_list=[1, 1, 1, 1]), ""),
    "all full by name": (dict(layer_types=["full_attention"] * 4), ""),
    "mistral": (dict(**MISTRAL, sliding_window=None), ""),
    "a window of 0": (dict(**MISTRAL, sliding_window=0), ""),
    "qwen2, window off": (
        dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", sliding_window=4096), "",
    ),
    "mixtral": (
        dict(
            architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4,
            sliding_window=None,
        ),
        "",
    ),
    "compressed-tensors weights": (dict(quantization_config=COMPRESSED), ""),
    "modelopt weights": (dict(quantization_config=MODELOPT), ""),
    "bloom": (
        dict(
            architectures=["BloomForCausalLM"], model_type="bloom", n_layer=2, n_head=4,
            hidden_size=128,
        ),
        f"ALiBi needs every token at its true position, which a packed page has not; {WITHOUT}",
    ),
    "mla": (
        dict(
            architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", kv_lora_rank=64,
            q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        ),
        f"MLA models keep one latent per token instead of keys and values; {WITHOUT}",
    ),
    "window": (
        dict(**MISTRAL, sliding_window=512),
        f"{EVERY} has a sliding window of 512; {WITHOUT}, or pass --disable-sliding-window for"
        " prompts shorter than it",
    ),
    "soft cap": (
        dict(attn_logit_softcapping=50.0),
        f"scores are taken before the soft cap of 50.0 on this model's logits; {WITHOUT}",
    ),
    "linear layers": (
        dict(layer_types=LINEAR), f"{EVERY} has ['full_attention', 'linear_attention']; {WITHOUT}",
    ),
    "window layers": (
        dict(layer_types=MIXED), f"{EVERY} has ['full_attention', 'sliding_attention']; {WITHOUT}",
    ),
    "linear by number": (
        dict(attn_type_list=[0, 0, 0, 1]), f"{EVERY} has state-space layers; {WITHOUT}",
    ),
    "gpt-oss without names": (
        dict(architectures=["GptOssForCausalLM"], model_type="gpt_oss"),
        f"{EVERY} has ['full_attention', 'sliding_attention']; {WITHOUT}",
    ),
    "shared": (
        dict(num_kv_shared_layers=2),
        f"layers must not share KV caches, and 2 of this model do; {WITHOUT}",
    ),
    "mamba": (
        dict(
            architectures=["MambaForCausalLM"], model_type="mamba", state_size=16,
            num_hidden_layers=2,
        ),
        f"{EVERY} has state-space layers; {WITHOUT}",
    ),
    "qwen3-next": (
        dict(architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next"),
        f"{EVERY} has state-space layers; {WITHOUT}",
    ),
    "whisper": (
        dict(
            architectures=["WhisperForConditionalGeneration"], model_type="whisper", d_model=64,
            encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, is_encoder_decoder=True,
        ),
        f"encoder-decoder models are not supported; {WITHOUT}",
    ),
    "bert": (dict(architectures=["BertModel"], model_type="bert"), POOLING),
    "llama's base": (dict(architectures=["LlamaModel"]), ""),
    "classifier": (dict(architectures=["LlamaForSequenceClassification"]), POOLING),
    "not causal": (
        dict(is_causal=False),
        "every token must attend to those before it alone, and images or prompts of this model"
        f" are attended to as a whole; {WITHOUT}",
    ),
    "chunks": (
        dict(attention_chunk_size=64), f"{EVERY} attends in chunks of 64; {WITHOUT}",
    ),
    "compressed-tensors": (
        dict(quantization_config=dict(**COMPRESSED, kv_cache_scheme=FP8)),
        declares("bfloat16", "fp8"),
    ),
    "compressed-tensors, float16": (
        dict(dtype="float16", quantization_config=dict(**COMPRESSED, kv_cache_scheme=FP8)),
        declares("float16", "fp8"),
    ),
    "modelopt": (
        dict(quantization_config=dict(**MODELOPT, kv_cache_quant_algo="FP8")),
        declares("bfloat16", "fp8_e4m3"),
    ),
    "modelopt by scheme": (
        dict(quantization_config=dict(**MODELOPT, kv_cache_scheme=FP8)),
        declares("bfloat16", "fp8_e4m3"),
    ),
    "modelopt, fp4 cache": (
        dict(quantization_config=dict(**MODELOPT, kv_cache_quant_algo="NVFP4")),
        declares("bfloat16", "nvfp4"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_trap_12_the_engine_and_plan_say_the_same_of_a_model(edited, name):
    """Both from config.json alone; the cure of a sentence that has one is tried on both."""
    changes, sentence = MODELS[name]
    path = edited(**changes)
    if not sentence:
        model, shape = configure(path).model_config, shape_of(read_config(path))
        assert shape.kv_heads == model.get_total_num_kv_heads()
        assert (shape.layers, shape.head_dim) == (4, model.get_head_size())
        assert shape.dtype == str(model.dtype).removeprefix("torch.")
        return
    with pytest.raises(ConfigError) as ours:
        shape_of(read_config(path))
    with pytest.raises(ConfigError) as engines:
        configure(path)
    assert str(ours.value) == sentence
    assert str(engines.value) == f"--kv-compress cake: {sentence}"
    if cure := re.search(r"--kv-cache-dtype (\w+)", sentence):
        assert configure(path, kv_cache_dtype=cure[1]).cache_config.cache_dtype == cure[1]
        assert shape_of(read_config(path), cache_dtype=cure[1]).layers == 4
    if "--disable-sliding-window" in sentence:
        config = configure(path, disable_sliding_window=True)
        shape = shape_of(read_config(path), disable_sliding_window=True)
        assert shape.longest == config.model_config.max_model_len == 512


def test_a_float32_model_with_an_fp8_cache_is_told_to_change_both(edited):
    """--kv-cache-dtype knows no float32."""
    path = edited(quantization_config=dict(**COMPRESSED, kv_cache_scheme=FP8))
    with pytest.raises(ConfigError, match="set --dtype bfloat16 --kv-cache-dtype bfloat16"):
        configure(path, dtype="float32")
    configure(path, dtype="bfloat16", kv_cache_dtype="bfloat16")


def test_modelopts_older_file_of_its_own_is_read(edited):
    path = edited()
    declared = dict(quant_algo="FP8", kv_cache_quant_algo="FP8")
    old = dict(producer=dict(name="modelopt"), quantization=declared)
    Path(path, "hf_quant_config.json").write_text(json.dumps(old))
    for refused in (lambda: configure(path), lambda: shape_of(read_config(path))):
        with pytest.raises(ConfigError, match="--kv-cache-dtype bfloat16, this checkpoint decl"):
            refused()
    configure(path, kv_cache_dtype="bfloat16")


def test_what_vllm_takes_for_no_generator_or_no_attention_is_known_by_name():
    """vLLM's own tables and classes, walked: a name that is missing here would be accepted."""
    import vllm
    from vllm.model_executor.models import registry

    served = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}
    classes = {cls for _, cls in served.values()}
    tables = (registry._EMBEDDING_MODELS, registry._SEQUENCE_CLASSIFICATION_MODELS,
              registry._TOKEN_CLASSIFICATION_MODELS, registry._REWARD_MODELS)  # fmt: skip
    for table in tables:
        for name, (_, cls) in table.items():
            runner = traits_of({"architectures": [name]}).runner
            assert runner == ("generate" if cls in classes else "pooling"), name
    for name in served:
        assert traits_of({"architectures": [name]}).runner == "generate", name

    bases: dict[str, set[str]] = {}
    for file in Path(vllm.__file__).parent.glob("**/models/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {base.id for base in node.bases if isinstance(base, ast.Name)}
                bases.setdefault(node.name, set()).update(names)

    def without_attention(name: str, seen: frozenset[str] = frozenset()) -> bool:
        above = bases.get(name, set()) - seen
        return bool(above & {"IsHybrid", "IsAttentionFree"}) or any(
            without_attention(one, seen | {name}) for one in above
        )

    found = {name for name, (_, cls) in served.items() if without_attention(cls)}
    assert len(found) > 10
    assert found <= STATE_SPACE_ARCHITECTURES


# -- options ---------------------------------------------------------------------------------------


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
        (
            {"kv_cache_dtype": "float16"},
            "keys and values must be stored in the model's bfloat16",
            "--kv-cache-dtype auto",
        ),
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
        (*("parallel_config", "enable_elastic_ep", True), *("come and go", "--enable-elastic-ep")),
        (
            *("parallel_config", "data_parallel_backend", "ray"),
            *("Ray actors", "--data-parallel-backend mp"),
        ),
        (*("attention_config", "use_non_causal", True), *("before it alone", "use_non_causal")),
        (
            *("model_config", "enable_return_routed_experts", True),
            *("looked up by its KV block", "--enable-return-routed-experts"),
        ),
        (
            *("cache_config", "kv_sharing_fast_prefill", True),
            *("share KV caches", "--kv-sharing-fast-prefill"),
        ),
    ],
)
def test_what_a_cpu_or_this_vllm_does_not_let_one_ask_for(model, part, name, value, reason, cure):
    """vLLM refuses or ignores these on a CPU, so the check is called on its configuration."""
    config = configure(model)
    object.__setattr__(getattr(config, part), name, value)
    with pytest.raises(ConfigError, match=reason) as refusal:
        refuse_unsupported(config, CompressionConfig.parse(settings()["kvcompress"]))
    assert cure in str(refusal.value)


# -- executors: by name, class or import path, what counts is where a step goes --------------------

EXECUTORS = "vllm.v1.executor"


def executors() -> dict[str, type]:
    from vllm.v1.executor import Executor, UniProcExecutor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class Watched(MultiprocExecutor):
        def shutdown(self) -> None:
            super().shutdown()

    class Rerouted(UniProcExecutor):
        def execute_model(self, scheduler_output, non_block=False):
            return self.driver_worker.worker.model_runner.execute_model(scheduler_output)

    class Below(Rerouted):
        pass

    class OnRay(MultiprocExecutor):  # as vLLM's RayExecutorV2, which loads where Ray is installed
        uses_ray = True

    class RayDistributedExecutor(Executor):  # the name of Ray's older one, which vLLM 0.33 dropped
        uses_ray = True

    class Foreign(Executor):
        def _init_executor(self) -> None: ...
        def collective_rpc(self, *args, **kwargs): ...
        def check_health(self) -> None: ...

    own = (Watched, Rerouted, Below, OnRay, RayDistributedExecutor, Foreign)
    known = (UniProcExecutor, MultiprocExecutor, ExecutorWithExternalLauncher)
    return {cls.__name__: cls for cls in own + known}


@pytest.mark.parametrize(
    "given",
    [
        *("mp", "uni", "UniProcExecutor", "Watched"),
        f"{EXECUTORS}.multiproc_executor.MultiprocExecutor",
        f"{EXECUTORS}.uniproc_executor.UniProcExecutor",
    ],
)
def test_executors_that_go_through_the_worker_are_taken(model, given):
    configure(model, distributed_executor_backend=executors().get(given, given))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("Rerouted", r"Rerouted has its own execute_model;"),
        ("Below", r"Below has its own execute_model;"),
        ("Foreign", r"known of vLLM's own executors alone;"),
        ("ExecutorWithExternalLauncher", "an external launcher starts schedule on their own"),
        (
            f"{EXECUTORS}.uniproc_executor.ExecutorWithExternalLauncher",
            "an external launcher starts schedule on their own",
        ),
        ("external_launcher", "an external launcher starts schedule on their own"),
        ("ray", "Ray's executor is not tested;"),
        ("OnRay", "Ray's executor is not tested;"),
        ("RayDistributedExecutor", "calls the model runner itself;"),
    ],
)
def test_other_executors_are_refused_and_the_cure_helps(model, given, reason):
    """On vLLM's finished configuration: it starts no Ray and no launcher to ask for them."""
    config, cake = configure(model), CompressionConfig.parse(settings()["kvcompress"])
    backend = executors().get(given, given)
    object.__setattr__(config.parallel_config, "distributed_executor_backend", backend)
    with pytest.raises(ConfigError, match=reason) as refusal:
        refuse_unsupported(config, cake)
    assert "set --distributed-executor-backend mp" in str(refusal.value)
    object.__setattr__(config.parallel_config, "distributed_executor_backend", "mp")
    refuse_unsupported(config, cake)


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
        (["--kv-compress", "cake", "--kv-alias", "fast"], "must be NAME=METHOD:BUDGET"),
        (["--kv-compress", "cake", "--kv-alias", "fast=cake:0.2", "--kv-alias", "b=x:1"], "'x'"),
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
        (["--kv-alias", "fast=cake:0.2"], "need a method"),
        (["--kv-usage"], "need a method"),
        (["--kv-compress", "cake", *ALIASES, "--kv-alias", "fast=off"], "'fast' is given twice"),
        (["--kv-compress", "cake", *ALIASES, "--served-model-name", "m", "slow"], "of the model"),
        (["--kv-compress", "cake", *ALIASES, "--lora-modules", "slow=/x"], "of a LoRA module"),
        (
            [
                *("--additional-config", '{"kvcompress": {"compress": "off", "alias": "m=off"}}'),
                *("--served-model-name", "m"),
            ],
            "of the model",
        ),
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
        *(*ALIASES, "--kv-usage"),
    )
    given.skip_tokenizer_init = True
    config = given.create_engine_config()
    settings_ = CompressionConfig.parse(config.additional_config["kvcompress"])
    assert settings_.allow_override == ("off", "tova")
    assert settings_.budget_bounds == ((0.05, 0.5), (16, 64))
    assert (settings_.pressure, settings_.min_output, settings_.budget) == (0.5, 9, 20)
    assert [str(alias) for alias in settings_.alias] == ["fast=tova:64", "slow=off"]
    assert settings_.usage
    assert "Compressing" in config.scheduler_config.scheduler_cls


def test_a_model_that_cannot_work_ends_the_command_with_one_sentence(edited, capsys):
    given = engine_args("--model", edited(attn_logit_softcapping=50.0), "--kv-compress", "cake")
    given.skip_tokenizer_init = True
    with pytest.raises(SystemExit, match="2"):
        given.create_engine_config()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("vllm: error: --kv-compress cake: scores are taken before the soft cap")


def test_further_names_are_refused_where_another_front_end_looks_them_up(model, monkeypatch):
    """The engine compresses nothing, and the names would be answered with 404."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    named = {"kvcompress": {"compress": "off", "alias": {"slow": "off"}}}
    with pytest.raises(ConfigError, match=r"^--kv-alias: the Rust front end .*; unset VLLM_USE_"):
        configure(model, additional_config=named)
    configure(model, additional_config={"kvcompress": {"compress": "off"}})


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
