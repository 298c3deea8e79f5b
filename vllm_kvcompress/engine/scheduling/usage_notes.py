"""Compression results of requests, on their way from the scheduler to the server's responses.

The mean number of kept tokens is known when the plan is made, so it arrives with the first output
token. Where packed pages are partly filled, that is an upper bound. The tokens kept by each layer,
and so their exact mean, come from the worker: with the same output on a CPU, later on a GPU, and
never if the request ends first.
"""

from collections.abc import Container, Iterable

from vllm.v1.engine import EngineCoreOutput

from vllm_kvcompress.engine.messages.step import PackedPrompt, StepPlan
from vllm_kvcompress.engine.messages.usage import (
    CompressionUsage,
    attach_usage,
    same_compression,
)
from vllm_kvcompress.planning.packed_pages import mean_layer_tokens


class UsageNotes:
    """Compression results that wait for the next output of their request.

    Args:
        block_bytes: bytes of a KV block on all GPUs.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._waiting: dict[str, CompressionUsage] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add_plan(self, plan: StepPlan | None) -> None:
        """Note the prompts that this step compresses, finally or until their look-ahead ends."""
        for pack_request in plan.reported_prompts if plan is not None else ():
            page_plan = pack_request.plan
            output_tokens = pack_request.output_tokens or 0
            tokens = pack_request.prompt_tokens + output_tokens
            usage: CompressionUsage = {
                "method": pack_request.settings.compress,
                "budget": pack_request.settings.budget,
                "packed_dtype": pack_request.settings.resolved_packed_dtype,
                "prompt_tokens": pack_request.prompt_tokens,
                "kept_tokens": max(mean_layer_tokens(page_plan) - output_tokens, 0),
                "kept_bytes": page_plan.held_blocks * self._block_bytes,
                "uncompressed_bytes": -(-tokens // page_plan.block_size) * self._block_bytes,
            }
            if pack_request.output_tokens is not None:
                usage["lookahead"] = pack_request.output_tokens
            if page_plan.spans:
                usage["protected_tokens"] = pack_request.protected_tokens
            self._waiting[pack_request.request_id] = usage

    def add_packed(self, packed: Iterable[PackedPrompt]) -> None:
        """Add what a worker reports about the prompts it has packed."""
        for done in packed:
            update: CompressionUsage = {"prompt_tokens": done.tokens}
            if done.output_tokens is not None:
                update["lookahead"] = done.output_tokens
            usage = self._waiting.setdefault(done.request_id, update)
            if same_compression(usage, update):
                usage["layer_tokens"] = list(done.layer_tokens)
                # The plan knows only an upper bound where a layer keeps all its tokens.
                usage["kept_tokens"] = done.kept_tokens

    def attach_to(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Attach each waiting result to its request's output."""
        if not self._waiting:
            return
        for output in outputs:
            if (usage := self._waiting.pop(output.request_id, None)) is not None:
                attach_usage(output, usage)

    def forget_ended(self, active_ids: Container[str]) -> None:
        """Drop the results of requests that ended without another output."""
        ended = [request_id for request_id in self._waiting if request_id not in active_ids]
        for request_id in ended:
            del self._waiting[request_id]
