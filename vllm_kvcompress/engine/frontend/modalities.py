"""What a prompt may hold beside text where it may be compressed: what was tested, and nothing else.

vLLM serves models with pictures, videos and sound. Text prompts to any of them are compressed, and
so are pictures on the models of `TESTED`. A request that holds anything else is refused, unless
nothing of it is ever dropped.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

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
_WORDS = {"image": "images", "video": "videos", "audio": "sound"}
# the parts of a chat's message that are text, by the names that vLLM's server takes
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


def refuse_untested(
    config: VllmConfig,
    settings: CompressionConfig | None,
    params: SamplingParams,
    held: frozenset[str],
    tokens: int,
) -> None:
    """Refuse a prompt that may be compressed and holds what was not tested.

    Args:
        config: the engine's.
        settings: the engine's; None without compression.
        params: the request's, whose extra arguments `settings_for` has accepted.
        held: what the prompt holds beside text, by vLLM's names, such as "image" and "video".
        tokens: its length, with the tokens that stand for what it holds.

    Raises:
        OverrideError: it is refused.
    """
    own = None if settings is None else settings_for(settings, params.extra_args)
    if own is None or not held or stays_whole(own, params, tokens):
        return
    architecture = config.model_config.architecture
    untested = sorted(held - TESTED.get(architecture, frozenset()))
    if untested:
        raise OverrideError(
            "invalid",
            f"prompts of {architecture} may hold only text"
            f"{' and images' if architecture in TESTED else ''} where they are compressed, and"
            f" this one holds {' and '.join(_WORDS.get(name, name) for name in untested)}, which"
            f" was not tested; {_CURE}",
        )
    longest = config.model_config.max_model_len
    last = longest if params.max_tokens is None else min(longest, tokens + params.max_tokens)
    if own.max_whole is not None and last > own.max_whole:
        shorter = "ask for a shorter answer" if tokens < own.max_whole else "send a shorter prompt"
        raise OverrideError(
            "invalid",
            "a prompt with images must stand whole until its end, and this one may be packed piece"
            f" by piece, since it has {tokens} tokens, up to {last} with its answer, and"
            f" --kv-max-whole is {own.max_whole}; {shorter}, or {_CURE}",
        )


def held_beside_text(prompt: Any) -> frozenset[str]:
    """What a prompt holds beside text once it is rendered, by vLLM's names."""
    return frozenset(name for name, spans in places_of(prompt).items() if spans)


def waits_for_rendering(prompt: Any) -> bool:
    """Whether vLLM has yet to put into a prompt the tokens of what it holds beside text.

    Its length is not known before.
    """
    if not isinstance(prompt, Mapping) or "mm_placeholders" in prompt:
        return False
    return bool(prompt.get("multi_modal_data") or prompt.get("multi_modal_uuids"))


def rendered(request: EngineCoreRequest) -> dict[str, Any]:
    """The prompt of a request, as a renderer would have given it."""
    placed, hashes = dict[str, list[Any]](), dict[str, list[str]]()
    data = dict[str, list[Any]]()
    for feature in request.mm_features or ():
        placed.setdefault(feature.modality, []).append(feature.mm_position)
        hashes.setdefault(feature.modality, []).append(feature.mm_hash or feature.identifier)
        data.setdefault(feature.modality, []).append(feature.data)
    return {
        "prompt_token_ids": request.prompt_token_ids,
        "mm_placeholders": placed,
        "mm_hashes": hashes,
        "mm_kwargs": data,
    }


def forget(renderer: BaseRenderer, prompt: Any) -> None:
    """Forget what was processed for a prompt that the engine will not see.

    vLLM believes that the engine has it, and would send no more than its hash with the next request
    that shows the same picture. A request for which that has been done by now gets the engine's
    error that asks for another try, as after any other drift of the two caches.

    What the prompt has no data of was there before it and stays, since others may show it by their
    name for it alone.
    """
    cache = renderer.mm_processor_cache
    if cache is None or not isinstance(prompt, Mapping):
        return
    hashes: Mapping[str, Iterable[str]] = prompt.get("mm_hashes") or {}
    data: Mapping[str, Iterable[Any]] = prompt.get("mm_kwargs") or {}
    for name, of_one in hashes.items():
        for mm_hash, item in zip(of_one, data.get(name) or (), strict=False):
            if item is not None:
                cache.invalidate(mm_hash)


def shows_more_than_text(messages: Iterable[Any]) -> bool:
    """Whether the messages of a chat, as a client sent them, hold parts that are no text."""
    contents = (each.get("content") for each in messages if isinstance(each, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, Mapping) and not _is_text(part) for part in parts)


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type", "text" if "text" in part else None) in _TEXT_PARTS


def places_of(prompt: Any) -> dict[str, Spans]:
    """The tokens that stand for pictures and their like in a prompt for the engine, by name."""
    given = prompt if isinstance(prompt, Mapping) else {}
    placed: Mapping[str, Iterable[Any] | None] = given.get("mm_placeholders") or {}
    return {
        name: joined((each.offset, each.offset + each.length) for each in ranges or ())
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
