"""One greedy answer of a server, token by token, with what it cost and what was kept."""

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kvcompress.compare.tasks import Item, Message
from vllm_kvcompress.serving.exposition import Host, Refused, Unreachable
from vllm_kvcompress.settings.protection import NONE, PROTECT
from vllm_kvcompress.settings.request_keys import BUDGET, BY_ROLE, COMPRESS, LOOKAHEAD

_WAITS_S = (0.5, 2.0, 8.0)


class Interrupted(Exception):
    """The run is to end: nothing more is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A method at a budget.

    Args:
        method: a preset's name; "off" is the full cache.
        budget: a ratio or tokens per layer, as it is asked for; None with "off" alone.
        protect: what of the prompt is kept in any case, as it is asked for; empty for what the
            server protects by itself.
        lookahead: tokens of the answer that judge the prompt, as it is asked for; None for as many
            as the server takes by itself.
    """

    method: str
    budget: float | int | None = None
    protect: str = ""
    lookahead: int | None = None

    @property
    def xargs(self) -> dict[str, Any]:
        """The ``vllm_xargs`` that ask for it."""
        asked: dict[str, Any] = {COMPRESS: self.method}
        if self.budget is not None:
            asked[BUDGET] = self.budget
        if self.protect:
            asked[PROTECT] = self.protect
        if self.lookahead is not None:
            asked[LOOKAHEAD] = self.lookahead
        return asked

    @property
    def name(self) -> str:
        """The method, its look-ahead, and what it protects."""
        ahead = "" if self.lookahead is None else f" ahead {self.lookahead}"
        protected = f" + {self.protect}" if self.protect not in ("", NONE) else ""
        return f"{self.method}{ahead}{protected}"

    def __str__(self) -> str:
        return self.name if self.budget is None else f"{self.name} {self.budget}"


FULL = Cell(method="off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token of an answer.

    Args:
        name: ``token_id:N``, as vLLM writes it when it is asked to.
        likely: log-probabilities of the most likely tokens in its place, by name.
    """

    name: str
    likely: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server answered.

    Args:
        tokens: with the one that ended it; empty where the server does not tell them.
        first_token_s: seconds from sending the request to its first token.
        token_s: seconds per token behind the first; None for an answer of one.
        prompt_tokens: as the server counts them.
        kept_tokens: tokens kept of the prompt, mean of the layers; None where the server says
            nothing of it, which it does for a prompt that was left whole and without --kv-usage.
        by_role: of each role its tokens and the share that is kept; empty where the server does not
            say.
    """

    text: str
    tokens: Sequence[Token]
    first_token_s: float
    token_s: float | None
    prompt_tokens: int
    kept_tokens: float | None
    by_role: Mapping[str, tuple[int, float]]

    @property
    def names(self) -> list[str]:
        return [token.name for token in self.tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A server that is asked for greedy answers.

    Args:
        model: the name it serves.
        top: how many likely tokens it is asked for in each place.
        timeout_s: seconds without a word from it that end a request.
        by_role: whether it is asked what it keeps of each role.
        stopping: whether nothing more is to be asked.
    """

    host: Host
    model: str
    top: int = 20
    timeout_s: float = 600.0
    by_role: bool = False
    stopping: Callable[[], bool] = lambda: False

    def ask(self, item: Item, cell: Cell) -> Answer:
        """Ask once, and again a few times where the server fails or cannot be reached.

        Earlier turns of the same chat are asked before, so that the server has them in its cache.

        Raises:
            Refused: the server does not take this request (a 4xx); asking again is no use.
            Unreachable: it did not answer, however often it was asked.
            Interrupted: the run is to end.
        """
        # Both sides compute every prompt in full: else the second would find the first's.
        salt = uuid.uuid4().hex
        for messages in item.turns:
            self._ask(self._body(item, item.messages[:messages], cell, salt))
        return self._ask(self._body(item, item.messages, cell, salt))

    def _ask(self, body: Mapping[str, Any]) -> Answer:
        for wait_s in (*_WAITS_S, None):
            try:
                return self._once(body)
            except Unreachable as e:
                if wait_s is None or (isinstance(e, Refused) and not _passes(e.status)):
                    raise
            self._wait(wait_s)
        raise AssertionError("the last try returns or raises")

    def count_tokens(self, text: str) -> int:
        """Tokens that the server's model makes of a text, nothing added.

        Raises:
            Refused: there is no ``/tokenize`` to ask.
        """
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        status, answer = self.host.post("/tokenize", body, self.timeout_s)
        try:
            return int(json.loads(answer)["count"])
        except (ValueError, KeyError, TypeError):
            raise Refused("/tokenize", status, answer[:200]) from None

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
            "top_logprobs": self.top,
            "return_tokens_as_token_ids": True,
            "cache_salt": salt,
            # of the full cache as well, so that both sides do the same before their first token
            "vllm_xargs": cell.xargs | ({BY_ROLE: True} if self.by_role else {}),
        }
        if item.tools:
            # Calls are read out of what the model writes: so no server needs a parser for them.
            body |= {"tools": list(item.tools), "tool_choice": "none"}
        if messages[-1]["role"] == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body

    def _once(self, body: Mapping[str, Any]) -> Answer:
        tokens: list[Token] = []
        pieces: list[str] = []
        times: list[float] = []
        usage: Mapping[str, Any] = {}
        start = time.perf_counter()
        try:
            for event in self.host.stream("/v1/chat/completions", body, self.timeout_s):
                if self.stopping():
                    raise Interrupted
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    came = _tokens(choice)
                    text = _text(choice.get("delta") or {})
                    tokens += came
                    pieces.append(text)
                    if came or text:
                        times.append(time.perf_counter())
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise Unreachable(
                f"{self.host.url} answered what is no stream of a chat ({type(e).__name__}); is it"
                " a vLLM server?"
            ) from None
        if not times:
            # An answer that ends at once still has its end of turn.
            times.append(time.perf_counter())
        count = int(usage.get("completion_tokens") or len(tokens))
        kept = (usage.get("prompt_tokens_details") or {}).get("kv_compress") or {}
        return Answer(
            text="".join(pieces),
            # Of a stream that leaves some out nothing could be said place by place.
            tokens=tokens if len(tokens) == count else (),
            first_token_s=times[0] - start,
            token_s=(times[-1] - times[0]) / (count - 1) if count > 1 else None,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            kept_tokens=kept.get("kept_tokens"),
            by_role={
                role: (int(own["tokens"]), float(own["kept"]))
                for role, own in (kept.get("by_role") or {}).items()
            },
        )

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.stopping():
                raise Interrupted
            time.sleep(0.05)


def _passes(status: int) -> bool:
    """Whether a server that answers so may answer otherwise in a moment."""
    return status >= 500 or status == 429


def _tokens(choice: Mapping[str, Any]) -> list[Token]:
    found = (choice.get("logprobs") or {}).get("content") or ()
    return [
        Token(
            name=place["token"],
            likely={
                likely["token"]: float(likely["logprob"])
                for likely in (*place.get("top_logprobs", ()), place)
            },
        )
        for place in found
    ]


def _text(delta: Mapping[str, Any]) -> str:
    """What a piece of an answer says, thoughts included: the cache is behind both."""
    thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
    return thought + (delta.get("content") or "")
