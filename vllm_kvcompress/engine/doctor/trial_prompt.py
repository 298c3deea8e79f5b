"""Builds the prompt for the trial engine, from a text or from a chat."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.renderers.params import ChatParams
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_kvcompress.doctor.probe_prompt import Limits
from vllm_kvcompress.engine.frontend.modalities import (
    modalities_of,
    placeholder_spans,
    refuse_untested,
)
from vllm_kvcompress.engine.frontend.protection.chat_parts import (
    REPORTED,
    ChatParts,
    PartError,
    parts_of,
)
from vllm_kvcompress.engine.frontend.protection.spans import protected_spans
from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.spans import Spans, clip_spans, complement, merge_spans
from vllm_kvcompress.settings.request_options import RequestOptions

TEMPLATE, OTHER = "template", "other"
"""Keys for tokens that belong to no reported role. `OTHER` replaces `TEMPLATE` if some of these
tokens may belong to messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPrompt:
    """The trial engine's prompt.

    Args:
        ids: its token ids.
        rendered: the prompt in the format of `LLMEngine.add_request`.
        protected: spans that the engine's settings protect.
        parts: for a chat, the spans of each role's messages, of its tools, of its pictures and of
            the template.
    """

    ids: list[int]
    rendered: Mapping[str, Any]
    protected: Spans = ()
    parts: Mapping[str, Spans] = field(default_factory=dict)


def prompt_of(
    engine: LLMEngine, config: VllmConfig, limits: Limits, spec: dict[str, Any]
) -> TrialPrompt:
    """Return the prompt that `spec` describes.

    Raises:
        ConfigError: the model has no tokenizer or chat template, or the prompt is too long or
            contains something that these settings do not compress.
    """
    if spec["chat"] is None:
        ids = _ids(engine, config, limits, spec)
        return TrialPrompt(ids=ids, rendered={"prompt_token_ids": ids})
    chat = spec["chat"]
    kwargs = {"add_generation_prompt": True, "tools": chat.get("tools"), "tokenize": False}
    renderer = engine.renderer
    tokenizing = replace(renderer.default_chat_tok_params, add_special_tokens=False)
    try:
        params = ChatParams(chat_template_kwargs=kwargs)
        _, (prompt,) = renderer.render_chat([chat["messages"]], params, tokenizing)
    except Exception as e:
        # A chat template may raise anything.
        raise ConfigError(f"the chat of --prompt-file cannot be rendered: {e}") from None
    ids = list(prompt["prompt_token_ids"])
    _refuse_too_long(ids, limits)
    parts = parts_of(prompt)
    settings = active_settings(config.additional_config)
    protected: Spans = ()
    if settings is not None:
        options = RequestOptions.parse(settings, limits.request_args)
        max_tokens = limits.output_tokens
        refuse_untested(config, options, modalities_of(prompt), len(ids), max_tokens)
        protected = protected_spans(config, settings, options, prompt, max_tokens)
    return TrialPrompt(
        ids=ids,
        rendered=prompt,
        protected=protected,
        parts={} if parts is None else role_spans(parts, prompt),
    )


def role_spans(parts: ChatParts, prompt: Mapping[str, Any]) -> dict[str, Spans]:
    """Return the token spans of each role, of the tools and of the rest; no token is in two.

    Images have their own entries. `OTHER` has the tokens of roles that are not in `ROLES` and of
    roles that could not be found, for example in a chat with images.

    Args:
        parts: parts of the chat.
        prompt: the chat as it goes to the engine.
    """
    num_tokens = len(prompt["prompt_token_ids"])
    rest_key = OTHER if parts.has_other_roles else TEMPLATE
    spans_by_role = placeholder_spans(prompt)
    taken = merge_spans(span for spans in spans_by_role.values() for span in spans)
    for role in REPORTED:
        try:
            spans = parts.spans(role)
        except PartError:
            rest_key = OTHER
            continue
        # A token at the border of two parts belongs to the first one.
        free = complement(taken, num_tokens)
        if new_spans := merge_spans(part for gap in free for part in clip_spans(spans, *gap)):
            spans_by_role[role] = new_spans
            taken = merge_spans([*taken, *new_spans])
    if remaining := complement(taken, num_tokens):
        spans_by_role[rest_key] = remaining
    return spans_by_role


def _refuse_too_long(ids: list[int], limits: Limits) -> None:
    """Check that the prompt and its output fit into the model's context.

    Raises:
        ConfigError: they do not fit.
    """
    max_tokens = limits.max_model_len - limits.output_tokens
    if len(ids) > max_tokens:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens, at most {max_tokens} fit; pass --tokens, or a"
            " larger --max-model-len after --"
        )


def _ids(engine: LLMEngine, config: VllmConfig, limits: Limits, spec: dict[str, Any]) -> list[int]:
    """Return the token ids of a text prompt.

    Raises:
        ConfigError: the model has no tokenizer for the text, or the text is too long.
    """
    tokenizer = engine.tokenizer
    text, length = spec["text"], spec["tokens"]
    if spec["exact"] and tokenizer is None:
        raise ConfigError("the model has no tokenizer for the prompt's text; remove --prompt-file")
    if spec["exact"] and tokenizer is not None:
        ids = list(tokenizer.encode(text))
        ids = ids if length is None else ids[:length]
        _refuse_too_long(ids, limits)
        return ids
    if length is None:
        max_tokens = limits.max_model_len - limits.output_tokens - limits.block_size
        length = limits.shortest(min(spec["at_least"], max_tokens))
    if tokenizer is None:
        vocab_size = config.model_config.get_vocab_size()
        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocab_size, (length,), generator=generator).tolist()
    question: list[int] = list(tokenizer.encode(spec["question"], add_special_tokens=False))
    filler: list[int] = list(tokenizer.encode(text[: 12 * length]))
    filler_length = int(length) - len(question)
    if filler_length < 1:
        return question[:length]
    return (filler * (filler_length // len(filler) + 1))[:filler_length] + question
