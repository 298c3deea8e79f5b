"""What happened since the last report: counted in the scheduler, sent with vLLM's own statistics.

A scheduler's statistics go to one API server per step. So these are differences, which add up to
the same whichever server is told.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_kvcompress.engine.messages.counts import Counts
from vllm_kvcompress.engine.messages.step import Packed, PackRequest


@dataclass(slots=True)
class CompressionStats:
    """Counts since the last `take`.

    Args:
        planned: prompts that the scheduler gave to the workers to compress, by method.
        skipped: prompts left whole, by reason.
        freed_blocks: the prompts' own blocks that went back to the pool.
        packed_blocks: free blocks taken for what is kept.
        in_place: prompts packed into their own blocks.
        packed: what the workers reported.
        repacked: times that an answer was packed again.
        answer_blocks: blocks that went back to the pool by that.
        pieces: times that a prompt was packed piecewise, its end included.
        slotless: prompts that found no slot for a look-ahead.
        protected: protected tokens of prompts that were packed.
        raised: prompts whose budget was raised to what is protected.
        cut: times that a prompt was packed before its look-ahead was over, by what to.
    """

    planned: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    freed_blocks: int = 0
    packed_blocks: int = 0
    in_place: int = 0
    packed: list[Packed] = field(default_factory=list)
    repacked: int = 0
    answer_blocks: int = 0
    pieces: int = 0
    slotless: int = 0
    protected: int = 0
    raised: int = 0
    cut: Counter[str] = field(default_factory=Counter)

    def admitted(self, reason: str, slotless: bool) -> None:
        """Add a request that was admitted (`Planner.admit`)."""
        self.slotless += slotless
        if reason:
            self.skipped[reason] += 1

    def pack(
        self, pack: PackRequest, returned: int, *, first: bool, own: int, piecewise: bool
    ) -> None:
        """Add a request that the workers are to pack.

        Args:
            returned: blocks that went back to the pool by that.
            first: nothing of it was packed before.
            own: its own blocks that became destinations.
            piecewise: its prompt never stood whole.
        """
        if not pack.prefill:
            self.repacked += 1
            self.answer_blocks += returned
            return
        self.pieces += piecewise
        self.freed_blocks += returned
        self.packed_blocks += (pack.plan.blocks - own) * first
        self.in_place += own > 0
        if pack.ends:
            self.planned[pack.settings.compress] += 1
            self.protected += pack.protected_tokens
            self.raised += pack.plan.raised
        if pack.cut:
            self.cut[pack.cut] += 1

    def report(self, packed: Iterable[Packed]) -> None:
        """Add what a worker has packed."""
        self.packed.extend(packed)

    def take(self) -> Counts | None:
        """Everything since the last call as plain values; None when nothing happened."""
        counted = (self.planned, self.skipped, self.packed, self.repacked, self.pieces, self.cut)
        if not (any(counted) or self.slotless):
            return None
        layers = Counter[str]()
        for done in self.packed:
            layers.update(dict(zip(map(str, done.layers), done.layer_tokens, strict=True)))
        taken: Counts = {
            "planned": dict(self.planned),
            "skipped": dict(self.skipped),
            "freed_blocks": self.freed_blocks,
            "packed_blocks": self.packed_blocks,
            "in_place": self.in_place,
            "packed": dict(Counter(done.method for done in self.packed)),
            "prompt_tokens": sum(done.tokens for done in self.packed),
            "kept_tokens": sum(done.kept for done in self.packed),
            "ratios": [done.kept / done.tokens for done in self.packed],
            "seconds": [done.seconds for done in self.packed],
            "layer_tokens": dict(layers),
            "repacked": self.repacked,
            "answer_blocks": self.answer_blocks,
            "pieces": self.pieces,
            "slotless": self.slotless,
            "protected_tokens": self.protected,
            "raised_budgets": self.raised,
            "cut_lookaheads": dict(self.cut),
        }
        self.cut.clear()
        self.planned.clear()
        self.skipped.clear()
        self.packed.clear()
        self.freed_blocks = self.packed_blocks = self.in_place = 0
        self.repacked = self.answer_blocks = self.pieces = self.slotless = 0
        self.protected = self.raised = 0
        return taken
