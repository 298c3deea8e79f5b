"""What was kept of a request's prompt, beside a KV connector's parameters.

It lies in the connector's place on the request's output, under a key of its own.
"""

from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine import EngineCoreOutput

KEY = "kv_compress"
"""The attribute of vLLM's RequestOutput, and the key in an answer's usage."""
_KEY = "kvcompress"

Kept = dict[str, Any]
"""``method``, ``budget``, ``prompt_tokens`` and ``kept_tokens`` of a new compression, ``lookahead``
and ``protected_tokens`` where it has some, and ``layer_tokens`` once the workers have told them,
with ``by_role`` where the request asks: ``tokens`` of each role, and the share ``kept`` of them."""


def say_none_by_default() -> None:
    """Give every RequestOutput of this process a ``kv_compress`` of None; safe to call twice.

    A compressed prompt's outputs have their own. Offline code then reads the attribute of any
    output, whether its prompt was compressed or not.
    """
    setattr(RequestOutput, KEY, None)


def attach_kept(output: EngineCoreOutput, kept: Kept) -> None:
    """Send what was kept with the request's next output."""
    output.kv_transfer_params = {**(output.kv_transfer_params or {}), _KEY: kept}


def take_kept(output: EngineCoreOutput) -> Kept | None:
    """Take it off the output: vLLM hands on to the client what else is there, as a connector's."""
    carried = output.kv_transfer_params
    if not carried or _KEY not in carried:
        return None
    kept: Kept = carried[_KEY]
    others = {key: value for key, value in carried.items() if key != _KEY}
    output.kv_transfer_params = others or None
    return kept
