"""Keys of HTTP request bodies that vLLM ignores.

vLLM keeps the unknown keys of some requests and drops those of others, such as Anthropic messages
and requests with token ids. The body has them all.
"""

from collections.abc import Collection, Mapping
from typing import Any

from starlette.requests import Request
from vllm.sampling_params import SamplingParams

from vllm_kvcompress.settings.request_keys import XARGS

_PARAMS = "sampling_params"
_PARAMS_FIELDS = frozenset(SamplingParams.__annotations__)

Keys = tuple[Mapping[str, Any], Collection[str], str]
"""An object in the body, the keys that vLLM reads there, and the place where settings belong."""


async def ignored_keys(request: Any, raw_request: Any) -> list[Keys]:
    """Return the objects in a request body where a client may have misplaced a setting.

    Args:
        request: request as parsed by vLLM, or converted from another API's request.
        raw_request: HTTP request; None if the request comes from a file.
    """
    body: Any = dict(getattr(request, "model_extra", None) or {})
    if isinstance(raw_request, Request):
        body = await raw_request.json()  # vLLM has parsed it, and Starlette caches the result
    fields = frozenset(type(request).model_fields)
    if not isinstance(body, Mapping):
        return []
    if _PARAMS not in fields:
        return [(body, fields | {XARGS}, XARGS)]
    place = f"{_PARAMS}.extra_args"
    params = body.get(_PARAMS)
    nested: list[Keys] = []
    if isinstance(params, Mapping):
        nested = [(params, _PARAMS_FIELDS, place)]
    return [(body, fields, place), *nested]
