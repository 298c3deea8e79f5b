"""Which tokens of a chat are each role's: its messages', its tools', and the template's."""

from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import SamplingParams

from vllm_kvcompress.engine.frontend.chat_parts import TOLD, ChatParts, parts_of
from vllm_kvcompress.engine.frontend.modalities import places_of
from vllm_kvcompress.engine.frontend.renderings import PartError
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.methods.spans import Roles, Spans, clipped, joined, others
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import by_role_for
from vllm_kvcompress.settings.request_keys import BY_ROLE

TEMPLATE, OTHER = "template", "other"
"""What of a chat is left once its roles are told: the template's tokens, or also some roles'."""


def asked_roles(settings: CompressionConfig | None, params: SamplingParams, prompt: Any) -> Roles:
    """The tokens of each role, where a request asks what is kept of them; else none.

    Args:
        settings: the engine's; None without compression.
        params: the request's.
        prompt: as it goes to the engine.

    Raises:
        OverrideError: the request may not ask, or is no chat.
    """
    if settings is None or not by_role_for(settings, params.extra_args):
        return {}
    parts = parts_of(prompt)
    if parts is None or prompt.get("prompt_token_ids") is None:
        raise OverrideError(
            "invalid",
            f"{BY_ROLE} needs a chat that a template was applied to, and this request is none;"
            f" remove {BY_ROLE}",
        )
    return every_role(parts, prompt)


def every_role(parts: ChatParts, prompt: Mapping[str, Any]) -> dict[str, Spans]:
    """The tokens of each role's messages, of the tools, and of all else; each in one of them.

    Pictures are told for themselves, and the roles of a chat that has some are in `OTHER`. So is a
    role that cannot be told apart, and one that is none of `ROLES`.

    Args:
        prompt: the chat as it goes to the engine.
    """
    tokens, rest = len(prompt["prompt_token_ids"]), OTHER if parts.strange else TEMPLATE
    found = places_of(prompt)
    taken = joined(span for spans in found.values() for span in spans)
    for word in TOLD:
        try:
            spans = parts.spans(word)
        except PartError:
            rest = OTHER
            continue
        # A token on the border of two parts was counted with the first one.
        free = others(taken, tokens)
        if own := joined(part for gap in free for part in clipped(spans, *gap)):
            found[word] = own
            taken = joined([*taken, *own])
    if left := others(taken, tokens):
        found[rest] = left
    return found
