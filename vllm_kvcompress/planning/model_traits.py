"""The traits of a model that decide whether it can be compressed (`refusals.model`).

`traits_of` reads a config.json and needs no vLLM. The engine reads the same file and then applies
what vLLM decided (`engine.startup.refusals`).
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
from vllm_kvcompress.refusals.tested import CACHED_STATE_MODELS, STATE_MODELS

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
STATE_SPACE_ARCHITECTURES = frozenset({
    "AliceAIForCausalLM", "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM",
    "BailingMoeV3VLForConditionalGeneration", "ColBERTLfm2Model", "ColQwen3_5",
    "FalconH1ForCausalLM", "FalconMambaForCausalLM", "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration", "GraniteMoeHybridForCausalLM",
    "InternS2MobiusForCausalLM", "InternS2MobiusForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration", "JambaForCausalLM",
    "JambaForSequenceClassification", "KimiK3ForConditionalGeneration", "KimiLinearForCausalLM",
    "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration",
    "Mamba2ForCausalLM", "MambaForCausalLM", "MiniCPMOcrForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration",
    "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3",
    "OlmoHybridForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration", "Terratorch", "Zamba2ForCausalLM",
})  # fmt: skip

# stands for any architecture in a sentence-transformers folder, which is an embedding model
SENTENCE_EMBEDDER = "SentenceTransformerModel"
# suffixes by which vLLM chooses the runner without ``--runner``; the first match applies
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
_POOLING = ("ForTextEncoding", "Classification", "Modeling", "MaskedLM", "Model")
_POOLING_NAMES = (
    "Embed", "Reward", "Score", "Retriev", "Splade", "Bidirectional", "ForRanking",
    "ForJointSchema", "ColBERT", "ColQwen", "Terratorch",
)  # fmt: skip
# architectures that vLLM treats as generative despite their suffix
_GENERATING_MODELS = frozenset({
    "ChatGLMModel", "MiDashengLMModel", "MossAudioModel", "Qwen2_5OmniModel", "UltravoxModel",
    "Gemma2Model", "LlamaModel", "MistralModel", "Qwen2Model", "DeepseekV3BidirectionalModel",
})  # fmt: skip

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
        with_states: the model is one of `STATE_MODELS`.
        may_cache_states: the model is one of `CACHED_STATE_MODELS`.
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
    may_cache_states: bool = False
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

    @property
    def other_kinds(self) -> list[str]:
        """Return the attention types that are not supported in a model of this kind."""
        known = STATEFUL | WITHOUT_CACHE if self.state_space else {WINDOWED}
        return sorted(set(self.layer_types) - FULL - known)

    @property
    def groups(self) -> LayerGroups:
        """Return how vLLM groups the layers that the config lists."""
        return groups(self, len(self.layer_types))

    @property
    def stored(self) -> str:
        """Return vLLM's name of the KV cache's dtype; "auto" for the model's own dtype."""
        return self.cache if self.cache != "auto" else self.declared_cache or "auto"

    @property
    def has_fp8_cache(self) -> bool:
        """Return whether the KV cache is fp8 with one scale per layer."""
        return self.stored in FLOAT8_CACHES

    @property
    def has_plain_cache(self) -> bool:
        """Return whether the KV cache is not quantised."""
        return self.stored in PLAIN_CACHES

    @property
    def source(self) -> str:
        """Return where the KV cache's dtype comes from: a flag, or the checkpoint."""
        declared = self.stored == self.declared_cache
        return f"this checkpoint declares {self.stored}" if declared else f"got {self.stored}"

    @property
    def plain_cache(self) -> str:
        """Return the flags that store keys and values in the model's own dtype."""
        if self.declared_cache is None:
            return "--kv-cache-dtype auto"
        if self.dtype == "float32":
            # The flag cannot name float32.
            return "--dtype bfloat16 --kv-cache-dtype bfloat16"
        return f"--kv-cache-dtype {self.dtype}"


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
        with_states=bool(names) and names <= STATE_MODELS,
        may_cache_states=bool(names & CACHED_STATE_MODELS),
        cached_states=2 if names & CACHED_STATE_MODELS else 1,
        layer_types=types,
        uneven=_uneven(text),
        window=_window(text, kind),
        chunk=None if kind.startswith("mimo_v2") else text.get("attention_chunk_size"),
        bidirectional=_bidirectional(config, text),
        soft_cap=text.get("attn_logit_softcapping"),
        shared=int(text.get("num_kv_shared_layers") or 0),
        declared_cache=declared_cache(config, text_config(config)),
    )


def groups(traits: Traits, layers: int) -> LayerGroups:
    """Return how vLLM groups the layers of a model with `layers` layers."""
    return layer_groups(traits.layer_types, layers, traits.window, states=traits.cached_states)


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
