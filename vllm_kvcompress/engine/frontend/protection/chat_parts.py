"""VllmHook `chat_parts`: find the tokens of a chat's system prompt, tools and question.

Only the chat template knows where they are, so the chat is rendered again with a placeholder in a
message, or with one more tool. The text outside the common prefix and suffix is the part. Rendering
takes a fraction of the time of tokenizing, and the chat is tokenized only once, with offsets.
"""

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm.renderers.base import BaseRenderer

from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.methods.spans import Spans, merge_spans
from vllm_kvcompress.settings.protection import QUESTION, SYSTEM, TOOLS, WORDS

_KEY = "kvcompress_chat"
_NO_PARAMETERS = {"type": "object", "properties": {}}
_MAX_PROTECTED_MESSAGES, _MAX_ROLE_MESSAGES = 32, 128
"""Maximum messages of a protected part, and of a role in a report. The chat is rendered once more
for each message."""
_QUESTION_END = 256
"""Tokens at each end of a long question that are protected."""

_PLACEHOLDER = "kvcompress0stands0here"
"""Text, or name of a tool, that no chat contains."""

Span = tuple[int, int]
Text = str | list[int]
"""Rendered chat: text, or token ids if the renderer has its own tokenizer."""

ROLES: Mapping[str, tuple[str, ...]] = {
    SYSTEM: ("system", "developer"),
    "user": ("user",),
    "assistant": ("assistant",),
    "tool": ("tool",),
}
"""Message roles that each role in a report includes."""
REPORTED = (TOOLS, *ROLES)

needed_parts: ContextVar[tuple[str, ...] | None] = ContextVar("kvcompress_parts", default=None)
"""Parts that the current request needs from its chat; None if it is not a chat."""


class PartError(ValueError):
    """A part of a chat cannot be found. The message is a clause that says why."""


class _Variant(NamedTuple):
    """A chat with a placeholder in one message, or with one more tool."""

    messages: list[Any]
    params: Any


@dataclass(slots=True)
class ChatParts:
    """Finds the token spans of a chat's parts, each on first use.

    Args:
        renderer: vLLM's renderer.
        messages: messages of the chat as the client sent them.
        params: vLLM's template parameters.
        tokenizing: vLLM's tokenizer parameters.
        prompt: the rendered prompt as it goes to the engine.

    Attributes:
        has_other_roles: whether the chat has a message of a role that is not in `ROLES`.
    """

    renderer: Any
    messages: list[Any]
    params: Any
    tokenizing: Any
    prompt: Mapping[str, Any]
    has_other_roles: bool = field(init=False)
    _found: dict[str, Spans | PartError] = field(default_factory=dict)
    _offsets: "_TokenOffsets | None" = None

    def __post_init__(self) -> None:
        known = {role for roles in ROLES.values() for role in roles}
        named = {str(m.get("role")) for m in self.messages if isinstance(m, Mapping)}
        self.has_other_roles = not named <= known

    def spans(self, word: str) -> Spans:
        """Return the token spans of a part or role; () if the chat has none.

        Args:
            word: `system`, `tools` or `question`, or a key of `ROLES`.

        Raises:
            PartError: the spans cannot be found.
        """
        if word not in self._found:
            if self.renderer is None:
                raise PartError("this endpoint does not search for it")
            with self._storing(word) as found:
                for variant in self._variants(word):
                    with _rendering():
                        variant_prompt = self.renderer.render_messages(*variant)[1]
                    found.append(self._span(word, variant, variant_prompt))
        spans = self._found[word]
        if isinstance(spans, PartError):
            raise spans
        return spans

    async def find(self, words: Iterable[str]) -> None:
        """Find some parts now, while other requests run, and drop what only the search needs.

        Otherwise that would stay in memory with this object, until the request ends.
        """
        for word in dict.fromkeys(words):
            with self._storing(word) as found:
                for variant in self._variants(word):
                    with _rendering():
                        variant_prompt = (await self.renderer.render_messages_async(*variant))[1]
                    found.append(self._span(word, variant, variant_prompt))
        self.renderer = self.params = self.tokenizing = self._offsets = None
        self.messages, self.prompt = [], {}

    @contextmanager
    def _storing(self, word: str) -> Iterator[list[Span | None]]:
        """Store the spans that the caller finds, or the reason why it finds none."""
        found: list[Span | None] = []
        try:
            yield found
        except PartError as e:
            self._found[word] = e
            return
        spans = [span for span in found if span is not None]
        if word == TOOLS and spans:
            # The first variant has one more tool in front, the second one at the end.
            start, stop = spans[0][0], spans[-1][1]
            spans = [(start, stop)] if start < stop else []
        if word == QUESTION:
            spans = [end for span in spans for end in _ends(*span)]
        self._found[word] = merge_spans(spans)

    # -- variants to render -------------------------------------------------------------------

    def _variants(self, word: str) -> Iterator[_Variant]:
        """Yield the variants that locate a part.

        Raises:
            PartError: the part cannot be found in this chat.
        """
        if word == TOOLS:
            yield from self._with_one_more_tool()
            return
        indices = self._messages_of(word)
        limit = _MAX_PROTECTED_MESSAGES if word in WORDS else _MAX_ROLE_MESSAGES
        if len(indices) > limit:
            raise PartError(f"it has more than {limit} messages")
        for index in indices:
            before, after = self.messages[:index], self.messages[index + 1 :]
            yield _Variant([*before, self._placeholder(index), *after], self.params)

    def _with_one_more_tool(self) -> Iterator[_Variant]:
        """Yield the chat with one more tool in front, then with one more at the end."""
        if any(isinstance(message, Mapping) and message.get("tools") for message in self.messages):
            raise PartError("some of them are in its messages")
        kwargs = self.params.chat_template_kwargs
        if not (tools := kwargs.get("tools")):
            return
        function = {
            "name": _PLACEHOLDER,
            "description": _PLACEHOLDER,
            "parameters": _NO_PARAMETERS,
        }
        added = [{"type": "function", "function": function}]
        for more_tools in ([*added, *tools], [*tools, *added]):
            more_kwargs = {**kwargs, "tools": more_tools}
            yield _Variant(self.messages, replace(self.params, chat_template_kwargs=more_kwargs))

    def _messages_of(self, word: str) -> list[int]:
        """Return the indices of a part's or role's messages that have text."""
        roles = ("user",) if word == QUESTION else ROLES[word]
        found = [
            index
            for index, message in enumerate(self.messages)
            if isinstance(message, Mapping) and message.get("role") in roles
        ]
        found = found[-1:] if word == QUESTION else found
        if any(_has_more_than_text(self.messages[index]) for index in found):
            raise PartError("its messages contain more than text")
        return [index for index in found if _text_of(self.messages[index]).strip()]

    def _placeholder(self, index: int) -> dict[str, Any]:
        """Return a message with a placeholder that begins and ends unlike the message's text."""
        message = self.messages[index]
        text = _text_of(message).strip()
        first, last = ("Q" if text[end] != "Q" else "Z" for end in (0, -1))
        return {**message, "content": f"{first}{_PLACEHOLDER}{last}"}

    # -- spans --------------------------------------------------------------------------------

    def _span(self, word: str, variant: _Variant, variant_prompt: Mapping[str, Any]) -> Span | None:
        """Return the span that a variant locates; None if the template omits the part."""
        if self.prompt.get("type") != "token" or any(map(_has_more_than_text, self.messages)):
            raise PartError("a message of the chat contains more than text")
        if self.tokenizing.truncate_prompt_tokens is not None:
            raise PartError("truncate_prompt_tokens may have removed it")
        # Compare token ids if the renderer has its own tokenizer: text is then only decoded ids.
        kind = "prompt" if "prompt" in variant_prompt else "prompt_token_ids"
        original: Text = self.prompt[kind]
        rendered: Text = variant_prompt[kind]
        if word != TOOLS:
            found = _replaced_span(original, rendered)
        else:
            names = _names_of(variant)
            front = names[0] == _PLACEHOLDER
            own_names = names[1:] if front else names[:-1]
            found = _tools_span(original, rendered, own_names, front=front)
        if found is None or isinstance(original, list):
            return found
        if self._offsets is None:
            self._offsets = _TokenOffsets.of(self.prompt, self.renderer, self.tokenizing)
        return self._offsets.tokens(*found)


@contextmanager
def _rendering() -> Iterator[None]:
    """Turn any exception while rendering a variant into a PartError."""
    try:
        yield
    except Exception:
        # A chat template can raise anything, with any text.
        raise PartError("the chat template cannot render a variant of the chat") from None


def _names_of(variant: _Variant) -> list[str]:
    """Return the names of a variant's tools."""
    tools = variant.params.chat_template_kwargs["tools"]
    return [str(tool.get("function", tool).get("name", "")) for tool in tools]


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part if isinstance(part, str) else part.get("text") for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def _has_more_than_text(message: Any) -> bool:
    """Return whether a message has a part that is not known to be text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if content is None or isinstance(content, str):
        return False
    return not isinstance(content, list) or not all(
        isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("text"), str))
        for part in content
    )


def _ends(start: int, stop: int) -> Iterator[Span]:
    """Yield a span, or its first and last tokens if it is longer than both together."""
    if stop - start <= 2 * _QUESTION_END:
        yield start, stop
    else:
        yield start, start + _QUESTION_END
        yield stop - _QUESTION_END, stop


# -- comparing two renderings of a chat ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TokenOffsets:
    """Character offsets of the tokens of a prompt, both ascending.

    Args:
        starts: offset of the first character of each token.
        stops: offset after the last character of each token.
        first: index of the first token with characters; special tokens before it have none.
    """

    starts: list[int]
    stops: list[int]
    first: int

    @classmethod
    def of(cls, prompt: Mapping[str, Any], renderer: Any, tokenizing: Any) -> "_TokenOffsets":
        """Return the offsets of a rendered prompt, tokenizing it again if it has none.

        Args:
            prompt: rendered prompt.
            renderer: vLLM's renderer.
            tokenizing: vLLM's tokenizer parameters.

        Raises:
            PartError: the tokenizer does not report offsets.
        """
        offsets = prompt.get("prompt_token_offsets")
        if not offsets:
            asking = replace(tokenizing, return_token_offsets=True)
            tokenized = renderer.tokenize_prompt({"prompt": prompt["prompt"]}, asking)
            offsets = tokenized.get("prompt_token_offsets")
            if not offsets or tokenized["prompt_token_ids"] != prompt["prompt_token_ids"]:
                raise PartError("its tokenizer does not report character offsets")
        places = [(int(start), int(stop)) for start, stop in offsets]
        first = next((index for index, place in enumerate(places) if place != (0, 0)), 0)
        with_text = [place for place in places[first:] if place != (0, 0)]
        return cls([start for start, _ in with_text], [stop for _, stop in with_text], first)

    def tokens(self, start: int, stop: int) -> Span:
        """Return the tokens that overlap the characters from `start` to `stop`."""
        first, end = bisect_right(self.stops, start), bisect_left(self.starts, stop)
        return self.first + first, self.first + max(first, end)


def _common_length(a: Text, b: Text, *, limit: int, backwards: bool = False) -> int:
    """Return the length of the common prefix, or suffix, of two renderings, at most `limit`."""
    low, high = 0, min(len(a), len(b), limit)
    while low < high:
        count = (low + high + 1) // 2
        same = a[len(a) - count :] == b[len(b) - count :] if backwards else a[:count] == b[:count]
        low, high = (count, high) if same else (low, count - 1)
    return low


def _replaced_span(original: Text, variant: Text) -> Span | None:
    """Return the span that a placeholder replaced in a variant; None if the template omits it.

    Args:
        original: rendering of the chat.
        variant: rendering of the chat with a placeholder in one message.

    Raises:
        PartError: the template changes other text too.
    """
    if original == variant:
        return None
    start = _common_length(original, variant, limit=len(original))
    suffix_limit = min(len(original), len(variant)) - start
    suffix = _common_length(original, variant, limit=suffix_limit, backwards=True)
    stop, inserted = len(original) - suffix, variant[start : len(variant) - suffix]
    has_placeholder = isinstance(inserted, list) or _PLACEHOLDER in inserted
    if start >= stop or not has_placeholder or len(inserted) > len(_PLACEHOLDER) + 2:
        raise PartError("the chat template changes other text with it")
    return start, stop


def _tools_span(original: Text, variant: Text, names: Sequence[str], *, front: bool) -> Span | None:
    """Return the span after a tool added in front, or before one added at the end.

    The first span begins where the tools begin, and the second ends where they end. None if the
    template omits tools.

    Args:
        original: rendering of the chat.
        variant: rendering of the chat with one more tool.
        names: names of the chat's own tools, which the span must contain.
        front: whether the tool was added in front.

    Raises:
        PartError: the tools are in several places, or in another order.
    """
    if original == variant:
        return None
    prefix = _common_length(original, variant, limit=len(original))
    suffix = _common_length(original, variant, limit=len(original), backwards=True)
    # Tokens can merge where the tool is inserted, so token ids get some tolerance.
    is_tokens = isinstance(original, list)
    if prefix + suffix < len(original) - 4 * is_tokens:
        raise PartError("the chat template writes them in more than one place")
    start = max(len(original) - suffix - is_tokens, 0) if front else 0
    stop = len(original) if front else min(prefix + is_tokens, len(original))
    if isinstance(original, str) and not _has_all(original[start:stop], names):
        raise PartError("the chat template puts them in another order")
    return start, stop


def _has_all(text: str, names: Sequence[str]) -> bool:
    """Return whether all names are in the text; fast if they are in this order."""
    place = 0
    for name in names:
        place = text.find(name, place)
        if place < 0 and (place := text.find(name)) < 0:
            return False
    return True


# -- vLLM's renderer -------------------------------------------------------------------------------


def parts_of(prompt: Any) -> ChatParts | None:
    """Return the parts of the chat that a prompt was rendered from; None if there is none."""
    found = prompt.get(_KEY) if isinstance(prompt, Mapping) else None
    return found if isinstance(found, ChatParts) else None


@functools.cache
def install() -> None:
    """Wrap the methods that render chats; safe to call twice."""
    render_chat, render_chat_async = BaseRenderer.render_chat, BaseRenderer.render_chat_async

    @functools.wraps(render_chat)
    def rendering(
        self: Any, conversations: Any, chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        if active_settings(self.config.additional_config) is None:
            return render_chat(self, conversations, chat_params, tok_params, **more)
        chats = [_reusable(chat) for chat in conversations]
        rendered_chats, prompts = render_chat(self, chats, chat_params, tok_params, **more)
        used = self.default_chat_tok_params if tok_params is None else tok_params
        for chat, prompt in zip(chats, prompts, strict=True):
            # Which parts a request needs is known only later, with its parameters.
            prompt[_KEY] = ChatParts(self, chat, chat_params, used, dict(prompt))
        return rendered_chats, prompts

    @functools.wraps(render_chat_async)
    async def rendering_async(
        self: Any, conversations: Any, chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        settings, words = active_settings(self.config.additional_config), needed_parts.get()
        if settings is None or words == ():
            return await render_chat_async(self, conversations, chat_params, tok_params, **more)
        chats = [_reusable(chat) for chat in conversations]
        used = self.default_chat_tok_params if tok_params is None else tok_params
        tokenizing = replace(used, return_token_offsets=bool(words) or used.return_token_offsets)
        rendered_chats, prompts = await render_chat_async(
            self, chats, chat_params, tokenizing, **more
        )
        for chat, prompt in zip(chats, prompts, strict=True):
            parts = prompt[_KEY] = ChatParts(self, chat, chat_params, used, dict(prompt))
            # `words` is None on other endpoints, where the needed parts are known only later.
            if words:
                await parts.find(words)
            if not used.return_token_offsets:
                prompt.pop("prompt_token_offsets", None)
        return rendered_chats, prompts

    BaseRenderer.render_chat = rendering
    BaseRenderer.render_chat_async = rendering_async


def _reusable(chat: Iterable[Any]) -> list[Any]:
    """Return the messages of a chat with content that can be read more than once."""
    messages: list[Any] = []
    for message in chat:
        reusable = message
        if isinstance(message, Mapping):
            content = message.get("content")
            if content is not None and not isinstance(content, str | list):
                reusable = {**message, "content": list(content)}
        messages.append(reusable)
    return messages
