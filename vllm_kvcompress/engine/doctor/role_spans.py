"""Token spans of each role in a chat: its messages, the tools, the template and the rest."""

from collections.abc import Mapping
from typing import Any

from vllm_kvcompress.engine.frontend.modalities import placeholder_spans
from vllm_kvcompress.engine.frontend.protection.chat_parts import REPORTED, ChatParts
from vllm_kvcompress.engine.frontend.protection.renderings import PartError
from vllm_kvcompress.methods.spans import Spans, clip_spans, complement, merge_spans

TEMPLATE, OTHER = "template", "other"
"""Keys for tokens that belong to no reported role. `OTHER` replaces `TEMPLATE` if some of these
tokens may belong to messages."""


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
