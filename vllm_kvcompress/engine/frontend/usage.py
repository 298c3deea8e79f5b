"""VllmHook `usage`: report in the usage of compressed requests how many tokens were kept.

The scheduler attaches its report to vLLM's outputs. `process_outputs` takes it off and stores it in
the request's state, from where it goes to each `RequestOutput` as `kv_compress`. The handler of the
HTTP request collects these reports and writes them into the usage.
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

from vllm_kvcompress.engine.messages.outputs import (
    USAGE_KEY,
    CompressionUsage,
    same_compression,
    take_usage,
)

_KEPT = "_kvcompress_kept"
IGNORED_KEY = "kv_compress_off"
"""The key in a response's usage beside USAGE_KEY, on a server with compression off."""
HANDLERS = (
    (OpenAIServingChat, "create_chat_completion"),
    (OpenAIServingChatBatch, "create_batch_chat_completion"),
    (OpenAIServingCompletion, "create_completion"),
    (OpenAIServingResponses, "create_responses"),
    (ServingTokens, "serve_tokens"),
)


@dataclass(slots=True)
class Collected:
    """Reports of all prompts of one HTTP request, by vLLM's request id.

    Args:
        ignored: what a server with compression off ignored in the request.
    """

    _kept: dict[str, CompressionUsage] = field(default_factory=dict)
    ignored: dict[str, Any] | None = None

    def note(self, output: Any) -> None:
        """Collect the report of one `RequestOutput`, if it has one."""
        if (kept := getattr(output, USAGE_KEY, None)) is not None:
            self._kept[output.request_id] = kept

    def details(self) -> dict[str, Any]:
        """Return what the usage's prompt details get; {} for nothing."""
        found = {USAGE_KEY: self.total(), IGNORED_KEY: self.ignored}
        return {key: value for key, value in found.items() if value is not None}

    def total(self) -> dict[str, Any] | None:
        """Return the sum of the reports for the usage; None if every prompt stayed uncompressed.

        Tokens and bytes are summed over the prompts, as vLLM sums its counts. The outputs of one
        prompt (n > 1) count once.
        """
        kept = list(self._kept.values())
        if not kept:
            return None
        layers = [each["layer_tokens"] for each in kept if "layer_tokens" in each]
        total = {
            "method": kept[0]["method"],
            "budget": kept[0]["budget"],
            "packed_dtype": kept[0]["packed_dtype"],
            "prompt_tokens": sum(each["prompt_tokens"] for each in kept),
            "kept_tokens": round(sum(each["kept_tokens"] for each in kept), 1),
            "kept_bytes": sum(each["kept_bytes"] for each in kept),
            "uncompressed_bytes": sum(each["uncompressed_bytes"] for each in kept),
        }
        for key in ("lookahead", "protected_tokens"):
            if any(key in each for each in kept):
                total[key] = sum(each.get(key, 0) for each in kept)
        if len(layers) == len(kept):
            total["layer_tokens"] = [sum(tokens) for tokens in zip(*layers, strict=True)]
        return total


_collected: ContextVar[Collected | None] = ContextVar("kvcompress_collected", default=None)


def merge(kept: CompressionUsage, update: CompressionUsage) -> None:
    """Update the report of a request in place.

    Args:
        kept: the report; outputs that vLLM has returned share this object.
        update: the report of a new compression, with or without what its workers report, or what
            the workers report about the compression in `kept`.
    """
    if "method" in update:
        kept.clear()
    elif not same_compression(kept, update):
        return
    kept.update(update)


def add_to(usage: Any, name: str, details: dict[str, Any]) -> None:
    """Write the report into a usage object of vLLM.

    Args:
        usage: vLLM's usage, whose class allows further fields.
        name: name of its field for prompt details.
        details: see `Collected.details`.
    """
    if not details:
        return
    if getattr(usage, name) is None:
        setattr(usage, name, PromptTokenUsageInfo())
    for key, value in details.items():
        setattr(getattr(usage, name), key, value)


def with_usage(event: Any, collected: Collected) -> Any:
    """Return a server-sent event with the report added to its usage; other events unchanged.

    Args:
        event: an event of a stream: text in OpenAI's format, or anything else.
        collected: reports of the HTTP request.
    """
    if not isinstance(event, str) or not event.startswith("data: ") or '"usage":{' not in event:
        return event
    added = collected.details()
    chunk = json.loads(event.removeprefix("data: "))
    usage = chunk.get("usage")
    if not added or not isinstance(usage, dict) or "prompt_tokens" not in usage:
        return event
    usage["prompt_tokens_details"] = {**(usage.get("prompt_tokens_details") or {}), **added}
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


@functools.cache
def install() -> None:
    """Wrap the methods that process outputs and write responses; safe to call twice."""
    _read_reports()
    _collect_results()
    for serving, name in HANDLERS:
        setattr(serving, name, _adding_usage(getattr(serving, name)))
    install_for_responses()


@functools.cache
def install_for_responses() -> None:
    """Wrap the method that completes every response of the Responses API; safe to call twice."""
    serving: Any = OpenAIServingResponses
    serving.responses_full_generator = _adding_usage_to_responses(serving.responses_full_generator)


def _read_reports() -> None:
    """Wrap `process_outputs` and `make_request_output` to move reports to request outputs."""
    process_outputs = OutputProcessor.process_outputs
    make_request_output = RequestState.make_request_output

    @functools.wraps(process_outputs)
    def processing(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            if (update := take_usage(output)) is None:
                continue
            state = self.request_states.get(output.request_id)
            # The outputs of one prompt share one report.
            if state is not None:
                owner = vars(state.parent_req or state)
                merge(owner.setdefault(_KEPT, {}), update)
        return process_outputs(self, engine_core_outputs, *args, **kwargs)

    @functools.wraps(make_request_output)
    def making(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = make_request_output(self, *args, **kwargs)
        if output is not None and (kept := vars(self.parent_req or self).get(_KEPT)):
            setattr(output, USAGE_KEY, kept)
        return output

    OutputProcessor.process_outputs = processing
    RequestState.make_request_output = making


def _collect_results() -> None:
    """Wrap `AsyncLLM.generate` to collect the reports of each HTTP request."""
    generate = AsyncLLM.generate

    @functools.wraps(generate)
    def generating(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = generate(self, *args, **kwargs)
        collected = _collected.get()
        return outputs if collected is None else _collecting(outputs, collected)

    AsyncLLM.generate = generating


async def _collecting(outputs: Any, collected: Collected) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            collected.note(output)
            yield output


def _adding_usage(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a server handler so that the usage in its response or events includes the report."""

    @functools.wraps(handler)
    async def handling(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await reporting(Collected(), handler, self, *args, **kwargs)

    return handling


async def reporting(collected: Collected, handler: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a server handler, and return its response or events with `collected` in their usage."""
    _collected.set(collected)
    response = await handler(*args, **kwargs)
    if hasattr(response, "__aiter__"):
        return _events_with_usage(response, collected)
    usage = getattr(response, "usage", None)
    if hasattr(usage, "prompt_tokens_details"):
        add_to(usage, "prompt_tokens_details", collected.details())
    return response


async def _events_with_usage(events: Any, collected: Collected) -> AsyncGenerator[Any, None]:
    # A stream runs in another task than the handler that created it.
    _collected.set(collected)
    async with contextlib.aclosing(events):
        async for event in events:
            yield with_usage(event, collected)


def _adding_usage_to_responses(generator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that completes every response: returned, streamed or stored."""

    @functools.wraps(generator)
    async def completing(self: Any, *args: Any, **kwargs: Any) -> Any:
        response = await generator(self, *args, **kwargs)
        collected, usage = _collected.get(), getattr(response, "usage", None)
        if usage is not None and collected is not None:
            add_to(usage, "input_tokens_details", collected.details())
        return response

    return completing
