"""Checks of requests to a decode server: their KV transfer parameters and their look-ahead.

Without a KV connector that pulls prompts, nothing is refused.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig

from vllm_kvcompress.errors import OverrideError, shorten
from vllm_kvcompress.refusals.tested import CONNECTORS
from vllm_kvcompress.settings.config import CompressionConfig

PARAMETERS = "kv_transfer_params"


def _pulls_prompts(config: VllmConfig) -> bool:
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector in CONNECTORS


def check_lookahead(config: VllmConfig, request_settings: CompressionConfig | None) -> None:
    """Refuse a pulled prompt that would be compressed without output tokens.

    Args:
        config: configuration of the engine.
        request_settings: settings of the request; None if its prompt stays uncompressed.

    Raises:
        OverrideError: the look-ahead is 0.
    """
    if (
        not _pulls_prompts(config)
        or request_settings is None
        or request_settings.resolved_lookahead
    ):
        return
    raise OverrideError.not_allowed(
        "this server pulls prompts from a prefill server and scores them with output tokens:"
        " kv_lookahead must be at least 1, got 0; remove kv_lookahead, or set kv_compress to off",
    )


def check_transfer(
    config: VllmConfig,
    extra_args: Mapping[str, Any] | None,
    choices: int | None,
    prompts: int = 1,
    *,
    beams: bool = False,
) -> None:
    """Refuse to send a prompt to another server, and to pull a prompt more than once.

    Args:
        config: configuration of the engine.
        extra_args: extra arguments of the request.
        choices: number of outputs per prompt (`n`).
        prompts: number of prompts in the request.
        beams: whether the request uses beam search, whose own requests pull nothing.

    Raises:
        OverrideError: the blocks would be read after compression, after they are freed, or never.
    """
    transfer = (extra_args or {}).get(PARAMETERS)
    if not _pulls_prompts(config) or not isinstance(transfer, Mapping):
        return
    if transfer.get("do_remote_decode"):
        problem = (
            f"{PARAMETERS} must not have do_remote_decode, because other servers cannot read"
            " compressed blocks; send the request to a prefill server"
        )
    elif not transfer.get("do_remote_prefill"):
        return
    elif prompts > 1:
        problem = f"{PARAMETERS} must be for one prompt, got {prompts} prompts; send each by itself"
    elif beams:
        problem = (
            "beam search starts other requests, which pull nothing, so the prefill server would"
            " keep the blocks of this prompt; send it without use_beam_search, or without"
            f" {PARAMETERS}"
        )
    elif (choices or 1) > 1:
        problem = (
            f"a pulled prompt must have n=1, got n={choices}, because the prefill server frees its"
            " blocks after one read; send several requests"
        )
    else:
        return
    raise OverrideError.not_allowed(problem, PARAMETERS)


def prompts_of(request: Any) -> int:
    """Return the number of prompts in a request; completions and chat batches can have several.

    Args:
        request: the request as vLLM's server parsed it.
    """
    messages: Any = getattr(request, "messages", None)
    prompt: Any = getattr(request, "prompt", None)
    if messages and isinstance(messages[0], list):
        return len(messages)
    is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    embeddings = getattr(request, "prompt_embeds", None)
    num_embeddings = (
        len(embeddings) if isinstance(embeddings, list) else int(embeddings is not None)
    )
    return (len(prompt) if is_list else int(bool(prompt))) + num_embeddings


def _digest(*values: Any) -> bytes:
    """Return a hash of values that a client chose: the values themselves may be long."""
    return hashlib.sha256(repr([str(value) for value in values]).encode()).digest()


class Pulls:
    """The latest pulled prompts and the request that pulled each.

    A prefill server keeps the blocks of a prompt for one request only.
    """

    MAX_PROMPTS = 4096

    def __init__(self) -> None:
        self._by_prompt: OrderedDict[bytes, bytes] = OrderedDict()

    def check(
        self,
        config: VllmConfig,
        extra_args: Mapping[str, Any] | None,
        request_id: str,
        *,
        begins: bool = False,
    ) -> None:
        """Refuse to pull a prompt that another request has pulled.

        Args:
            config: configuration of the engine.
            extra_args: extra arguments of the request.
            request_id: vLLM's id of the request.
            begins: whether a new request starts here. A retry can have the same id as the first
                try: routers set it with `X-Request-Id`.

        Raises:
            OverrideError: the prefill server may have freed or reused the blocks.
        """
        transfer = (extra_args or {}).get(PARAMETERS)
        if not _pulls_prompts(config) or not isinstance(transfer, Mapping):
            return
        remote = transfer.get("remote_request_id")
        if not transfer.get("do_remote_prefill") or remote is None:
            return
        prompt, request = _digest(transfer.get("remote_engine_id"), remote), _digest(request_id)
        known = begins and prompt in self._by_prompt
        if known or self._by_prompt.setdefault(prompt, request) != request:
            if isinstance(transfer, dict):
                # vLLM would tell the prefill server to free blocks that the first request may
                # still be pulling.
                transfer["do_remote_prefill"] = False
            raise OverrideError.not_allowed(
                f"{PARAMETERS} can be used by one request, and another has pulled this prompt"
                f" (remote_request_id {shorten(remote)}); send the prompt to the prefill server"
                " again",
                PARAMETERS,
            )
        if len(self._by_prompt) > self.MAX_PROMPTS:
            self._by_prompt.popitem(last=False)
