"""Find the tokens of a chat that a server would protect, with the server's own code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.evidence.reference_model import render_chat
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.engine.frontend.protection.chat_parts import ChatParts
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.settings.protection import WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Template:
    """The part of vLLM's chat template parameters that `ChatParts` reads."""

    chat_template_kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokenizing:
    """The part of vLLM's tokenize parameters that `ChatParts` reads."""

    return_token_offsets: bool = False
    truncate_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Renderer:
    """Stands in for vLLM's renderer, using the functions that build this benchmark's prompts."""

    tokenizer: Any

    def render_messages(
        self, messages: Sequence[Any], params: _Template
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        tools = params.chat_template_kwargs["tools"]
        return messages, {"prompt": render_chat(self.tokenizer, messages, tools)}

    def tokenize_prompt(
        self, prompt: Mapping[str, Any], tokenizing: _Tokenizing
    ) -> Mapping[str, Any]:
        encoded = self.tokenizer(
            prompt["prompt"],
            add_special_tokens=False,
            return_offsets_mapping=tokenizing.return_token_offsets,
        )
        return {
            "prompt_token_ids": encoded["input_ids"],
            "prompt_token_offsets": encoded.get("offset_mapping"),
        }


def protected_parts(tokenizer: Any, item: Item, ids: Sequence[int]) -> dict[str, Spans]:
    """Return the token spans of each part of a chat that settings may protect, by name.

    A plain text has no parts.

    Args:
        ids: token ids of the complete prompt.

    Raises:
        PartError: a part cannot be located in the text that the model's template renders.
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
            "prompt": render_chat(tokenizer, item.messages, tools),
            "prompt_token_ids": list(ids),
        },
    )
    return {word: parts.spans(word) for word in WORDS}
