"""Seam `usage`: say in a compressed answer's usage how much of its prompt was kept.

The scheduler's notes (`usage_notes`) are taken off vLLM's outputs as they come in, kept with the
request's own state, and put on each of its results as `kv_compress`. The handler of an HTTP request
collects them there, and writes them into the usage.
"""

import contextlib
import functools
import json
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from vllm_kvcompress.engine.messages.usage import KEY, Kept, take_kept

_INSTALLED = "_kvcompress_usage"
_KEPT = "_kvcompress_kept"


@dataclass(slots=True)
class Collected:
    """The tokens kept of the prompts of one HTTP request, by vLLM's id of each prompt."""

    _kept: dict[str, Kept] = field(default_factory=dict)

    def note(self, output: Any) -> None:
        """Collect what one result of vLLM's says."""
        if (kept := getattr(output, KEY, None)) is not None:
            self._kept[output.request_id] = kept

    def total(self) -> dict[str, Any] | None:
        """Add up what the usage must say; None when every prompt was left whole.

        Tokens are added up over the prompts, as vLLM adds up theirs. Choices of one prompt (n > 1)
        count once.
        """
        kept = list(self._kept.values())
        if not kept:
            return None
        layers = [each["layer_tokens"] for each in kept if "layer_tokens" in each]
        total = {
            "method": kept[0]["method"],
            "budget": kept[0]["budget"],
            "prompt_tokens": sum(each["prompt_tokens"] for each in kept),
            "kept_tokens": round(sum(each["kept_tokens"] for each in kept), 1),
        }
        for key in ("lookahead", "protected_tokens"):
            if any(key in each for each in kept):
                total[key] = sum(each.get(key, 0) for each in kept)
        if len(layers) == len(kept):
            total["layer_tokens"] = [sum(tokens) for tokens in zip(*layers, strict=True)]
        if all("by_role" in each for each in kept):
            total["by_role"] = _by_role([each["by_role"] for each in kept])
        return total


def _by_role(prompts: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of each role the tokens of all prompts, and the share of them that is kept."""
    total = dict[str, dict[str, Any]]()
    for role in dict.fromkeys(role for each in prompts for role in each):
        own = [each[role] for each in prompts if role in each]
        tokens = sum(each["tokens"] for each in own)
        kept = sum(each["tokens"] * each["kept"] for each in own)
        total[role] = {"tokens": tokens, "kept": round(kept / tokens, 4)}
    return total


_collected: ContextVar[Collected | None] = ContextVar("kvcompress_collected", default=None)


def merge(kept: Kept, news: Kept) -> None:
    """Update what is known of a request's compression.

    Args:
        kept: what is known; results that were handed out hold the same object.
        news: a new compression, with or without its layers, or the layers of one that is known.
    """
    if "kept_tokens" in news:
        kept.clear()
    elif kept.get("prompt_tokens") != news["prompt_tokens"]:
        return
    kept.update(news)


def add_to(usage: Any, details: str, total: dict[str, Any]) -> None:
    """Write into a usage of vLLM's how much was kept.

    Args:
        usage: vLLM's usage, whose class takes further fields.
        details: its field for details of the prompt.
        total: see `Collected.total`.
    """
    if getattr(usage, details) is None:
        setattr(usage, details, PromptTokenUsageInfo())
    setattr(getattr(usage, details), KEY, total)


def with_usage(event: Any, collected: Collected) -> Any:
    """Add to the usage in a server-sent event how much was kept; return other events as they are.

    Args:
        event: an event of a stream: text in OpenAI's form, or anything else.
    """
    if not isinstance(event, str) or not event.startswith("data: ") or '"usage":{' not in event:
        return event
    total = collected.total()
    chunk = json.loads(event.removeprefix("data: "))
    usage = chunk.get("usage")
    if total is None or not isinstance(usage, dict) or "prompt_tokens" not in usage:
        return event
    details = usage.get("prompt_tokens_details") or {}
    usage["prompt_tokens_details"] = {**details, KEY: total}
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def install() -> None:
    """Wrap where outputs come in and where answers are written; safe to call twice."""
    if getattr(OutputProcessor, _INSTALLED, False):
        return
    _take_off_news()
    _collect_results()
    for serving, name in (
        (OpenAIServingChat, "create_chat_completion"),
        (OpenAIServingChatBatch, "create_batch_chat_completion"),
        (OpenAIServingCompletion, "create_completion"),
        (OpenAIServingResponses, "create_responses"),
        (ServingTokens, "serve_tokens"),
    ):
        setattr(serving, name, _adding_usage(getattr(serving, name)))
    OpenAIServingResponses.responses_full_generator = _adding_usage_to_responses(
        OpenAIServingResponses.responses_full_generator
    )
    setattr(OutputProcessor, _INSTALLED, True)


def _take_off_news() -> None:
    process_outputs = OutputProcessor.process_outputs
    make_request_output = RequestState.make_request_output

    @functools.wraps(process_outputs)
    def processing(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if (news := take_kept(output)) is None:
                continue
            state = self.request_states.get(output.request_id)
            # The choices of one prompt share what is known of it.
            if state is not None:
                about = vars(state.parent_req or state)
                merge(about.setdefault(_KEPT, {}), news)
        return process_outputs(self, engine_core_outputs, *args, **kwargs)

    @functools.wraps(make_request_output)
    def making(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = make_request_output(self, *args, **kwargs)
        if output is not None and (kept := vars(self.parent_req or self).get(_KEPT)):
            setattr(output, KEY, kept)
        return output

    OutputProcessor.process_outputs = processing
    RequestState.make_request_output = making


def _collect_results() -> None:
    generate = AsyncLLM.generate

    @functools.wraps(generate)
    def generating(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = generate(self, *args, **kwargs)
        collected = _collected.get()
        return outputs if collected is None else _noting(outputs, collected)

    AsyncLLM.generate = generating


async def _noting(outputs: Any, collected: Collected) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            collected.note(output)
            yield output


def _adding_usage(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a handler of the server, so that the usage in its answer or events says it."""

    @functools.wraps(answer)
    async def answering(self: Any, *args: Any, **kwargs: Any) -> Any:
        collected = Collected()
        _collected.set(collected)
        response = await answer(self, *args, **kwargs)
        if hasattr(response, "__aiter__"):
            return _events_with_usage(response, collected)
        usage = getattr(response, "usage", None)
        if hasattr(usage, "prompt_tokens_details") and (total := collected.total()):
            add_to(usage, "prompt_tokens_details", total)
        return response

    return answering


async def _events_with_usage(events: Any, collected: Collected) -> AsyncGenerator[Any, None]:
    # A stream runs in another task than the handler that made it.
    _collected.set(collected)
    async with contextlib.aclosing(events):
        async for event in events:
            yield with_usage(event, collected)


def _adding_usage_to_responses(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the one place where responses end, whether they are returned, streamed or stored."""

    @functools.wraps(answer)
    async def answering(self: Any, *args: Any, **kwargs: Any) -> Any:
        response = await answer(self, *args, **kwargs)
        collected, usage = _collected.get(), getattr(response, "usage", None)
        if usage is not None and collected is not None and (total := collected.total()):
            add_to(usage, "input_tokens_details", total)
        return response

    return answering
