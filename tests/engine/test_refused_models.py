"""Refusals of unsupported models: the engine and `kvcompress plan` agree."""

import ast
import json
import re
from pathlib import Path

import pytest

from checkpoints import make
from configuring import configure
from engines import settings
from vllm_kvcompress.commands.plan.model_shape import read_config, shape_of
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.model_traits import STATE_SPACE_ARCHITECTURES, traits_of

# -- models: the engine and `kvcompress plan` share their rules -----------------------------------

MIXED = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
LINEAR = ["full_attention", "linear_attention", "full_attention", "full_attention"]
FP8 = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
PER_HEAD = {**FP8, "strategy": "attn_head"}
COMPRESSED = dict(
    quant_method="compressed-tensors", format="float-quantized", ignore=[], config_groups={}
)
MODELOPT = dict(quant_method="modelopt", quant_algo="FP8", producer=dict(name="modelopt"))
MISTRAL = dict(architectures=["MistralForCausalLM"], model_type="mistral")
WITHOUT = "serve this model without --kv-compress"
EVERY = "every layer must have full attention or a sliding window, and this model"
STATES = (
    "of the models with state-space layers only ['GraniteMoeHybridForCausalLM',"
    " 'NemotronHForCausalLM', 'Qwen3NextForCausalLM', 'Qwen3_5ForCausalLM'] are tested;"
    f" {WITHOUT}"
)
ONE_KIND = (
    "the model must have both full-attention and stateful layers, and this model lacks one of the"
    f" two kinds; {WITHOUT}"
)
GRANITE = dict(architectures=["GraniteMoeHybridForCausalLM"], model_type="granitemoehybrid")
POOLING = f"only generative models are supported, this one is for pooling; {WITHOUT}"


def declares(dtype: str, cache: str) -> str:
    return (
        "the only supported quantised KV cache is fp8 with one scale per layer; set"
        f" --kv-cache-dtype {dtype}, this checkpoint declares {cache}"
    )


MODELS = {
    # name: (changes to a Llama's config.json, the error message; empty if the model is served)
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
        f"ALiBi needs every token at its true position, which compression changes; {WITHOUT}",
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
        "some layer must have full attention, and all of this model have a sliding window of 512;"
        f" {WITHOUT}, or pass --disable-sliding-window for prompts shorter than the window",
    ),
    "windows by name, all layers": (
        dict(sliding_window=512, layer_types=["sliding_attention"] * 4),
        "some layer must have full attention, and all of this model have a sliding window of 512;"
        f" {WITHOUT}, or pass --disable-sliding-window for prompts shorter than the window",
    ),
    "every other layer a window": (dict(sliding_window=64, layer_types=MIXED[:2] * 2), ""),
    "windows that are switched off": (dict(sliding_window=None, layer_types=MIXED), ""),
    "soft cap": (
        dict(attn_logit_softcapping=50.0),
        f"scores are computed before the soft cap of 50.0 on this model's logits; {WITHOUT}",
    ),
    "linear layers": (
        dict(layer_types=LINEAR), f"{EVERY} has ['full_attention', 'linear_attention']; {WITHOUT}",
    ),
    "window layers": (
        dict(sliding_window=64, layer_types=MIXED),
        "vLLM must put all full-attention layers in one group, and makes 3 groups of this model's"
        f" 3, because it has 1 windowed layers; {WITHOUT}",
    ),
    "linear by number": (
        dict(attn_type_list=[0, 0, 0, 1]), STATES,
    ),
    "gpt-oss without names": (
        dict(architectures=["GptOssForCausalLM"], model_type="gpt_oss", sliding_window=64), "",
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
        STATES,
    ),
    "granite without attention": (
        dict(**GRANITE, layer_types=["mamba"] * 4),
        ONE_KIND,
    ),
    "nemotron without states": (
        dict(
            architectures=["NemotronHForCausalLM"], model_type="nemotron_h",
            hybrid_override_pattern="*-*-", num_hidden_layers=4,
        ),
        ONE_KIND,
    ),
    "granite with more attention than states": (
        dict(**GRANITE, layer_types=["attention"] * 3 + ["mamba"]),
        "vLLM must put all full-attention layers in one group, and makes 3 groups of this model's"
        f" 3, because it has 1 stateful layers; {WITHOUT}",
    ),
    "qwen3-next": (dict(architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next"), ""),
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
        "every token must attend only to earlier tokens, and this model has bidirectional attention"
        f" in images or prompts; {WITHOUT}",
    ),
    "chunks": (
        dict(attention_chunk_size=64), f"{EVERY} attends in chunks of 64; {WITHOUT}",
    ),
    "compressed-tensors, fp8": (
        dict(quantization_config=dict(**COMPRESSED, kv_cache_scheme=FP8)), "",
    ),
    "compressed-tensors, fp8 in float16": (
        dict(dtype="float16", quantization_config=dict(**COMPRESSED, kv_cache_scheme=FP8)), "",
    ),
    "compressed-tensors, a scale per head": (
        dict(
            dtype="float16",
            quantization_config=dict(**COMPRESSED, kv_cache_scheme=PER_HEAD),
        ),
        declares("float16", "fp8 per head"),
    ),
    "modelopt, fp8": (
        dict(quantization_config=dict(**MODELOPT, kv_cache_quant_algo="FP8")), "",
    ),
    "modelopt, fp8 by scheme": (
        dict(quantization_config=dict(**MODELOPT, kv_cache_scheme=FP8)), "",
    ),
    "modelopt, fp4 cache": (
        dict(quantization_config=dict(**MODELOPT, kv_cache_quant_algo="NVFP4")),
        declares("bfloat16", "nvfp4"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_trap_12_the_engine_and_plan_agree_about_a_model(edited, name, request):
    """Both read only config.json; the fix in a message is tried on both."""
    if name == "qwen3-next":
        request.getfixturevalue("states_are_served")
    changes, sentence = MODELS[name]
    path = edited(**changes)
    if not sentence:
        model, shape = configure(path).model_config, shape_of(read_config(path))
        assert shape.kv_heads == model.get_total_num_kv_heads()
        assert (shape.layers, shape.head_dim) == (4, model.get_head_size())
        assert shape.dtype == str(model.dtype).removeprefix("torch.")
        assert shape.stored == (1 if "fp8" in name else 2)
        return
    with pytest.raises(ConfigError) as ours:
        shape_of(read_config(path))
    with pytest.raises(ConfigError) as engines:
        configure(path)
    assert str(ours.value) == sentence
    assert str(engines.value) == f"--kv-compress cake: {sentence}"
    if fix := re.search(r"--kv-cache-dtype (\w+)", sentence):
        assert configure(path, kv_cache_dtype=fix[1]).cache_config.cache_dtype == fix[1]
        assert shape_of(read_config(path), cache_dtype=fix[1]).layers == 4
    if "--disable-sliding-window" in sentence:
        config = configure(path, disable_sliding_window=True)
        shape = shape_of(read_config(path), disable_sliding_window=True)
        assert shape.longest == config.model_config.max_model_len == 512


def test_a_float32_model_with_a_quantised_cache_must_change_both(edited):
    """--kv-cache-dtype has no float32."""
    path = edited(quantization_config=dict(**COMPRESSED, kv_cache_scheme=PER_HEAD))
    with pytest.raises(ConfigError, match="set --dtype bfloat16 --kv-cache-dtype bfloat16"):
        configure(path, dtype="float32")
    configure(path, dtype="bfloat16", kv_cache_dtype="bfloat16")


def test_modelopts_separate_quantisation_file_is_read(edited):
    path = edited()
    declared = dict(quant_algo="FP8", kv_cache_quant_algo="NVFP4")
    old = dict(producer=dict(name="modelopt"), quantization=declared)
    Path(path, "hf_quant_config.json").write_text(json.dumps(old))
    for refused in (lambda: configure(path), lambda: shape_of(read_config(path))):
        with pytest.raises(ConfigError, match="--kv-cache-dtype bfloat16, this checkpoint decl"):
            refused()
    configure(path, kv_cache_dtype="bfloat16")


def test_models_with_states_need_the_tested_vllm(checkpoints_folder, monkeypatch):
    import vllm

    model, plain = make("granite", checkpoints_folder), {"enable_prefix_caching": False}
    for version in ("0.31.0", "0.33.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(
            ConfigError, match=rf"tested only on vLLM 0\.32; install it, got {version}"
        ):
            configure(model, additional_config=settings("cake"), **plain)


def test_all_vllm_models_without_attention_are_known():
    """Walks vLLM's tables and classes: a model missing in our list would be accepted."""
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
