"""What is known of a request's prompt, in its sampling parameters' extra arguments.

Which tokens are protected, and which are each role's where the request asks what is kept of them.
The API server, or the process of `LLM`, finds them and puts them there. A client cannot: whatever
it sends under these names is replaced.
"""

from collections.abc import Iterable, Sequence

from vllm.sampling_params import SamplingParams

from vllm_kvcompress.methods.spans import Roles, Spans
from vllm_kvcompress.settings.request_keys import ROLES, SPANS


def attach_spans(params: SamplingParams, spans: Spans, roles: Roles) -> None:
    """Send a prompt's spans with its request, whose own parameters these are.

    Args:
        spans: what is protected.
        roles: the tokens of each role; empty where nobody asks.
    """
    given = (params.extra_args or {}).items()
    others = {key: value for key, value in given if key not in (SPANS, ROLES)}
    if spans:
        others[SPANS] = [list(span) for span in spans]
    if roles:
        others[ROLES] = {role: [list(span) for span in own] for role, own in roles.items()}
    if others or params.extra_args:
        params.extra_args = others or None


def spans_of(params: SamplingParams | None) -> Spans:
    """The protected spans that came with a request."""
    extra_args = None if params is None else params.extra_args
    return _spans((extra_args or {}).get(SPANS, ()))


def roles_of(params: SamplingParams | None) -> Roles:
    """The tokens of each role that came with a request; none where it does not ask."""
    extra_args = None if params is None else params.extra_args
    return {role: _spans(own) for role, own in (extra_args or {}).get(ROLES, {}).items()}


def _spans(found: Iterable[Sequence[int]]) -> Spans:
    return tuple((int(start), int(stop)) for start, stop in found)
