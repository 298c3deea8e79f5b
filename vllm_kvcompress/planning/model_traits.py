"""Which models can be compressed: one rule, for the engine and for ``kvcompress plan``.

`traits_of` reads a config.json and knows no vLLM; the engine reads the same and lays over it what
vLLM decided itself (`engine.refusals`). The sentences are here alone.
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
_EVERY_LAYER = "every layer must be full attention, or some a sliding window, this model"

_PARTS = ("text_config", "llm_config", "language_config", "generator", "decoder")

# model types that keep one latent per token (vLLM looks at the type, then at these keys)
_LATENT_KEYS = ("kv_lora_rank", "compress_ratios")

# Architectures whose attention adds ALiBi, or may by their config.
_ALIBI_MODEL_TYPES = frozenset({"bloom", "mpt", "jais"})
_BAICHUAN = "BaichuanForCausalLM"
# Baichuan's 7B, which this width tells, has rotary positions; its other sizes have ALiBi.
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
# those whose config has none of the above
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

# Those of them that are tested: their full layers are compressed, and the others keep their states.
WITH_STATES = frozenset(
    {
        "GraniteMoeHybridForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
    }
)
# Those whose states are tested in the prefix cache, which vLLM has on unless it is switched off.
WITH_CACHED_STATES = frozenset({"Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"})

# what stands for any architecture in a folder of sentence-transformers, which embeds
SENTENCE_EMBEDDER = "SentenceTransformerModel"
# what vLLM makes of an architecture's name when nobody says ``--runner``; the first that fits
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
# what vLLM takes for a generator all the same
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

# images in these prompts attend to what comes after them
_LOOKS_AHEAD_TYPES = frozenset({"bagel", "gemma3", "molmo2", "moondream3", "paligemma"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What decides whether a model can be compressed.

    Args:
        latent: MLA, one latent per token in place of keys and values.
        alibi: biases by true position.
        runner: "generate", or what else vLLM takes the model for.
        diffusion, encoder_decoder: as vLLM means them.
        state_space: some layers are no attention, whatever their names.
        with_states: it is one of `WITH_STATES`.
        cached_states: blocks that a group of layers with states takes of a request at most.
        layer_types: names of the layers' attention; empty where the config has none.
        uneven: layers have attention of different shapes, or none.
        window: sliding window in tokens; None without one.
        chunk: tokens of local attention; None without it.
        looks_ahead: parts of a prompt attend to what comes after them.
        soft_cap: of the attention logits; None without one.
        shared: layers that read another layer's cache.
        dtype: what the model computes in: "bfloat16", "float16" or "float32".
        declared_cache: the quantised KV cache that the checkpoint declares; None without one.
        cache: what the KV cache is stored in, "auto" for `dtype`.
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
    looks_ahead: bool = False
    soft_cap: float | None = None
    shared: int = 0
    dtype: str = "bfloat16"
    declared_cache: str | None = None
    cache: str = "auto"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about the language model, where the config has parts."""
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        return text_config(thinker)
    for key in _PARTS:
        part = config.get(key)
        if isinstance(part, Mapping):
            return part
    return config


def traits_of(config: Mapping[str, Any], text: Mapping[str, Any] | None = None) -> Traits:
    """The traits that a config.json tells; `dtype` and `cache` are the caller's to set.

    Args:
        text: the part about the language model, where the caller knows it better.
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
        looks_ahead=_looks_ahead(config, text),
        soft_cap=text.get("attn_logit_softcapping"),
        shared=int(text.get("num_kv_shared_layers") or 0),
        declared_cache=declared_cache(config, text_config(config)),
    )


def unsupported(traits: Traits) -> str | None:
    """Why a model cannot be compressed and what to do, one sentence; None when it can."""
    if traits.latent:
        return f"MLA models keep one latent per token instead of keys and values; {_WITHOUT}"
    if traits.alibi:
        return (
            f"ALiBi needs every token at its true position, which a packed page has not; {_WITHOUT}"
        )
    if traits.runner != "generate":
        return f"only generating models decode, this one is for {traits.runner}; {_WITHOUT}"
    if traits.diffusion:
        return f"diffusion models take tokens back after they were counted; {_WITHOUT}"
    if traits.encoder_decoder:
        return f"encoder-decoder models are not supported; {_WITHOUT}"
    kinds = set(traits.layer_types)
    if traits.state_space:
        if reason := _states(traits, kinds):
            return reason
    elif kinds - FULL - {WINDOWED}:
        return f"{_EVERY_LAYER} has {sorted(kinds)}; {_WITHOUT}"
    if traits.uneven:
        return f"every layer must have the same KV heads, and this model's differ; {_WITHOUT}"
    if WINDOWED in kinds and kinds & FULL:
        if reason := _grouped(traits):
            return reason
    elif traits.window is not None:
        return (
            f"some layer must be full attention, all of this model have a sliding window of"
            f" {traits.window}; {_WITHOUT}, or pass --disable-sliding-window for prompts shorter"
            " than it"
        )
    if traits.chunk:
        return f"{_EVERY_LAYER} attends in chunks of {traits.chunk}; {_WITHOUT}"
    if traits.looks_ahead:
        return (
            "every token must attend to those before it alone, and images or prompts of this model"
            f" are attended to as a whole; {_WITHOUT}"
        )
    if traits.soft_cap:
        return (
            f"scores are taken before the soft cap of {traits.soft_cap} on this model's logits;"
            f" {_WITHOUT}"
        )
    if traits.shared:
        return f"layers must not share KV caches, and {traits.shared} of this model do; {_WITHOUT}"
    return _quantised(traits)


def groups(traits: Traits, layers: int) -> LayerGroups:
    """How vLLM groups the layers of a model that has so many."""
    return layer_groups(traits.layer_types, layers, traits.window, states=traits.cached_states)


def _states(traits: Traits, kinds: set[str]) -> str | None:
    """Why a model whose layers keep states cannot be compressed; None if its full ones can."""
    if not traits.with_states:
        return (
            f"of models with state-space layers {sorted(WITH_STATES)} alone are tested, and this"
            f" is another one; {_WITHOUT}"
        )
    if not (kinds & FULL and kinds & STATEFUL):
        return (
            "some layers must be full attention and others keep a state, and this model has no"
            f" layer of one of the two kinds; {_WITHOUT}"
        )
    if others := kinds - FULL - STATEFUL - WITHOUT_CACHE:
        return (
            "beside full attention and layers that keep a state there must be no others, this model"
            f" has {sorted(others)}; {_WITHOUT}"
        )
    return _grouped(traits)


def _grouped(traits: Traits) -> str | None:
    """Why a model that has layers of both kinds cannot be; they must be one group of full ones."""
    own = groups(traits, len(traits.layer_types))
    if own.full_groups > 1:
        whose = f"{own.windowed} have a window" if own.windowed else f"{own.stateful} keep a state"
        return (
            "the layers with full attention must be one group for vLLM, which makes"
            f" {own.full_groups} of this model's {len(own.full)}, since {whose}; {_WITHOUT}"
        )
    return None


def stored_in(traits: Traits) -> str:
    """What keys and values are stored in, by vLLM's name; "auto" for the model's own dtype."""
    return traits.cache if traits.cache != "auto" else traits.declared_cache or "auto"


def plain_cache(traits: Traits) -> str:
    """The flags that store keys and values in the model's own dtype."""
    if traits.declared_cache is None:
        return "--kv-cache-dtype auto"
    if traits.dtype == "float32":
        # The flag cannot name float32.
        return "--dtype bfloat16 --kv-cache-dtype bfloat16"
    return f"--kv-cache-dtype {traits.dtype}"


def _quantised(traits: Traits) -> str | None:
    """Why the KV cache's dtype cannot be, and the flags that mend it."""
    stored, cure = stored_in(traits), plain_cache(traits)
    if stored in FLOAT8_CACHES and traits.state_space:
        return f"an fp8 KV cache beside layers that keep a state is not tested; set {cure}"
    if stored in ("auto", traits.dtype) or stored in FLOAT8_CACHES:
        return None
    whose = f"got {stored}"
    if stored == traits.declared_cache:
        whose = f"this checkpoint declares {stored}"
    if stored in PLAIN_CACHES:
        return f"keys and values must be stored in the model's {traits.dtype}; set {cure}, {whose}"
    return (
        f"of quantised KV caches fp8 with one scale per layer is supported alone; set {cure},"
        f" {whose}"
    )


def _generates(name: str) -> bool:
    if name in _GENERATING_MODELS:
        return True
    if any(part in name for part in _POOLING_NAMES) and not name.endswith(_GENERATING):
        return False
    return name.endswith(_GENERATING) or not any(name.endswith(end) for end in _POOLING)


def _alibi(text: Mapping[str, Any], kind: str, names: set[str]) -> bool:
    attention = text.get("attn_config")
    inside = attention.get("alibi") if isinstance(attention, Mapping) else None
    named = kind in _ALIBI_MODEL_TYPES and inside is not False
    baichuan = _BAICHUAN in names and text.get("hidden_size") != _BAICHUAN_7B_WIDTH
    position = "alibi" in (text.get("position_embedding_type"), text.get("position_encoding_type"))
    return bool(text.get("alibi") or inside or named or baichuan or position)


def _state_space(
    config: Mapping[str, Any],
    text: Mapping[str, Any],
    kind: str,
    names: set[str],
    types: tuple[str, ...],
) -> bool:
    if types and set(types) <= FULL:
        # Some hybrids' configs name no other layer, such as Granite 4.0 Micro's.
        return False
    listed = config.get("attn_type_list") or text.get("attn_type_list") or ()
    blocks = text.get("layers_block_type") or ()
    return bool(
        names & STATE_SPACE_ARCHITECTURES
        or any(part in kind for part in _STATE_SPACE_TYPES)
        or any(text.get(key) for key in _STATE_SPACE_KEYS)
        or any(kind_of_layer != 1 for kind_of_layer in listed)
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
    # Qwen's configs have a window and a switch for it, which is off unless they say otherwise
    if kind.startswith("qwen") and not text.get("use_sliding_window"):
        return None
    # some checkpoints write 0 for no window, and vLLM reads it so
    return window if isinstance(window, int) and window != 0 else None


def _looks_ahead(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    prefix_lm = config.get("is_mm_prefix_lm")
    if prefix_lm is None:
        prefix_lm = config.get("model_type") in _LOOKS_AHEAD_TYPES
    return bool(
        prefix_lm
        or config.get("rswa_window") is not None
        or text.get("use_bidirectional_attention")
        or text.get("is_causal") is False
    )
