"""What a prompt may hold beside text where it may be compressed: what was tested, and nothing else.

vLLM serves models with pictures, videos and sound. Text prompts to any of them are compressed, and
so are pictures on the models of `TESTED`. A request that holds anything else is refused, unless
nothing of it is ever dropped.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from vllm_kvcompress.engine.frontend.protection import stays_whole
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.methods.spans import Spans, joined
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import settings_for

TESTED: Mapping[str, frozenset[str]] = {
    "Qwen2_5_VLForConditionalGeneration": frozenset({"image"}),
    "Qwen3VLForConditionalGeneration": frozenset({"image"}),
    "Qwen3VLMoeForConditionalGeneration": frozenset({"image"}),
}
"""By architecture, what prompts may hold beside text, by vLLM's names."""

_CURE = "send it with kv_compress=off, which --kv-allow-override off grants"


def refuse_untested(
    config: VllmConfig, settings: CompressionConfig | None, params: SamplingParams, prompt: Any
) -> None:
    """Refuse a prompt that may be compressed and holds what was not tested.

    Args:
        config: the engine's.
        settings: the engine's; None without compression.
        params: the request's, whose extra arguments `settings_for` has accepted.
        prompt: as it goes to the engine.

    Raises:
        OverrideError: it is refused.
    """
    own = None if settings is None else settings_for(settings, params.extra_args)
    held = held_beside_text(prompt)
    if own is None or not held:
        return
    ids = prompt.get("prompt_token_ids")
    if ids is not None and stays_whole(own, params, len(ids)):
        return
    architecture = config.model_config.architecture
    untested = sorted(held - TESTED.get(architecture, frozenset()))
    if untested:
        raise OverrideError(
            "invalid",
            f"prompts of {architecture} may hold text"
            f"{' and images' if architecture in TESTED else ''} alone where they are compressed,"
            f" and this one has {untested}, which was not tested; {_CURE}",
        )
    longest = config.model_config.max_model_len
    answer = longest if params.max_tokens is None else params.max_tokens
    tokens = min(longest, answer + (0 if ids is None else len(ids)))
    if own.max_whole is not None and (ids is None or tokens > own.max_whole):
        raise OverrideError(
            "invalid",
            "a prompt with images must stand whole until its end, and this one may be packed piece"
            f" by piece, since it and its answer have up to {tokens} tokens and --kv-max-whole is"
            f" {own.max_whole}; ask for a shorter answer, or {_CURE}",
        )


def held_beside_text(prompt: Any) -> frozenset[str]:
    """What a prompt holds beside text, by vLLM's names, such as "image" and "video"."""
    given = prompt if isinstance(prompt, Mapping) else {}
    held = given.get("mm_placeholders") or given.get("multi_modal_data") or {}
    return frozenset(held)


def places_of(prompt: Mapping[str, Any]) -> dict[str, Spans]:
    """The tokens that stand for pictures and their like in a prompt for the engine, by name."""
    placed: Mapping[str, Iterable[Any]] = prompt.get("mm_placeholders") or {}
    return {
        name: joined((each.offset, each.offset + each.length) for each in ranges)
        for name, ranges in placed.items()
    }


def warning_of(config: VllmConfig) -> str | None:
    """What the operator of a model must know whose pictures, videos or sound were not tested."""
    model = config.model_config
    if not model.is_multimodal_model or not model.supports_multimodal_inputs:
        return None
    known, limits = model.architecture in TESTED, model.multimodal_config
    if known and limits is not None and limits.get_limit_per_prompt("video") == 0:
        return None
    held = "videos" if known else "anything but text"
    return (
        f"prompts of {model.architecture} with {held} were not tested with --kv-compress: they are"
        " refused where they may be compressed, and served if they ask for kv_compress=off, which"
        " --kv-allow-override off grants"
    )
