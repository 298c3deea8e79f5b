"""Checks of prompts with images, video or audio: only what was tested is compressed.

Text prompts of any multimodal model are compressed, and images on the models in `MODALITIES`. A
request with anything else is refused, unless its prompt stays uncompressed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine import EngineCoreRequest

from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.methods.spans import Spans, merge_spans
from vllm_kvcompress.refusals.tested import MODALITIES
from vllm_kvcompress.settings.request_options import RequestOptions

_CURE = "send it with kv_compress=off, which --kv-allow-override off allows"
_WORDS = {"image": "images", "video": "videos", "audio": "audio"}
# types of message parts that are text, by the names that vLLM's server accepts
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


def refuse_untested(
    config: VllmConfig,
    options: RequestOptions,
    modalities: frozenset[str],
    tokens: int,
    max_tokens: int | None,
) -> None:
    """Refuse a prompt that may be compressed and has modalities that were not tested.

    Args:
        config: configuration of the engine.
        options: options of the request.
        modalities: modalities in the prompt besides text, by vLLM's names, such as "image".
        tokens: prompt length, including the placeholder tokens of these modalities.
        max_tokens: maximum length of the output; None without a limit.

    Raises:
        OverrideError: the prompt is refused.
    """
    if not modalities or options.stays_uncompressed(tokens, max_tokens):
        return
    architecture = config.model_config.architecture
    untested = sorted(modalities - MODALITIES.get(architecture, frozenset()))
    if untested:
        raise OverrideError.invalid(
            f"prompts of {architecture} are compressed only with text"
            f"{' and images' if architecture in MODALITIES else ''}, and this one contains"
            f" {' and '.join(_WORDS.get(name, name) for name in untested)}, which is not tested;"
            f" {_CURE}",
        )
    longest = config.model_config.max_model_len
    if max_tokens is not None:
        longest = min(longest, tokens + max_tokens)
    max_whole = None if options.settings is None else options.settings.pieces.max_whole
    if max_whole is not None and longest > max_whole:
        fix = "lower max_tokens" if tokens < max_whole else "send a shorter prompt"
        raise OverrideError.invalid(
            "a prompt with images must be compressed after its prefill, and this one may be"
            f" compressed piece by piece, because it has {tokens} tokens, up to {longest} with"
            f" its output, and --kv-max-whole is {max_whole}; {fix}, or {_CURE}",
        )


def modalities_of(prompt: Any) -> frozenset[str]:
    """Return the modalities of a rendered prompt besides text, by vLLM's names."""
    return frozenset(name for name, spans in placeholder_spans(prompt).items() if spans)


def waits_for_rendering(prompt: Any) -> bool:
    """Return whether vLLM has yet to insert the placeholder tokens of images and the like.

    The prompt length is not known before.
    """
    if not isinstance(prompt, Mapping) or "mm_placeholders" in prompt:
        return False
    return bool(prompt.get("multi_modal_data") or prompt.get("multi_modal_uuids"))


def rendered(request: EngineCoreRequest) -> dict[str, Any]:
    """Return the prompt of a request in the form that a renderer returns."""
    positions, hashes = dict[str, list[Any]](), dict[str, list[str]]()
    data = dict[str, list[Any]]()
    for feature in request.mm_features or ():
        positions.setdefault(feature.modality, []).append(feature.mm_position)
        hashes.setdefault(feature.modality, []).append(feature.mm_hash or feature.identifier)
        data.setdefault(feature.modality, []).append(feature.data)
    return {
        "prompt_token_ids": request.prompt_token_ids,
        "mm_placeholders": positions,
        "mm_hashes": hashes,
        "mm_kwargs": data,
    }


def forget(renderer: BaseRenderer, prompt: Any) -> None:
    """Remove a refused prompt's items from vLLM's processor cache.

    vLLM assumes that the engine has received them, and would send only their hash with the next
    request for the same image. If such a request has been sent already, it gets the engine's error
    that asks for a retry, as after any other mismatch of the two caches.

    Items without data in this prompt were cached before it and stay, because other requests may
    refer to them by their id alone.
    """
    cache = renderer.mm_processor_cache
    if cache is None or not isinstance(prompt, Mapping):
        return
    hashes: Mapping[str, Iterable[str]] = prompt.get("mm_hashes") or {}
    data: Mapping[str, Iterable[Any]] = prompt.get("mm_kwargs") or {}
    for name, item_hashes in hashes.items():
        for mm_hash, item in zip(item_hashes, data.get(name) or (), strict=False):
            if item is not None:
                cache.invalidate(mm_hash)


def has_more_than_text(messages: Iterable[Any]) -> bool:
    """Return whether messages as a client sent them contain parts that are not text."""
    contents = (each.get("content") for each in messages if isinstance(each, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, Mapping) and not _is_text(part) for part in parts)


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type", "text" if "text" in part else None) in _TEXT_PARTS


def placeholder_spans(prompt: Any) -> dict[str, Spans]:
    """Return the spans of placeholder tokens in a prompt for the engine, by modality."""
    fields = prompt if isinstance(prompt, Mapping) else {}
    positions: Mapping[str, Iterable[Any] | None] = fields.get("mm_placeholders") or {}
    return {
        name: merge_spans((each.offset, each.offset + each.length) for each in ranges or ())
        for name, ranges in positions.items()
    }


def warning_of(config: VllmConfig) -> str | None:
    """Return a warning for operators of models with untested modalities; None if not needed."""
    model = config.model_config
    if not model.is_multimodal_model or not model.supports_multimodal_inputs:
        return None
    known, limits = model.architecture in MODALITIES, model.multimodal_config
    if known and limits is not None and limits.get_limit_per_prompt("video") == 0:
        return None
    untested = "videos" if known else "anything but text"
    return (
        f"prompts of {model.architecture} with {untested} were not tested with --kv-compress: the"
        " server refuses them if they may be compressed, and serves them with kv_compress=off,"
        " which --kv-allow-override off allows"
    )
