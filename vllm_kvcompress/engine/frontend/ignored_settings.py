"""VllmHook `usage` with compression off: tell clients that their settings were ignored.

A server with compression off answers any request as vLLM alone does. With ``--kv-usage``, the usage
of a request with compression settings names them, and says what is wrong with them.
"""

import functools
from collections.abc import Mapping
from typing import Any

from vllm_kvcompress.engine.frontend.api import ignored_keys
from vllm_kvcompress.engine.frontend.usage import (
    HANDLERS,
    Collected,
    install_for_responses,
    reporting,
)
from vllm_kvcompress.engine.messages.settings import has_settings, parsed_settings
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.settings.request_keys import (
    ALIAS,
    KEYS,
    XARGS,
    misplaced,
    refuse_misplaced,
)
from vllm_kvcompress.settings.request_options import check_form


@functools.cache
def install() -> None:
    """Wrap the handlers that write a usage; safe to call twice."""
    for serving, name in HANDLERS:
        setattr(serving, name, _naming_ignored_settings(getattr(serving, name)))
    install_for_responses()


def _naming_ignored_settings(handler: Any) -> Any:
    @functools.wraps(handler)
    async def handling(self: Any, request: Any, raw_request: Any = None, **more: Any) -> Any:
        config = self.engine_client.vllm_config.additional_config
        ignored = None
        if has_settings(config) and not parsed_settings(config).active:
            ignored = await _ignored_settings(request, raw_request)
        if ignored is None:
            return await handler(self, request, raw_request, **more)
        collected = Collected(ignored=ignored)
        return await reporting(collected, handler, self, request, raw_request, **more)

    return handling


async def _ignored_settings(request: Any, raw_request: Any) -> dict[str, Any] | None:
    """Return the names of a request's settings, and an error if one is wrong; None without any."""
    params = getattr(request, "sampling_params", None)
    extra_args = (
        getattr(request, XARGS, None) if params is None else getattr(params, "extra_args", None)
    )
    if not isinstance(extra_args, Mapping):
        extra_args = {}  # batches of chats have no such field, or one that vLLM does not check
    places = await ignored_keys(request, raw_request)
    outside = {key for body, fields, _ in places for key in misplaced(body, fields)}
    found: dict[str, Any] = {}
    is_named = extra_args.get(ALIAS) not in (None, getattr(request, "model", None))
    keys = [key for key in KEYS if key in extra_args or key in outside] + [ALIAS] * is_named
    if keys:
        found["ignored"] = keys
    try:
        check_form(extra_args)
        for body, fields, place in places:
            refuse_misplaced(body, fields, place)
    except OverrideError as e:
        found["error"] = str(e)
    return found or None
