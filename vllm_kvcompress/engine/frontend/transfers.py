"""VllmHook `transfers`: what requests to a decode server may ask of its connector and their prompt.

Where there is no connector, nothing is asked and nothing is refused.
"""

from collections import OrderedDict
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
        " tokens: kv_lookahead must be at least 1, got 0; leave kv_lookahead out, or ask for"
        " kv_compress off",
    )


def check_transfer(
    config: VllmConfig,
    extra_args: Mapping[str, Any] | None,
    choices: int | None,
    prompts: int = 1,
    *,
    beams: bool = False,
) -> None:
    """Refuse to hand a prompt on to another server, and to pull one for several answers.

    Args:
        config: the engine's.
        extra_args: the request's.
        choices: how many answers it asks for.
        prompts: how many prompts it brings.
        beams: whether its answers are searched for, by requests that pull nothing.

    Raises:
        OverrideError: its blocks would be read where they are packed, are gone, or are kept for
            nobody.
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
    if asked.get("do_remote_prefill") and prompts > 1:
        raise OverrideError(
            "not_allowed",
            f"{PARAMETERS} are those of one prompt, got {prompts} prompts; send each by itself",
        )
    if asked.get("do_remote_prefill") and beams:
        raise OverrideError(
            "not_allowed",
            "beam search makes other prompts of this one, and pulls none of them, so the prefill"
            " server would keep its blocks for nobody; send it without use_beam_search, or without"
            f" {PARAMETERS}",
        )
    if asked.get("do_remote_prefill") and (choices or 1) > 1:
        raise OverrideError(
            "not_allowed",
            f"a prompt that is pulled must have one answer, got n={choices}: a prefill server keeps"
            " its blocks until they were read once; ask several times",
        )


def prompts_of(request: Any) -> int:
    """How many prompts a request to a server brings: completions and batches of chats may several.

    Args:
        request: as vLLM's server has parsed it.
    """
    messages: Any = getattr(request, "messages", None)
    prompt: Any = getattr(request, "prompt", None)
    if messages and isinstance(messages[0], list):
        return len(messages)
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    embeddings = getattr(request, "prompt_embeds", None)
    more = len(embeddings) if isinstance(embeddings, list) else int(embeddings is not None)
    return (len(prompt) if several else int(bool(prompt))) + more


class Pulls:
    """Which request has pulled which prompt: a prefill server keeps its blocks for one alone.

    Of the latest ones, as this process has seen them.
    """

    MOST = 4096

    def __init__(self) -> None:
        self._by_prompt: OrderedDict[tuple[str, str], str] = OrderedDict()

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
            begins: a request begins here. Whoever asks again may give it the same id: routers do
                that by `X-Request-Id`.

        Raises:
            OverrideError: its blocks may be another prompt's by now, or those of two requests.
        """
        asked = (extra_args or {}).get(PARAMETERS)
        if config.kv_transfer_config is None or not isinstance(asked, Mapping):
            return
        remote = asked.get("remote_request_id")
        if not asked.get("do_remote_prefill") or remote is None:
            return
        prompt = (str(asked.get("remote_engine_id")), str(remote))
        known = begins and prompt in self._by_prompt
        if known or self._by_prompt.setdefault(prompt, request_id) != request_id:
            if isinstance(asked, dict):
                # vLLM would tell the prefill server to free what the other may still be pulling
                asked["do_remote_prefill"] = False
            raise OverrideError(
                "not_allowed",
                f"{PARAMETERS} must be those of one request, and another has pulled this prompt"
                f" (remote_request_id {remote!r}); ask the prefill server again",
            )
        if len(self._by_prompt) > self.MOST:
            self._by_prompt.popitem(last=False)
