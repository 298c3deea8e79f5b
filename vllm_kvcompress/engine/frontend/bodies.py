"""The bodies of HTTP requests, with the keys that vLLM ignores.

vLLM keeps the unknown keys of some requests and drops the ones of others, such as Anthropic's
messages and requests of token ids. The body itself has them all.
"""

from collections.abc import Collection, Mapping
from typing import Any

from starlette.requests import Request
from vllm.sampling_params import SamplingParams

from vllm_kvcompress.settings.request_keys import XARGS

_PARAMS = "sampling_params"
_FIELDS_OF_PARAMS = frozenset(SamplingParams.__annotations__)

Keys = tuple[Mapping[str, Any], Collection[str], str]
"""An object of the body, the keys that vLLM reads there, and where settings belong instead."""


async def ignored_keys(request: Any, raw_request: Any) -> list[Keys]:
    """Return the objects of a request's body in which a client may misplace a setting.

    Args:
        request: as vLLM has parsed it, or made of another API's request.
        raw_request: the HTTP request; None where a request comes from a file.
    """
    sent: Any = dict(getattr(request, "model_extra", None) or {})
    if isinstance(raw_request, Request):
        sent = await raw_request.json()  # parsed before, and kept
    fields = frozenset(type(request).model_fields)
    if not isinstance(sent, Mapping):
        return []
    if _PARAMS not in fields:
        return [(sent, fields | {XARGS}, XARGS)]
    place = f"{_PARAMS}.extra_args"
    params = sent.get(_PARAMS)
    inner: list[Keys] = []
    if isinstance(params, Mapping):
        inner = [(params, _FIELDS_OF_PARAMS, place)]
    return [(sent, fields, place), *inner]
