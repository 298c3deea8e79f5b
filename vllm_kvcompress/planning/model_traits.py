"""Which models can be compressed: one rule for the engine and for ``kvcompress plan``.

`traits_of` reads a config.json and needs no vLLM. The engine reads the same file and then applies
what vLLM decided (`engine.startup.refusals`). The messages about a model's traits are here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvcompress.planning.cache_dtypes import FLOAT8_CACHES, PLAIN_CACHES, declared_cache
from vllm_kvcompress.planning.layer_groups import (
    FULL,
    STATEFUL,
    WINDOWED,
    WITHOUT_CACHE,
    LayerGroups,
    layer_groups,
    layer_types,
)

_WITHOUT = "serve this model without --kv-compress"
_EVERY_LAYER = "every layer must have full attention or a sliding window, and this model"

_PARTS = ("text_config", "llm_config", "language_config", "generator", "decoder")

# config keys of models that cache one latent per token (vLLM checks the type, then these keys)
_LATENT_KEYS = ("kv_lora_rank", "compress_ratios")

# model types whose attention adds ALiBi, or may do so by their config
_ALIBI_MODEL_TYPES = frozenset({"bloom", "mpt", "jais"})
_BAICHUAN = "BaichuanForCausalLM"
# Baichuan 7B, recognised by this width, has rotary embeddings; its other sizes have ALiBi.
_BAICHUAN_7B_WIDTH = 4096

# keys that only models with state-space or linear layers have
_STATE_SPACE_KEYS = (
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "linear_num_key_heads",
    "linear_attn_config",
    "time_mix",
)
_STATE_SPACE_TYPES = ("mamba", "rwkv", "jamba", "zamba", "falcon_h1", "nemotron_h", "bamba")
# state-space architectures whose configs have none of the above
STATE_SPACE_ARCHITECTURES = frozenset(
    {
        "AliceAIForCausalLM",
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "BailingMoeV3VLForConditionalGeneration",
        "ColBERTLfm2Model",
        "ColQwen3_5",
        "FalconH1ForCausalLM",
        "FalconMambaForCausalLM",
        "Glm5NextForCausalLM",
        "Glm5NextForConditionalGeneration",
        "GraniteMoeHybridForCausalLM",
        "InternS2MobiusForCausalLM",
        "InternS2MobiusForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "JambaForCausalLM",
        "JambaForSequenceClassification",
        "KimiK3ForConditionalGeneration",
        "KimiLinearForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Lfm2VlForConditionalGeneration",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "MiniCPMOcrForConditionalGeneration",
        "MiniCPMV4_6ForConditionalGeneration",
        "MiniCPMV4_7ForConditionalGeneration",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
        "OlmoHybridForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen4ExpForCausalLM",
        "Qwen4ExpForConditionalGeneration",
        "Terratorch",
        "Zamba2ForCausalLM",
    }
)

# State-space architectures that are tested. Only their full-attention layers are compressed.
WITH_STATES = frozenset(
    {
        "GraniteMoeHybridForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
    }
)
# Architectures tested with states in the prefix cache, which vLLM enables by default.
WITH_CACHED_STATES = frozenset({"Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"})

# stands for any architecture in a sentence-transformers folder, which is an embedding model
SENTENCE_EMBEDDER = "SentenceTransformerModel"
# suffixes by which vLLM chooses the runner without ``--runner``; the first match applies
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
_POOLING = ("ForTextEncoding", "Classification", "Modeling", "MaskedLM", "Model")
_POOLING_NAMES = (
    "Embed",
    "Reward",
    "Score",
    "Retriev",
    "Splade",
    "Bidirectional",
    "ForRanking",
    "ForJointSchema",
    "ColBERT",
    "ColQwen",
    "Terratorch",
)
# architectures that vLLM treats as generative despite their suffix
_GENERATING_MODELS = frozenset(
    {
        "ChatGLMModel",
        "MiDashengLMModel",
        "MossAudioModel",
        "Qwen2_5OmniModel",
        "UltravoxModel",
        "Gemma2Model",
        "LlamaModel",
        "MistralModel",
        "Qwen2Model",
        "DeepseekV3BidirectionalModel",
    }
)

# model types in which a prompt's images attend to later tokens
_BIDIRECTIONAL_TYPES = frozenset({"bagel", "gemma3", "molmo2", "moondream3", "paligemma"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The properties that decide whether a model can be compressed.

    Args:
        latent: MLA, which caches one latent per token instead of keys and values.
        alibi: attention biases by true position.
        runner: "generate", or another vLLM runner type.
        diffusion, encoder_decoder: in vLLM's sense.
        state_space: some layers are not attention, whatever their names.
        with_states: the model is one of `WITH_STATES`.
        cached_states: maximum blocks of a request in a group of stateful layers.
        layer_types: names of the layers' attention types; empty if the config has none.
        uneven: layers have attention of different shapes, or none.
        window: sliding window in tokens; None without a window.
        chunk: tokens of chunked local attention; None without it.
        bidirectional: parts of a prompt attend to later tokens.
        soft_cap: soft cap of the attention logits; None without one.
        shared: number of layers that read another layer's KV cache.
        dtype: the model's dtype: "bfloat16", "float16" or "float32".
        declared_cache: the quantised KV cache that the checkpoint declares; None without one.
        cache: dtype of the KV cache, "auto" for `dtype`.
    """

    latent: bool = False
    alibi: bool = False
    runner: str = "generate"
    diffusion: bool = False
    encoder_decoder: bool = False
    state_space: bool = False
    with_states: bool = False
    cached_states: int = 1
    layer_types: tuple[str, ...] = ()
    uneven: bool = False
    window: int | None = None
    chunk: int | None = None
    bidirectional: bool = False
    soft_cap: float | None = None
    shared: int = 0
    dtype: str = "bfloat16"
    declared_cache: str | None = None
    cache: str = "auto"


def looks_like_hub_id(model: str) -> bool:
    """Return whether `model` could be a Hugging Face name: ``owner/name``, without a leading dot
    or tilde."""
    parts = model.split("/")
    return len(parts) <= 2 and all(parts) and not model.startswith((".", "~"))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of the config that describes the language model.

    Without parts, it is the config itself.
    """
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        return text_config(thinker)
    for key in _PARTS:
        part = config.get(key)
        if isinstance(part, Mapping):
            return part
    return config


def traits_of(config: Mapping[str, Any], text: Mapping[str, Any] | None = None) -> Traits:
    """Return the traits given in a config.json. The caller sets `dtype` and `cache`.

    Args:
        text: the part that describes the language model, if the caller knows it better.
    """
    text = text_config(config) if text is None else text
    names = {str(name) for name in config.get("architectures") or text.get("architectures") or ()}
    kind = str(text.get("model_type") or "")
    types = layer_types(text)
    return Traits(
        latent=any(text.get(key) for key in _LATENT_KEYS),
        alibi=_alibi(text, kind, names),
        runner="pooling" if names and not any(map(_generates, names)) else "generate",
        diffusion=config.get("canvas_length") is not None,
        encoder_decoder=any(part.get("is_encoder_decoder") for part in (config, text)),
        state_space=_state_space(config, text, kind, names, types),
        with_states=bool(names) and names <= WITH_STATES,
        cached_states=2 if names & WITH_CACHED_STATES else 1,
        layer_types=types,
        uneven=_uneven(text),
        window=_window(text, kind),
        chunk=None if kind.startswith("mimo_v2") else text.get("attention_chunk_size"),
        bidirectional=_bidirectional(config, text),
        soft_cap=text.get("attn_logit_softcapping"),
        shared=int(text.get("num_kv_shared_layers") or 0),
        declared_cache=declared_cache(config, text_config(config)),
    )


def unsupported(traits: Traits) -> str | None:
    """Return why a model cannot be compressed and what to do, as one sentence; None if it can."""
    if traits.latent:
        return f"MLA models keep one latent per token instead of keys and values; {_WITHOUT}"
    if traits.alibi:
        return (
            f"ALiBi needs every token at its true position, which compression changes; {_WITHOUT}"
        )
    if traits.runner != "generate":
        return f"only generative models are supported, this one is for {traits.runner}; {_WITHOUT}"
    if traits.diffusion:
        return f"diffusion models replace tokens that they already generated; {_WITHOUT}"
    if traits.encoder_decoder:
        return f"encoder-decoder models are not supported; {_WITHOUT}"
    kinds = set(traits.layer_types)
    if traits.state_space:
        if reason := _state_refusal(traits, kinds):
            return reason
    elif kinds - FULL - {WINDOWED}:
        return f"{_EVERY_LAYER} has {sorted(kinds)}; {_WITHOUT}"
    if traits.uneven:
        return f"every layer must have the same KV heads, and this model's differ; {_WITHOUT}"
    if WINDOWED in kinds and kinds & FULL:
        if reason := _group_refusal(traits):
            return reason
    elif traits.window is not None:
        return (
            "some layer must have full attention, and all of this model have a sliding window of"
            f" {traits.window}; {_WITHOUT}, or pass --disable-sliding-window for prompts shorter"
            " than the window"
        )
    if traits.chunk:
        return f"{_EVERY_LAYER} attends in chunks of {traits.chunk}; {_WITHOUT}"
    if traits.bidirectional:
        return (
            "every token must attend only to earlier tokens, and this model has bidirectional"
            f" attention in images or prompts; {_WITHOUT}"
        )
    if traits.soft_cap:
        return (
            f"scores are computed before the soft cap of {traits.soft_cap} on this model's logits;"
            f" {_WITHOUT}"
        )
    if traits.shared:
        return f"layers must not share KV caches, and {traits.shared} of this model do; {_WITHOUT}"
    return _dtype_refusal(traits)


def groups(traits: Traits, layers: int) -> LayerGroups:
    """Return how vLLM groups the layers of a model with `layers` layers."""
    return layer_groups(traits.layer_types, layers, traits.window, states=traits.cached_states)


def _state_refusal(traits: Traits, kinds: set[str]) -> str | None:
    """Return why a model with stateful layers cannot be compressed; None if it can."""
    if not traits.with_states:
        return (
            f"of the models with state-space layers only {sorted(WITH_STATES)} are tested;"
            f" {_WITHOUT}"
        )
    if not (kinds & FULL and kinds & STATEFUL):
        return (
            "the model must have both full-attention and stateful layers, and this model lacks one"
            f" of the two kinds; {_WITHOUT}"
        )
    if others := kinds - FULL - STATEFUL - WITHOUT_CACHE:
        return (
            "only full-attention and stateful layers are supported together, and this model also"
            f" has {sorted(others)}; {_WITHOUT}"
        )
    return _group_refusal(traits)


def _group_refusal(traits: Traits) -> str | None:
    """Return why vLLM's layer groups prevent compression; None if full layers form one group."""
    layers = groups(traits, len(traits.layer_types))
    if layers.full_groups > 1:
        kind = "windowed" if layers.windowed else "stateful"
        return (
            "vLLM must put all full-attention layers in one group, and makes"
            f" {layers.full_groups} groups of this model's {len(layers.full)}, because it has"
            f" {layers.num_uncompressed} {kind} layers; {_WITHOUT}"
        )
    return None


def stored_in(traits: Traits) -> str:
    """Return vLLM's name of the KV cache dtype; "auto" for the model's own dtype."""
    return traits.cache if traits.cache != "auto" else traits.declared_cache or "auto"


def plain_cache(traits: Traits) -> str:
    """Return the flags that store keys and values in the model's own dtype."""
    if traits.declared_cache is None:
        return "--kv-cache-dtype auto"
    if traits.dtype == "float32":
        # The flag cannot name float32.
        return "--dtype bfloat16 --kv-cache-dtype bfloat16"
    return f"--kv-cache-dtype {traits.dtype}"


def _dtype_refusal(traits: Traits) -> str | None:
    """Return why the KV cache's dtype is not supported and the flags that fix it; None if it is."""
    stored, fix = stored_in(traits), plain_cache(traits)
    if stored in FLOAT8_CACHES and traits.state_space:
        return f"an fp8 KV cache is not tested with stateful layers; set {fix}"
    if stored in ("auto", traits.dtype) or stored in FLOAT8_CACHES:
        return None
    reason = f"got {stored}"
    if stored == traits.declared_cache:
        reason = f"this checkpoint declares {stored}"
    if stored in PLAIN_CACHES:
        return f"keys and values must be stored in the model's {traits.dtype}; set {fix}, {reason}"
    return (
        f"the only supported quantised KV cache is fp8 with one scale per layer; set {fix},"
        f" {reason}"
    )


def _generates(name: str) -> bool:
    if name in _GENERATING_MODELS:
        return True
    if any(part in name for part in _POOLING_NAMES) and not name.endswith(_GENERATING):
        return False
    return name.endswith(_GENERATING) or not any(name.endswith(end) for end in _POOLING)


def _alibi(text: Mapping[str, Any], kind: str, names: set[str]) -> bool:
    attention = text.get("attn_config")
    nested = attention.get("alibi") if isinstance(attention, Mapping) else None
    by_type = kind in _ALIBI_MODEL_TYPES and nested is not False
    baichuan = _BAICHUAN in names and text.get("hidden_size") != _BAICHUAN_7B_WIDTH
    position = "alibi" in (text.get("position_embedding_type"), text.get("position_encoding_type"))
    return bool(text.get("alibi") or nested or by_type or baichuan or position)


def _state_space(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    kind: str,
    names: set[str],
    types: tuple[str, ...],
) -> bool:
    if types and set(types) <= FULL:
        # Some hybrid models' configs list only full attention, such as Granite 4.0 Micro's.
        return False
    type_list = config.get("attn_type_list") or text.get("attn_type_list") or ()
    blocks = text.get("layers_block_type") or ()
    return bool(
        names & STATE_SPACE_ARCHITECTURES
        or any(part in kind for part in _STATE_SPACE_TYPES)
        or any(text.get(key) for key in _STATE_SPACE_KEYS)
        or any(kind_of_layer != 1 for kind_of_layer in type_list)
        or set(blocks) - FULL
    )


def _uneven(text: Mapping[str, Any]) -> bool:
    attention = [
        block["attention"]
        for block in text.get("block_configs") or ()
        if isinstance(block, Mapping) and isinstance(block.get("attention"), Mapping)
    ]
    groups = {block.get("n_heads_in_group") for block in attention}
    return len(groups) > 1 or any(
        block.get("no_op") or block.get("replace_with_linear") for block in attention
    )


def _window(text: Mapping[str, Any], kind: str) -> int | None:
    window = text.get("sliding_window")
    # Qwen's configs have a window and a switch for it, which is off by default.
    if kind.startswith("qwen") and not text.get("use_sliding_window"):
        return None
    # Some checkpoints write 0 for no window, and vLLM accepts that.
    return window if isinstance(window, int) and window != 0 else None


def _bidirectional(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    prefix_lm = config.get("is_mm_prefix_lm")
    if prefix_lm is None:
        prefix_lm = config.get("model_type") in _BIDIRECTIONAL_TYPES
    return bool(
        prefix_lm
        or config.get("rswa_window") is not None
        or text.get("use_bidirectional_attention")
        or text.get("is_causal") is False
    )
