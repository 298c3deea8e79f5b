"""Token spans of each role in a chat: its messages, the tools, the template and the rest."""

from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_kvcompress.engine.frontend.chat_parts import REPORTED, ChatParts, parts_of
from vllm_kvcompress.engine.frontend.modalities import placeholder_spans
from vllm_kvcompress.engine.frontend.renderings import PartError
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.methods.spans import Roles, Spans, clip_spans, complement, merge_spans
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import by_role_for
from vllm_kvcompress.settings.request_keys import BY_ROLE

TEMPLATE, OTHER = "template", "other"
"""Keys for the remaining tokens: only the template's, or some of a role's too."""


def requested_roles(
    settings: CompressionConfig | None, params: SamplingParams, prompt: Any
) -> Roles:
    """Return the token spans of each role if the request asks for the share kept; else {}.

    Args:
        settings: settings of the engine; None without compression.
        params: sampling parameters of the request.
        prompt: prompt as it goes to the engine.

    Raises:
        OverrideError: the request may not ask, or is not a chat.
    """
    if settings is None or not by_role_for(settings, params.extra_args):
        return {}
    parts = parts_of(prompt)
    if parts is None or prompt.get("prompt_token_ids") is None:
        raise OverrideError(
            "invalid",
            f"{BY_ROLE} needs a chat prompt, and this request has no chat; remove {BY_ROLE}",
        )
    return role_spans(parts, prompt)


def role_spans(parts: ChatParts, prompt: Mapping[str, Any]) -> dict[str, Spans]:
    """Return the token spans of each role, of the tools and of the rest; no token is in two.

    Images have their own entries. `OTHER` has the tokens of roles that are not in `ROLES` and of
    roles that could not be found, for example in a chat with images.

    Args:
        parts: parts of the chat.
        prompt: the chat as it goes to the engine.
    """
    num_tokens, rest_key = (
        len(prompt["prompt_token_ids"]),
        OTHER if parts.has_other_roles else TEMPLATE,
    )
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
