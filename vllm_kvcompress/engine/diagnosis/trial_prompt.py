"""The one prompt that a trial engine is asked: a text's tokens, or a chat's, with its parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.renderers.params import ChatParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_kvcompress.doctor.probe_prompt import Limits
from vllm_kvcompress.engine.frontend.by_role import every_role
from vllm_kvcompress.engine.frontend.chat_parts import parts_of
from vllm_kvcompress.engine.frontend.modalities import held_beside_text, refuse_untested
from vllm_kvcompress.engine.frontend.protection import protected_spans
from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPrompt:
    """One prompt.

    Args:
        ids: its tokens.
        rendered: as the engine takes it.
        protected: what of it is protected by the engine's settings.
        parts: of a chat, the tokens of its pictures, of each role's messages, of its tools and of
            the template.
    """

    ids: list[int]
    rendered: Mapping[str, Any]
    protected: Spans = ()
    parts: Mapping[str, Spans] = field(default_factory=dict)


def prompt_of(
    engine: LLMEngine, config: VllmConfig, limits: Limits, spec: dict[str, Any]
) -> TrialPrompt:
    """The prompt that `spec` tells of.

    Raises:
        ConfigError: the model has no tokenizer or template for it, it is too long, or it holds
            what these settings do not compress.
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
        # Anything may go wrong in a template.
        raise ConfigError(f"the chat of --prompt-file cannot be rendered: {e}") from None
    ids = list(prompt["prompt_token_ids"])
    _refuse_too_long(ids, limits)
    parts = parts_of(prompt)
    settings = active_settings(config.additional_config)
    params = SamplingParams(max_tokens=limits.answer, extra_args=dict(limits.asks) or None)
    refuse_untested(config, settings, params, held_beside_text(prompt), len(ids))
    protected = protected_spans(config, settings, params, prompt)
    return TrialPrompt(
        ids=ids,
        rendered=prompt,
        protected=protected,
        parts={} if parts is None else every_role(parts, prompt),
    )


def _refuse_too_long(ids: list[int], limits: Limits) -> None:
    if len(ids) + limits.answer > limits.longest:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens, at most {limits.longest - limits.answer} fit;"
            " pass --tokens, or a larger --max-model-len after --"
        )


def _ids(engine: LLMEngine, config: VllmConfig, limits: Limits, spec: dict[str, Any]) -> list[int]:
    """A text's token ids.

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
        at_most = limits.longest - limits.answer - limits.block_size
        length = limits.shortest(min(spec["at_least"], at_most))
    if tokenizer is None:
        high = config.model_config.get_vocab_size()
        picked = torch.randint(high, (length,), generator=torch.Generator().manual_seed(0))
        return [int(token) for token in picked]
    question: list[int] = list(tokenizer.encode(spec["question"], add_special_tokens=False))
    filler: list[int] = list(tokenizer.encode(text[: 12 * length]))
    room = int(length) - len(question)
    if room < 1:
        return question[:length]
    return (filler * (room // len(filler) + 1))[:room] + question
