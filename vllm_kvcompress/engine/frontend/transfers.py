"""Seam `transfers`: what requests to a decode server may ask of its connector and their prompt.

Where there is no connector, nothing is asked and nothing is refused.
"""

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig

from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.settings.config import CompressionConfig

PARAMETERS = "kv_transfer_params"


def check_lookahead(config: VllmConfig, own: CompressionConfig | None) -> None:
    """Refuse a prompt that its answer is not to judge.

    Args:
        config: the engine's.
        own: the request's settings; None where its prompt is left whole.

    Raises:
        OverrideError: it is to be packed when it comes.
    """
    if config.kv_transfer_config is None or own is None or own.resolved_lookahead:
        return
    raise OverrideError(
        "not_allowed",
        "this server pulls prompts from another, and compresses them by their answers' first"
        " tokens: kv_lookahead must be at least 1, got 0; ask for 1 or more, or for kv_compress"
        " off",
    )


def check_transfer(
    config: VllmConfig, extra_args: Mapping[str, Any] | None, choices: int | None
) -> None:
    """Refuse to hand a prompt on to another server, and to pull one for several answers.

    Args:
        config: the engine's.
        extra_args: the request's.
        choices: how many answers it asks for.

    Raises:
        OverrideError: its blocks would be read where they are packed, or are gone.
    """
    asked = (extra_args or {}).get(PARAMETERS)
    if config.kv_transfer_config is None or not isinstance(asked, Mapping):
        return
    if asked.get("do_remote_decode"):
        raise OverrideError(
            "not_allowed",
            f"{PARAMETERS} must not have do_remote_decode here: this server compresses prompts, and"
            " no other can read their blocks; send it to a prefill server",
        )
    if asked.get("do_remote_prefill") and (choices or 1) > 1:
        raise OverrideError(
            "not_allowed",
            f"a prompt that is pulled must have one answer, got n={choices}: a prefill server keeps"
            " its blocks until they were read once; ask several times",
        )
