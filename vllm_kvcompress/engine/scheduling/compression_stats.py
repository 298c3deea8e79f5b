"""What the scheduler reports: statistics for the metrics, and each request's compression result.

Each step's statistics go to one of the API servers. We therefore send changes, whose sum is right
whichever server receives them.
"""

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, fields

from vllm.v1.engine import EngineCoreOutput

from vllm_kvcompress.engine.messages.outputs import (
    CompressionUsage,
    Counts,
    attach_usage,
    same_compression,
)
from vllm_kvcompress.engine.messages.step import PackedPrompt, PackRequest, StepPlan
from vllm_kvcompress.engine.scheduling.request_state import RequestState
from vllm_kvcompress.planning.packed_pages import mean_layer_tokens


@dataclass(slots=True)
class CompressionStats:
    """Counts since the last `take`.

    Each request is counted once, in `planned` or in `skipped`, even if it is preempted or aborted.

    Args:
        planned: requests whose prompts the scheduler told the workers to compress, by method.
        packed: planned requests that the workers have compressed, by method.
        skipped: requests whose prompts stayed uncompressed, by reason.
        in_place: prompts packed into their own blocks.
        freed_blocks: blocks that packing prompts returned to the pool.
        packed_blocks: blocks taken from the pool for kept tokens.
        prompt_tokens: tokens of the compressed prompts before compression.
        kept_tokens: tokens of the compressed prompts after compression, mean over the layers.
        layer_tokens: tokens that each layer keeps of the compressed prompts, by the layer's index
            in the model.
        ratios: share of each compressed prompt that is kept.
        seconds: device time to score and pack a prompt, one entry per packing.
        repacked_answers: times that a request's cache was packed again during decoding.
        freed_answer_blocks: blocks that these repackings returned to the pool.
        packed_pieces: times that a prompt longer than ``max_whole`` was packed, its last packing
            included.
        slotless_lookaheads: prompts that found no free look-ahead slot.
        protected_tokens: tokens of compressed prompts that are kept regardless of their score.
        raised_budgets: prompts whose budget was raised to hold their protected tokens.
        cut_lookaheads: prompts packed before their look-ahead was over, by target (`half` or
            `budget`).
        packed_hit_tokens: tokens of new requests that were read from packed pages in the prefix
            cache.
        parked_requests: preempted requests that wait in host memory, as a change.
        parked_bytes: bytes of the slots of host memory in use, as a change.
        resumed_requests: preempted requests that resumed from host memory.
        resumed_tokens: tokens of these requests that were not computed again.
        unparked_requests: preempted requests for which host memory had too few free slots.
    """

    planned: Counter[str] = field(default_factory=Counter)
    packed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    in_place: int = 0
    freed_blocks: int = 0
    packed_blocks: int = 0
    prompt_tokens: int = 0
    kept_tokens: float = 0
    layer_tokens: Counter[str] = field(default_factory=Counter)
    ratios: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    repacked_answers: int = 0
    freed_answer_blocks: int = 0
    packed_pieces: int = 0
    slotless_lookaheads: int = 0
    protected_tokens: int = 0
    raised_budgets: int = 0
    cut_lookaheads: Counter[str] = field(default_factory=Counter)
    packed_hit_tokens: int = 0
    parked_requests: int = 0
    parked_bytes: int = 0
    resumed_requests: int = 0
    resumed_tokens: int = 0
    unparked_requests: int = 0
    # By request id, the packings still to be reported for requests that were counted before.
    _repeats: Counter[str] = field(default_factory=Counter)

    def skip(self, state: RequestState, reason: str) -> None:
        """Count a request whose prompt stays uncompressed, unless it was counted before."""
        if not state.is_counted:
            state.is_counted = True
            self.skipped[reason] += 1

    def pack(
        self, state: RequestState, pack: PackRequest, returned_blocks: int, *, is_first: bool
    ) -> None:
        """Count a packing that the workers are told to do.

        Args:
            state: the packed request.
            pack: the instruction.
            returned_blocks: blocks that the packing returns to the pool.
            is_first: nothing of the request was packed before.
        """
        if not pack.prefill:
            self.repacked_answers += 1
            self.freed_answer_blocks += returned_blocks
            return
        reused_blocks = len(state.reused_blocks)
        self.packed_pieces += state.current_schedule.in_pieces
        self.freed_blocks += returned_blocks
        self.packed_blocks += (pack.plan.blocks - reused_blocks) * is_first
        self.in_place += is_first and reused_blocks > 0
        if pack.completes_prompt and state.is_counted:
            self._repeats[pack.request_id] += 1
        elif pack.completes_prompt:
            state.is_counted = True
            self.planned[pack.settings.compress] += 1
            self.protected_tokens += pack.protected_tokens
            self.raised_budgets += pack.plan.raised
        if pack.early_target:
            self.cut_lookaheads[pack.early_target] += 1

    def report(self, packed: Iterable[PackedPrompt]) -> None:
        """Count the prompts that a worker reports as packed."""
        for done in packed:
            self.seconds.append(done.seconds)
            repeats = self._repeats.pop(done.request_id, 0)
            if repeats > 1:
                self._repeats[done.request_id] = repeats - 1
            if repeats:
                continue
            self.packed[done.method] += 1
            self.prompt_tokens += done.tokens
            self.kept_tokens += done.kept_tokens
            self.ratios.append(done.kept_tokens / done.tokens)
            by_layer = zip(map(str, done.layers), done.layer_tokens, strict=True)
            self.layer_tokens.update(dict(by_layer))

    def take(self) -> Counts | None:
        """Return the counts since the last call and reset them, None if nothing happened."""
        # Most steps count nothing. The other counts change only together with one of these.
        counted = (
            self.planned,
            self.skipped,
            self.seconds,
            self.repacked_answers,
            self.packed_pieces,
            self.cut_lookaheads,
            self.slotless_lookaheads,
            self.packed_hit_tokens,
            self.parked_requests,
            self.parked_bytes,
            self.resumed_requests,
            self.unparked_requests,
        )
        if not any(counted):
            return None
        counts = {name: getattr(self, name) for name in _COUNTED}
        fresh = CompressionStats()
        for name in _COUNTED:
            setattr(self, name, getattr(fresh, name))
        # A message has plain values.
        return {
            name: dict(count) if isinstance(count, Counter) else count
            for name, count in counts.items()
        }


_COUNTED = [each.name for each in fields(CompressionStats) if not each.name.startswith("_")]


class UsageNotes:
    """Compression results that wait for the next output of their request.

    The mean number of kept tokens is known when the plan is made, so it arrives with the first
    output token. Where packed pages are partly filled, that is an upper bound. The tokens kept by
    each layer, and so their exact mean, come from the worker: with the same output on a CPU, later
    on a GPU, and never if the request ends first.

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
