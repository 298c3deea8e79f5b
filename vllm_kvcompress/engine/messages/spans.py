"""Spans of a request's prompt, carried in the extra arguments of its sampling parameters.

They say which tokens are protected, and which tokens belong to each role if the request wants
kept-token counts by role. The API server (or the `LLM` process) computes and attaches them. A
client cannot set them: whatever it sends under these keys is replaced.
"""

from collections.abc import Iterable, Sequence

from vllm.sampling_params import SamplingParams

from vllm_kvcompress.methods.spans import Roles, Spans
from vllm_kvcompress.settings.request_keys import ROLES, SPANS


def attach_spans(params: SamplingParams, spans: Spans, roles: Roles) -> None:
    """Store a prompt's spans in the request's sampling parameters, in place.

    Args:
        params: must belong to this request alone.
        spans: protected tokens.
        roles: tokens of each role. Empty if the request does not ask for counts by role.
    """
    extra_args = {
        key: value for key, value in (params.extra_args or {}).items() if key not in (SPANS, ROLES)
    }
    if spans:
        extra_args[SPANS] = [list(span) for span in spans]
    if roles:
        extra_args[ROLES] = {
            role: [list(span) for span in role_spans] for role, role_spans in roles.items()
        }
    if extra_args or params.extra_args:
        params.extra_args = extra_args or None


def spans_of(params: SamplingParams | None) -> Spans:
    """Return the protected spans of a request."""
    extra_args = None if params is None else params.extra_args
    return _parse_spans((extra_args or {}).get(SPANS, ()))


def roles_of(params: SamplingParams | None) -> Roles:
    """Return the tokens of each role of a request, ``{}`` if it does not ask for them."""
    extra_args = None if params is None else params.extra_args
    return {
        role: _parse_spans(role_spans)
        for role, role_spans in (extra_args or {}).get(ROLES, {}).items()
    }


def _parse_spans(raw_spans: Iterable[Sequence[int]]) -> Spans:
    return tuple((int(start), int(stop)) for start, stop in raw_spans)
