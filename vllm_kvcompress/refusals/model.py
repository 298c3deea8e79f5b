"""Models that cannot be compressed."""

from typing import TYPE_CHECKING

from vllm_kvcompress.refusals.rule import UNTESTED, WITHOUT, Rule
from vllm_kvcompress.refusals.tested import STATE_MODELS

if TYPE_CHECKING:
    from vllm_kvcompress.planning.model_traits import Traits

_EVERY_LAYER = "every layer must have full attention or a sliding window, and this model"
_NO_KEYS = "no layer has full attention with keys and values to choose from"

MODEL: "tuple[Rule[Traits], ...]" = (
    Rule(
        name="MLA",
        when=lambda m: m.latent,
        reason="MLA models keep one latent per token instead of keys and values",
    ),
    Rule(
        name="ALiBi",
        when=lambda m: m.alibi,
        reason="ALiBi needs every token at its true position, which compression changes",
    ),
    Rule(
        name="Pooling models",
        when=lambda m: m.runner != "generate" and m.runner,
        reason="only generative models are supported, this one is for {found}",
        because="they generate nothing",
    ),
    Rule(
        name="Diffusion models",
        when=lambda m: m.diffusion,
        reason="diffusion models replace tokens that they already generated",
    ),
    Rule(
        name="Encoder-decoder models",
        when=lambda m: m.encoder_decoder,
        reason="encoder-decoder models are not supported",
        because=UNTESTED,
    ),
    Rule(
        name="Other models with states",
        when=lambda m: m.state_space and not m.with_states,
        reason=f"of the models with state-space layers only {sorted(STATE_MODELS)} are tested",
        because=UNTESTED,
    ),
    Rule(
        name="Sliding windows or states in every layer",
        when=lambda m: m.state_space and not (m.groups.full and m.groups.stateful),
        reason="the model must have both full-attention and stateful layers, and this model lacks"
        " one of the two kinds",
        because=_NO_KEYS,
    ),
    Rule(
        when=lambda m: m.state_space and m.other_kinds,
        reason="only full-attention and stateful layers are supported together, and this model"
        " also has {found}",
    ),
    Rule(
        when=lambda m: not m.state_space and m.other_kinds and sorted(set(m.layer_types)),
        reason=f"{_EVERY_LAYER} has {{found}}",
    ),
    Rule(
        when=lambda m: m.uneven,
        reason="every layer must have the same KV heads, and this model's differ",
    ),
    Rule(
        name="Several groups of full-attention layers",
        when=lambda m: (
            m.groups.full_groups > 1
            and (m.groups, len(m.groups.full), "windowed" if m.groups.windowed else "stateful")
        ),
        reason="vLLM must put all full-attention layers in one group, and makes"
        " {found[0].full_groups} groups of this model's {found[1]}, because it has"
        " {found[0].num_uncompressed} {found[2]} layers",
        because="layers exchange pages within one cache group",
    ),
    Rule(
        when=lambda m: not (m.groups.windowed and m.groups.full) and m.window,
        reason="some layer must have full attention, and all of this model have a sliding window of"
        " {found}",
        fix=f"{WITHOUT}, or pass --disable-sliding-window for prompts shorter than the window",
    ),
    Rule(
        name="Chunked local attention",
        when=lambda m: m.chunk,
        reason=f"{_EVERY_LAYER} attends in chunks of {{found}}",
        because=UNTESTED,
    ),
    Rule(
        name="Prompts with bidirectional parts",
        when=lambda m: m.bidirectional,
        reason="every token must attend only to earlier tokens, and this model has bidirectional"
        " attention in images or prompts",
        because="tokens attend to later tokens",
    ),
    Rule(
        name="Soft caps",
        when=lambda m: m.soft_cap,
        reason="scores are computed before the soft cap of {found} on this model's logits",
        because=UNTESTED,
    ),
    Rule(
        name="KV caches that layers share",
        when=lambda m: m.shared,
        reason="layers must not share KV caches, and {found} of this model do",
        because=UNTESTED,
    ),
    Rule(
        when=lambda m: m.has_fp8_cache and m.state_space,
        reason="an fp8 KV cache is not tested with stateful layers",
        fix="set {it.plain_cache}",
    ),
    Rule(
        when=lambda m: m.has_plain_cache and m.stored not in ("auto", m.dtype) and m.source,
        reason="keys and values must be stored in the model's {it.dtype}",
        fix="set {it.plain_cache}, {found}",
    ),
    Rule(
        name="NVFP4 caches, and scales per token or head",
        when=lambda m: not (m.has_plain_cache or m.has_fp8_cache) and m.source,
        reason="the only supported quantised KV cache is fp8 with one scale per layer",
        fix="set {it.plain_cache}, {found}",
        because="not tested. Their checkpoints work with `--kv-cache-dtype bfloat16`.",
    ),
)
