"""Statistics since the last report, counted in the scheduler and sent with vLLM's statistics.

Each step's statistics go to one of the API servers. We therefore send changes, whose sum is right
whichever server receives them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakSet

from vllm.v1.request import Request

from vllm_kvcompress.engine.messages.counts import Counts
from vllm_kvcompress.engine.messages.step import PackedPrompt, PackRequest


@dataclass(slots=True)
class CompressionStats:
    """Counts since the last `take`.

    Each request is counted once, in `planned` or in `skipped`, even if it is preempted or aborted.

    Args:
        planned: prompts that the scheduler told the workers to compress, by method.
        skipped: prompts that stay uncompressed, by reason.
        freed_blocks: blocks of uncompressed prompts that went back to the pool.
        packed_blocks: blocks taken from the pool for kept tokens.
        in_place: prompts packed into their own blocks.
        packed: the workers' reports, one for each request in `planned`.
        seconds: device time of each packing.
        repacked_answers: times that a request's cache was packed again during decoding.
        freed_answer_blocks: blocks that these repackings returned to the pool.
        packed_pieces: times that a prompt under ``max_whole`` was packed, its last packing
            included.
        slotless_lookaheads: prompts that found no free look-ahead slot.
        protected_tokens: protected tokens of the planned prompts.
        raised_budgets: prompts whose budget was raised to hold their protected tokens.
        cut_lookaheads: prompts packed before their look-ahead was over, by target.
    """

    planned: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    freed_blocks: int = 0
    packed_blocks: int = 0
    in_place: int = 0
    packed: list[PackedPrompt] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    repacked_answers: int = 0
    freed_answer_blocks: int = 0
    packed_pieces: int = 0
    slotless_lookaheads: int = 0
    protected_tokens: int = 0
    raised_budgets: int = 0
    cut_lookaheads: Counter[str] = field(default_factory=Counter)
    _counted: WeakSet[Request] = field(default_factory=WeakSet)
    # By request id, the packings still to be reported for requests that were counted before.
    _repeats: Counter[str] = field(default_factory=Counter)

    def admitted(self, request: Request, skip_reason: str, slotless: bool) -> None:
        """Count an admitted request, from the values that `Planner.admit` returns."""
        self.slotless_lookaheads += slotless
        if skip_reason:
            self.skip(request, skip_reason)

    def skip(self, request: Request, reason: str) -> None:
        """Count a request whose prompt stays uncompressed, unless it was counted before."""
        if request not in self._counted:
            self._counted.add(request)
            self.skipped[reason] += 1

    def pack(
        self,
        pack: PackRequest,
        returned_blocks: int,
        *,
        request: Request,
        is_first: bool,
        reused_blocks: int,
        is_piecewise: bool,
    ) -> None:
        """Count a packing that the workers are told to do.

        Args:
            pack: the instruction.
            returned_blocks: blocks that the packing returns to the pool.
            request: the packed request.
            is_first: nothing of the request was packed before.
            reused_blocks: blocks of the request that became destinations.
            is_piecewise: the prompt is packed piece by piece.
        """
        if not pack.prefill:
            self.repacked_answers += 1
            self.freed_answer_blocks += returned_blocks
            return
        self.packed_pieces += is_piecewise
        self.freed_blocks += returned_blocks
        self.packed_blocks += (pack.plan.blocks - reused_blocks) * is_first
        self.in_place += is_first and reused_blocks > 0
        if pack.completes_prompt and request in self._counted:
            self._repeats[pack.request_id] += 1
        elif pack.completes_prompt:
            self._counted.add(request)
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
            if not repeats:
                self.packed.append(done)
            elif repeats > 1:
                self._repeats[done.request_id] = repeats - 1

    def take(self) -> Counts | None:
        """Return the counts since the last call and reset them, None if nothing happened."""
        counted = (
            self.planned,
            self.skipped,
            self.seconds,
            self.repacked_answers,
            self.packed_pieces,
            self.cut_lookaheads,
            self.slotless_lookaheads,
        )
        if not any(counted):
            return None
        layer_tokens = Counter[str]()
        for done in self.packed:
            layer_tokens.update(dict(zip(map(str, done.layers), done.layer_tokens, strict=True)))
        counts: Counts = {
            "planned": dict(self.planned),
            "skipped": dict(self.skipped),
            "freed_blocks": self.freed_blocks,
            "packed_blocks": self.packed_blocks,
            "in_place": self.in_place,
            "packed": dict(Counter(done.method for done in self.packed)),
            "prompt_tokens": sum(done.tokens for done in self.packed),
            "kept_tokens": sum(done.kept_tokens for done in self.packed),
            "ratios": [done.kept_tokens / done.tokens for done in self.packed],
            "seconds": list(self.seconds),
            "layer_tokens": dict(layer_tokens),
            "repacked_answers": self.repacked_answers,
            "freed_answer_blocks": self.freed_answer_blocks,
            "packed_pieces": self.packed_pieces,
            "slotless_lookaheads": self.slotless_lookaheads,
            "protected_tokens": self.protected_tokens,
            "raised_budgets": self.raised_budgets,
            "cut_lookaheads": dict(self.cut_lookaheads),
        }
        self.cut_lookaheads.clear()
        self.planned.clear()
        self.skipped.clear()
        self.packed.clear()
        self.seconds.clear()
        self.freed_blocks = self.packed_blocks = self.in_place = 0
        self.repacked_answers = self.freed_answer_blocks = self.packed_pieces = 0
        self.slotless_lookaheads = self.protected_tokens = self.raised_budgets = 0
        return counts
