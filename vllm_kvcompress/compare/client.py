"""Client that requests one greedy completion from a vLLM server, with timings and usage."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_kvcompress.compare.tasks import Item, Message
from vllm_kvcompress.serving.exposition import Host, Refused, Unreachable, error_message
from vllm_kvcompress.settings.packed_dtype import K4V3
from vllm_kvcompress.settings.protection import NONE, PROTECT
from vllm_kvcompress.settings.request_keys import BUDGET, COMPRESS, LOOKAHEAD, PACKED_DTYPE

_K4V3_FACTOR = 4
"""Tokens in k4v3 that take the memory of a 16-bit token."""
_RETRY_DELAYS_S = (0.5, 2.0, 8.0)


class Interrupted(Exception):
    """The run is stopping, so no more requests are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of the comparison grid: a method with its budget, format, protection and look-ahead.

    Args:
        method: name of a preset. "off" is the full cache.
        budget: ratio of the prompt, or tokens per layer. None only with method "off".
        protect: value of ``kv_protect``. Empty leaves the server's default.
        lookahead: value of ``kv_lookahead``, in output tokens. None leaves the server's default.
        packed_dtype: value of ``kv_packed_dtype``. Empty leaves the server's default.
        server: another server whose uncompressed outputs this cell has: its address, or the KV
            cache dtype that it was started with; `method` is then a description of its cache.
            Empty for the compared server.
    """

    method: str
    budget: float | int | None = None
    protect: str = ""
    lookahead: int | None = None
    packed_dtype: str = ""
    server: str = ""

    @property
    def xargs(self) -> dict[str, Any]:
        """Return the ``vllm_xargs`` that request this cell."""
        if self.server:
            # A server without the plugin ignores it.
            return {COMPRESS: OFF}
        xargs = {
            COMPRESS: self.method,
            BUDGET: self.budget,
            PROTECT: self.protect or None,
            LOOKAHEAD: self.lookahead,
            PACKED_DTYPE: self.packed_dtype or None,
        }
        return {key: value for key, value in xargs.items() if value is not None}

    @property
    def memory(self) -> float:
        """Return the budget in tokens of a 16-bit cache with the same memory."""
        assert self.budget is not None
        return self.budget / (_K4V3_FACTOR if self.packed_dtype == K4V3 else 1)

    @property
    def name(self) -> str:
        """Return the method, its format, look-ahead and protected parts, without the budget."""
        packed_dtype = f" {self.packed_dtype}" if self.packed_dtype else ""
        lookahead = "" if self.lookahead is None else f" ahead {self.lookahead}"
        protected = f" + {self.protect}" if self.protect not in ("", NONE) else ""
        return f"{self.method}{packed_dtype}{lookahead}{protected}"

    def __str__(self) -> str:
        return self.name if self.budget is None else f"{self.name} {self.budget}"


OFF = "off"
FULL = Cell(method=OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion with its timings and usage.

    Args:
        text: output text, reasoning included.
        content: output text without reasoning, as a chat client sends it back.
        tokens: output tokens, the stop token included, as ``token_id:N``. Empty if the server does
            not report every token.
        logprobs: for each of `tokens`, log-probabilities of the most likely tokens at its position,
            by token.
        first_token_s: seconds from sending the request to the first output token.
        token_s: seconds per output token after the first. None for a single output token.
        prompt_tokens: prompt length as the server counts it.
        kept_tokens: prompt tokens kept per layer, mean over layers. None if the server does not
            report it, because the prompt was not compressed or ``--kv-usage`` is off.
        bytes_share: bytes of the prompt's KV blocks after compression, relative to an uncompressed
            cache in the same dtype. None as `kept_tokens`.
        replies: content of the outputs of the earlier turns.
    """

    text: str
    content: str
    tokens: Sequence[str]
    logprobs: Sequence[Mapping[str, float]]
    first_token_s: float
    token_s: float | None
    prompt_tokens: int
    kept_tokens: float | None
    bytes_share: float | None
    replies: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Client for greedy completions of one server.

    Args:
        model: name of the served model.
        top_logprobs: most likely tokens to request at each position.
        timeout_s: seconds without data from the server after which a request fails.
        dtype_bytes: bytes of a token in the server's KV cache, relative to the model's dtype. None
            if not known.
        should_stop: returns True once no more requests may be sent.
    """

    host: Host
    model: str
    top_logprobs: int = 20
    timeout_s: float = 600.0
    dtype_bytes: float | None = 1.0
    should_stop: Callable[[], bool] = lambda: False

    def complete(self, item: Item, cell: Cell) -> Completion:
        """Return the completion of a prompt in one cell, after a few retries if the server fails.

        Earlier turns of the chat are sent first, so that the server's prefix cache holds them. If
        the chat lacks the reply to a turn, that turn's output becomes the reply.

        Raises:
            Refused: The server rejects this request with a 4xx status. A retry cannot help.
            Unreachable: Every attempt failed.
            Interrupted: The run is stopping.
        """
        # A fresh salt per request: otherwise the second side would hit the first side's prefix.
        salt = uuid.uuid4().hex
        replies: list[str] = []
        for turn in range(len(item.turns)):
            chat = item.with_replies(replies)
            messages = chat.messages[: chat.turns[turn]]
            replies.append(self._complete(self._body(item, messages, cell, salt)).content)
        messages = item.with_replies(replies).messages
        return replace(self._complete(self._body(item, messages, cell, salt)), replies=replies)

    def _complete(self, body: Mapping[str, Any]) -> Completion:
        for delay_s in (*_RETRY_DELAYS_S, None):
            try:
                return self._complete_once(body)
            except Unreachable as e:
                is_final = isinstance(e, Refused) and e.status < 500 and e.status != 429
                if delay_s is None or is_final:
                    raise
            self._sleep(delay_s)
        raise AssertionError("the last attempt returns or raises")

    def count_tokens(self, text: str) -> int:
        """Return how many tokens the server's model makes of `text`, without special tokens.

        Raises:
            Refused: The server has no ``/tokenize`` endpoint.
        """
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        status, answer = self.host.post("/tokenize", body, self.timeout_s)
        try:
            return int(json.loads(answer)["count"])
        except (ValueError, KeyError, TypeError):
            raise Refused("/tokenize", status, error_message(answer)) from None

    def _body(
        self, item: Item, messages: Sequence[Message], cell: Cell, salt: str
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "seed": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": self.top_logprobs,
            "return_tokens_as_token_ids": True,
            "cache_salt": salt,
            "vllm_xargs": cell.xargs,
        }
        if item.tools:
            # Tool calls are parsed from the output text, so the server needs no tool parser.
            body |= {"tools": list(item.tools), "tool_choice": "none"}
        if messages[-1]["role"] == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body

    def _complete_once(self, body: Mapping[str, Any]) -> Completion:
        text = content = ""
        positions: list[Mapping[str, Any]] = []
        token_times: list[float] = []
        usage: Mapping[str, Any] = {}
        start = time.perf_counter()
        try:
            for event in self.host.stream("/v1/chat/completions", body, self.timeout_s):
                if self.should_stop():
                    raise Interrupted
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    new_positions = (choice.get("logprobs") or {}).get("content") or ()
                    new_content = delta.get("content") or ""
                    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
                    positions += new_positions
                    text += reasoning + new_content
                    content += new_content
                    if new_positions or reasoning or new_content:
                        token_times.append(time.perf_counter())
            tokens = [position["token"] for position in positions]
            logprobs = [
                {
                    candidate["token"]: float(candidate["logprob"])
                    for candidate in (*position.get("top_logprobs", ()), position)
                }
                for position in positions
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise Unreachable(
                f"{self.host.url} did not return a chat completion stream ({type(e).__name__}); is"
                " it a vLLM server?"
            ) from None
        if not token_times:
            # An output that ends at once still has its stop token.
            token_times.append(time.perf_counter())
        count = int(usage.get("completion_tokens") or len(tokens))
        kept = (usage.get("prompt_tokens_details") or {}).get("kv_compress") or {}
        kept_bytes, uncompressed = kept.get("kept_bytes"), kept.get("uncompressed_bytes")
        # A stream that omits tokens cannot be compared position by position.
        has_all_tokens = len(tokens) == count
        return Completion(
            text=text,
            content=content,
            tokens=tokens if has_all_tokens else (),
            logprobs=logprobs if has_all_tokens else (),
            first_token_s=token_times[0] - start,
            token_s=(token_times[-1] - token_times[0]) / (count - 1) if count > 1 else None,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            kept_tokens=kept.get("kept_tokens"),
            # A server of an earlier version does not report the uncompressed bytes.
            bytes_share=kept_bytes / uncompressed if kept_bytes and uncompressed else None,
        )

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.should_stop():
                raise Interrupted
            time.sleep(0.05)
