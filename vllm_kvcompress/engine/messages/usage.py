"""A request's compression result, carried on its outputs to the API server.

It travels in `EngineCoreOutput.kv_transfer_params` under a key of its own, beside a KV connector's
parameters.
"""

from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput

USAGE_KEY = "kv_compress"
"""The attribute that vLLM's RequestOutput gets, and the key in a response's usage."""
_KEY = "kvcompress"

CompressionUsage = dict[str, Any]
"""What a request's usage says about its compression.

A new compression has ``method``, ``budget``, ``packed_dtype``, ``prompt_tokens``, ``kept_tokens``,
``kept_bytes`` and ``uncompressed_bytes``, and where they apply ``lookahead`` and
``protected_tokens``. ``kept_bytes`` are the bytes of the KV blocks that the request then holds, on
all GPUs, and ``uncompressed_bytes`` those that it would hold uncompressed. The workers add
``layer_tokens`` later, with their mean as ``kept_tokens``.
"""


def same_compression(kept: CompressionUsage, update: CompressionUsage) -> bool:
    """Return whether both are of one compression of a prompt.

    A preempted prompt is compressed again with its output, and one whose look-ahead ended early may
    be compressed again after more output tokens.
    """
    return all(kept.get(key) == update.get(key) for key in ("prompt_tokens", "lookahead"))


def default_usage_to_none() -> None:
    """Give every `RequestOutput` of this process a ``kv_compress`` of None. Idempotent.

    Offline code can then read the attribute of any output. The outputs of a compressed prompt
    override it.
    """
    setattr(RequestOutput, USAGE_KEY, None)


def attach_usage(output: EngineCoreOutput, usage: CompressionUsage) -> None:
    """Attach a compression result to one of the request's outputs."""
    output.kv_transfer_params = {**(output.kv_transfer_params or {}), _KEY: usage}


def take_usage(output: EngineCoreOutput) -> CompressionUsage | None:
    """Remove and return the compression result of an output, None if there is none.

    vLLM passes everything left in that field to the client as the connector's parameters.
    """
    params = output.kv_transfer_params
    if not params or _KEY not in params:
        return None
    usage: CompressionUsage = params[_KEY]
    output.kv_transfer_params = {key: value for key, value in params.items() if key != _KEY} or None
    return usage
