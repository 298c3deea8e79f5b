"""Which tokens of a task's chat a server protects, found as a server finds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.evidence.reader import rendered
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.engine.frontend.chat_parts import ChatParts
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.settings.protection import WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Template:
    """vLLM's parameters of a template, as far as they are asked for."""

    chat_template_kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokenizing:
    """vLLM's parameters of a tokenizer, as far as they are asked for."""

    return_token_offsets: bool = False
    truncate_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Renderer:
    """What vLLM's renderer does, by the functions that make these benchmarks' prompts."""

    tokenizer: Any

    def render_messages(
        self, messages: Sequence[Any], params: _Template
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        tools = params.chat_template_kwargs["tools"]
        return messages, {"prompt": rendered(self.tokenizer, messages, tools)}

    def tokenize_prompt(
        self, prompt: Mapping[str, Any], tokenizing: _Tokenizing
    ) -> Mapping[str, Any]:
        made = self.tokenizer(
            prompt["prompt"],
            add_special_tokens=False,
            return_offsets_mapping=tokenizing.return_token_offsets,
        )
        return {
            "prompt_token_ids": made["input_ids"],
            "prompt_token_offsets": made.get("offset_mapping"),
        }


def parts_of(tokenizer: Any, item: Item, ids: Sequence[int]) -> dict[str, Spans]:
    """The tokens of each part that may be protected; a text that is gone on with has none.

    Args:
        ids: of the whole prompt.

    Raises:
        PartError: the model's template writes a part so that it cannot be told where.
    """
    if len(item.messages) == 1 and item.messages[0]["role"] == "assistant":
        return {}
    tools = list(item.tools)
    parts = ChatParts(
        _Renderer(tokenizer),
        list(item.messages),
        _Template(chat_template_kwargs={"tools": tools}),
        _Tokenizing(),
        {
            "type": "token",
            "prompt": rendered(tokenizer, item.messages, tools),
            "prompt_token_ids": list(ids),
        },
    )
    return {word: parts.spans(word) for word in WORDS}
