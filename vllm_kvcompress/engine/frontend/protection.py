"""What of one prompt is protected, as spans of its tokens, and whether it may be."""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig

from vllm_kvcompress.engine.frontend.chat_parts import PartError, parts_of, wanted
from vllm_kvcompress.engine.layers import layers_together
from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.methods.page_plan import PagePlan, mostly_protected
from vllm_kvcompress.methods.spans import Spans, count_before, joined, parse_spans
from vllm_kvcompress.planning.pieces import pieces_of
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import settings_for
from vllm_kvcompress.settings.protection import PROTECT, Protection, protection_of


def asked_of(settings: CompressionConfig, extra_args: Mapping[str, Any] | None) -> Protection:
    """What a request wants protected, by an engine's settings.

    Raises:
        OverrideError: it asks for something that does not exist, or that it may not have.
    """
    return protection_of(settings.protect, extra_args, free=bool(settings.allow_override))


def protected_spans(
    config: VllmConfig,
    settings: CompressionConfig | None,
    extra_args: Mapping[str, Any] | None,
    prompt: Any,
) -> Spans:
    """The protected spans of a prompt; none where nothing of it will be dropped.

    Args:
        config: the engine's.
        settings: the engine's; None without compression.
        extra_args: the request's, which `settings_for` has accepted.
        prompt: as it goes to the engine.

    Raises:
        OverrideError: what is to be protected cannot be found, or is more than may be.
    """
    own = None if settings is None else settings_for(settings, extra_args)
    if settings is None or own is None or not (asked := asked_of(settings, extra_args)):
        return ()
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if ids is None:
        if asked.spans or wanted.get() is not None:
            raise OverrideError(
                "invalid",
                f"{PROTECT} needs the tokens of the prompt, and this one comes without any; send a"
                f" text or token ids, or set {PROTECT} to none",
            )
        return ()
    tokens = len(ids)
    granted = _of_words(asked.granted, asked, prompt)
    others = [word for word in asked.words if word not in asked.granted]
    own_spans = _of_words(tuple(others), asked, prompt)
    try:
        spans = joined([*granted, *own_spans, *parse_spans(asked.spans, tokens)])
    except ConfigError as e:
        raise OverrideError("invalid", f"{PROTECT}: {e}") from None
    if spans:
        _refuse_too_much(config, settings, own, spans, granted, tokens)
    return spans


def _of_words(words: tuple[str, ...], asked: Protection, prompt: Any) -> list[tuple[int, int]]:
    """The spans of some parts of a chat.

    What is no chat has no parts: the operator's words do not concern it.
    """
    parts, found = parts_of(prompt), list[tuple[int, int]]()
    for word in words:
        if parts is None:
            if wanted.get() is None and word in asked.granted:
                continue
            problem = "this request is no chat that a template was applied to"
        else:
            try:
                found += parts.spans(word)
                continue
            except PartError as e:
                problem = str(e)
        raise OverrideError(
            "invalid",
            f"{PROTECT}: {word} cannot be found in the prompt, since {problem}; name its tokens,"
            f" such as {PROTECT}=0:200, or leave {word} out",
        )
    return found


def _refuse_too_much(
    config: VllmConfig,
    settings: CompressionConfig,
    own: CompressionConfig,
    spans: Spans,
    granted: list[tuple[int, int]],
    tokens: int,
) -> None:
    """Refuse what no budget may be raised for, or what never fits between the pieces of a prompt.

    The operator's words raise a budget as far as they must, and so does what a request adds, up to
    the largest budget that it might have named.
    """
    layers, size = layers_together(config), int(config.cache_config.block_size)
    protected = count_before(spans, tokens)
    pieces = pieces_of(own, layers, size, tokens, spans)
    if pieces is not None:
        if pieces.protects_too_much:
            held = pieces.without_protected // layers * size
            raise OverrideError(
                "out_of_bounds",
                f"{PROTECT}: {protected} tokens are protected of a prompt that is packed piece by"
                f" piece, and between its pieces every layer holds {held}; protect less, or ask the"
                " operator for a longer --kv-max-whole",
            )
        return
    least = own.page_plan(layers, tokens, size, joined(granted))
    plan = own.page_plan(layers, tokens, size, spans)
    if mostly_protected(spans, tokens) and not mostly_protected(joined(granted), tokens):
        most, needed = _most(settings, own, least, tokens), tokens
    elif plan is not None and plan.raised:
        most, needed = _most(settings, own, least, tokens), plan.budget
    else:
        return
    if needed > most:
        raise OverrideError(
            "out_of_bounds",
            f"{PROTECT}: {protected} tokens need a budget of {needed} tokens per layer, and this"
            f" request may have {most}; protect less, or ask for a larger kv_budget",
        )


def _most(
    settings: CompressionConfig, own: CompressionConfig, least: PagePlan | None, tokens: int
) -> int:
    """The largest budget in tokens that a request may have for what it protects itself."""
    granted = tokens if least is None else least.budget
    most = max(own.tokens_per_layer(tokens), granted)
    if not settings.allow_override:
        return most
    if not settings.budget_bounds:
        return tokens
    named = (settings.variant(own.compress, high) for _, high in settings.budget_bounds)
    return max(most, *(each.tokens_per_layer(tokens) for each in named))
