"""What happened since the last report: counted in the scheduler, sent with vLLM's own statistics.

A scheduler's statistics go to one API server per step. So these are differences, which add up to
the same whichever server is told.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakSet

from vllm.v1.request import Request

from vllm_kvcompress.engine.messages.counts import Counts
from vllm_kvcompress.engine.messages.step import Pack, Packed


@dataclass(slots=True)
class Tally:
    """Counts since the last `take`.

    Each request is counted once, in `planned` or in `skipped`, whatever preempts it or ends it.

    Args:
        planned: prompts that the scheduler gave to the workers to compress, by method.
        skipped: prompts left whole, by reason.
        seconds: what each packing took on the worker's device.
        freed_blocks: the prompts' own blocks that went back to the pool.
        packed_blocks: free blocks taken for what is kept.
        in_place: prompts packed into their own blocks.
        packed: what the workers reported, once for each request in `planned`.
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
    seconds: list[float] = field(default_factory=list)
    repacked: int = 0
    answer_blocks: int = 0
    pieces: int = 0
    slotless: int = 0
    protected: int = 0
    raised: int = 0
    cut: Counter[str] = field(default_factory=Counter)
    _counted: WeakSet[Request] = field(default_factory=WeakSet)
    # By request id: packings that the workers will report for requests that were counted before.
    _repeats: Counter[str] = field(default_factory=Counter)

    def admitted(self, request: Request, reason: str, slotless: bool) -> None:
        """Add a request that was admitted (`Planner.admit`)."""
        self.slotless += slotless
        if reason:
            self.skip(request, reason)

    def skip(self, request: Request, reason: str) -> None:
        """Add a request whose prompt stays uncompressed, unless it was counted before."""
        if request not in self._counted:
            self._counted.add(request)
            self.skipped[reason] += 1

    def pack(
        self,
        pack: Pack,
        returned: int,
        *,
        request: Request,
        first: bool,
        own: int,
        piecewise: bool,
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
        if pack.ends and request in self._counted:
            self._repeats[pack.request_id] += 1
        elif pack.ends:
            self._counted.add(request)
            self.planned[pack.settings.compress] += 1
            self.protected += pack.protected_tokens
            self.raised += pack.plan.raised
        if pack.cut:
            self.cut[pack.cut] += 1

    def report(self, packed: Iterable[Packed]) -> None:
        """Add what a worker has packed."""
        for done in packed:
            self.seconds.append(done.seconds)
            repeats = self._repeats.pop(done.request_id, 0)
            if not repeats:
                self.packed.append(done)
            elif repeats > 1:
                self._repeats[done.request_id] = repeats - 1

    def take(self) -> Counts | None:
        """Everything since the last call as plain values; None when nothing happened."""
        counted = (self.planned, self.skipped, self.seconds, self.repacked, self.pieces, self.cut)
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
            "seconds": list(self.seconds),
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
        self.seconds.clear()
        self.freed_blocks = self.packed_blocks = self.in_place = 0
        self.repacked = self.answer_blocks = self.pieces = self.slotless = 0
        self.protected = self.raised = 0
        return taken
