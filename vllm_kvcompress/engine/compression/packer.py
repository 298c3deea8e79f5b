"""After a step: what some requests hold is scored, chosen and moved. Nothing waits for a device.

One path for all: prompts whose prefill ended, prompts at a boundary, and answers that grew. Rows of
a prompt of which nothing was dropped have no lengths; of the others the page pool knows them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from kvcompress_kernels.column_sums import column_sums
from vllm_kvcompress.devices import to_device
from vllm_kvcompress.engine.compression.merging import Merging
from vllm_kvcompress.engine.compression.mover import Move, Mover, SourcePages
from vllm_kvcompress.engine.compression.protecting import ProtectedSlots
from vllm_kvcompress.engine.compression.reports import Stopwatch
from vllm_kvcompress.engine.messages.step import PackRequest
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.kept_slots import kept_slots, most_pages
from vllm_kvcompress.methods.method import LayerObservation, Method
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.methods.protected import Guarded
from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.planning.memory import answers_at_once, layers_at_once


@dataclass(slots=True, kw_only=True)
class PackJob:
    """A request that is to be packed.

    Args:
        pack_request: its place in the scheduler's plan.
        method: what packs it.
        row: of this step's batch.
        blocks: of a prompt, ``[n]`` int64 vLLM block ids of its tokens; those that were packed are
            no longer its own.
        queries: of a prompt, per layer that is shown its observation window, the last
            ``[w, Hq, D]`` queries, or the probe's. The ring has those of others, and of prompts
            that looked ahead.
        sums: of a prompt of which nothing was dropped, per layer that is shown them, column sums
            ``[Hq, S]`` float32. The pool has those of the others.
        stopwatch: runs while it is packed; None where nobody asks how long that takes.
    """

    pack_request: PackRequest
    method: Method
    row: int = 0
    blocks: torch.Tensor | None = None
    queries: Mapping[int, torch.Tensor] = field(default_factory=dict)
    sums: Mapping[int, torch.Tensor] = field(default_factory=dict)
    stopwatch: Stopwatch | None = None


Observer = Callable[[PackRequest, torch.Tensor, torch.Tensor], None]
"""Called once a request was packed: with its place in the plan, the slots ``[L, Hkv, n]`` int32
that its layers keep in pages, -1 behind the last, and the pages ``[L]`` int32 of each layer."""


class Packer:
    """Packs what requests hold within the page pool of one worker, after the whole forward pass.

    Whole prompts are packed one after the other: what one prompt's scores take is free again before
    the next one's are made. Other requests of one method share their launches, as many as take no
    more memory than one longest prompt does.

    Args:
        mover: reads and writes the pages of this worker's layers.
        scales: of each layer.
        num_layers: layers on this worker, L.
    """

    def __init__(self, mover: Mover, *, scales: Scales, num_layers: int) -> None:
        self.mover, self.pool = mover, mover.pool
        self.scales, self.num_layers = scales, num_layers
        self.protected = ProtectedSlots(mover.pool, num_layers)
        self.observers: list[Observer] = []

    def at_once(self, tokens: int) -> int:
        """Rows of so many tokens that are scored together."""
        return layers_at_once(self.pool.longest, tokens)

    def rows(self, source: SourcePages, layers: Sequence[int], reads: Reads) -> PagedLayers:
        """Some rows as a method takes them.

        Args:
            layers: of each row.
            reads: what of them is read.
        """
        opened, scales = self.mover.open(source.pages, reads), self.scales
        requests, rest = divmod(len(layers), self.num_layers)
        every = source.lengths is not None and layers[0] == 0 and not rest
        return PagedLayers(
            key_pages=opened.keys,
            value_pages=opened.values,
            pages=opened.pages,
            lengths=source.lengths,
            most=source.most,
            scale=scales.of_requests(requests) if every else scales.of_layers(layers),
            layers=layers,
            value_scales=[scales.values[layer] for layer in layers],
            sinks=scales.sinks_of_requests(requests) if every else scales.sinks_of_layers(layers),
        )

    def column_sums(
        self, layer: int, blocks: torch.Tensor, query: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """What the latest rows of a prompt pay to each of its tokens, all of which stand.

        Args:
            blocks: ``[ceil(tokens / bs)]`` int64, vLLM block ids of the prompt so far.
            query: ``[r, Hq, D]``, the rows' queries.
            tokens: computed so far, those rows among them.

        Returns:
            ``[Hq, tokens]`` float32.
        """
        opened = self.mover.open(self.pool.flat_ids(layer, blocks), Reads.COLUMN_SUMS)
        where, sinks = (opened.keys, opened.pages, tokens), self.scales.sinks_of(layer)
        return column_sums(query, *where, self.scales.logits[layer], sinks)

    # -- packing -------------------------------------------------------------------------------

    def run(self, jobs: Sequence[PackJob]) -> dict[str, torch.Tensor]:
        """Pack all of them; how much each layer keeps stays on the device.

        Returns:
            Of each request ``[L]``: pages that its layers keep.
        """
        kept = dict[str, torch.Tensor]()
        for together in self._together(jobs):
            with ExitStack() as clocks:
                for job in together:
                    if job.stopwatch is not None:
                        clocks.enter_context(job.stopwatch.running())
                counts = self._pack(together)
            kept |= {
                job.pack_request.request_id: n for job, n in zip(together, counts, strict=True)
            }
        return kept

    def _together(self, jobs: Sequence[PackJob]) -> Iterator[list[PackJob]]:
        """Whole prompts one by one, then requests that share a method, queries and a tail."""
        yield from ([job] for job in jobs if job.pack_request.whole)
        others = [job for job in jobs if not job.pack_request.whole]
        ordered = sorted(others, key=lambda job: (_alike(job), job.pack_request.plan.tokens))
        for _, group in groupby(ordered, key=_alike):
            alike = list(group)
            # the last one is the longest, and those of one method keep as much
            largest = max((job.pack_request.plan for job in alike), key=lambda plan: plan.pages)
            plan = replace(largest, tokens=alike[-1].pack_request.plan.tokens)
            count = answers_at_once(plan, self.pool.longest)
            for start in range(0, len(alike), count):
                yield alike[start : start + count]

    def _pack(self, jobs: Sequence[PackJob]) -> list[torch.Tensor]:
        pool, method, pack_requests = self.pool, jobs[0].method, [job.pack_request for job in jobs]
        plan, layers, source = pack_requests[0].plan, self.num_layers, self._held(jobs)
        # what a method remembers of requests that are packed again
        again = all(pack_request.request_id in pool for pack_request in pack_requests)
        observed = self._observe(jobs, source)
        every_count, every_target, widest = [], [], 0
        for index, pack_request in enumerate(pack_requests):
            own = slice(index * layers, (index + 1) * layers)
            counts, targets, most = self._divide(
                method, pack_request, observed[own], source.some(own)
            )
            every_count.append(counts)
            every_target.append(targets)
            widest = max(widest, most)
        counts, scores = torch.cat(every_count), method.scores(observed)
        del observed
        protected = self.protected.before(pack_requests, source, heads=scores.shape[1])
        guarded = None if protected is None else Guarded(own=protected)
        kept = kept_slots(
            scores,
            source.tokens,
            counts,
            window=plan.window,
            tail=plan.tail,
            block_size=pool.block_size,
            most_pages=widest,
            selector=method.selector,
            guarded=guarded,
        )
        del scores
        move = Move(
            source=source,
            kept=kept,
            counts=counts,
            targets=torch.cat(every_target)[:, :widest],
            total=sum(pack_request.plan.pages for pack_request in pack_requests),
            in_place=any(pack_request.in_place for pack_request in pack_requests),
            merging=self._merging(method, pack_requests, source, kept.shape[1])
            if method.merge
            else None,
        )
        sums = pool.sums if again and Reads.COLUMN_SUMS in method.reads else None
        paid = None if sums is None else sums.read(source.pages)
        thresholds = self.mover.move(move)
        if guarded is not None:
            # not before: what is moved lies where it lay
            self.protected.note(pack_requests, kept, guarded.own)
        if again and thresholds is not None and pool.thresholds is not None:
            slots = pool.slots([pack_request.request_id for pack_request in pack_requests])
            pool.thresholds.write(slots, thresholds.view(len(pack_requests), layers, -1))
        if paid is not None and sums is not None:
            sums.write(move.targets, counts, paid.gather(2, kept.clamp(min=0).long()))
        for observer in self.observers:
            for pack_request, own_kept, count in zip(
                pack_requests, kept.split(layers), every_count, strict=True
            ):
                observer(pack_request, own_kept, count)
        return every_count

    def _held(self, jobs: Sequence[PackJob]) -> SourcePages:
        """A whole prompt in its blocks; others where this step's tables say."""
        if jobs[0].pack_request.whole:
            assert jobs[0].blocks is not None, jobs
            pages = self.pool.every_layer(jobs[0].blocks)
            return SourcePages(pages=pages, lengths=None, most=jobs[0].pack_request.plan.tokens)
        plans = [job.pack_request.plan for job in jobs]
        columns = max(-(-plan.tokens // plan.block_size) for plan in plans)
        return self.held_rows(*self.pool.held([job.row for job in jobs], columns))

    def held_rows(self, tables: torch.Tensor, lengths: torch.Tensor) -> SourcePages:
        """What some rows of this step's batch hold: ``[R, L, W]`` int64 and ``[R, L]`` int32."""
        if lengths.device.type == "cpu":
            # It costs nothing to ask, and tables are as wide as any layer could be.
            tables = tables[..., : -(-int(lengths.max()) // self.pool.block_size)]
        most = tables.shape[2] * self.pool.block_size
        return SourcePages(pages=tables.flatten(0, 1), lengths=lengths.flatten(), most=most)

    def _observe(self, jobs: Sequence[PackJob], source: SourcePages) -> list[LayerObservation]:
        """Score every row, as many at once as fit into memory."""
        method, layers, observed = jobs[0].method, self.num_layers, dict[int, LayerObservation]()
        plan = jobs[0].pack_request.plan
        window, judged = plan.window, jobs[0].pack_request.uses_ring_queries
        from_ring = self._queries_in_ring(jobs, window) if judged else None
        count = self.at_once(source.most)
        for scored in (True, False):
            rows = [
                r for r in range(len(source.pages)) if method.scores_layer(r % layers) is scored
            ]
            reads = method.reads if scored else method.allocator.reads
            for start in range(0, len(rows), count):
                some = rows[start : start + count]
                part = _rows_of(source, some)
                own = self.rows(part, [row % layers for row in some], reads)
                attention = sums = None
                if Reads.WINDOW in reads:
                    if from_ring is None:
                        query = self._queries(jobs, some, window)
                    else:
                        query = _of_rows(from_ring, some)
                    attention = method.attention(
                        own, query, plan.allocator_window, scored_by_output=plan.scored_by_output
                    )
                if Reads.COLUMN_SUMS in reads:
                    sums = self._sums(jobs, some, part)
                found = method.observe(own, window, attention, sums, scored=scored)
                observed |= zip(some, found, strict=True)
        return [observed[row] for row in range(len(source.pages))]

    def _queries_in_ring(self, jobs: Sequence[PackJob], window: int) -> torch.Tensor | None:
        """The last ``[N, w, Hq, D]`` queries of every row; None where the method reads none."""
        if Reads.WINDOW not in jobs[0].method.reads:
            return None
        assert self.pool.ring is not None, jobs
        slots = self.pool.slots([job.pack_request.request_id for job in jobs])
        return self.pool.ring.latest(slots, [job.pack_request.tokens for job in jobs], window)

    def _queries(self, jobs: Sequence[PackJob], rows: Sequence[int], window: int) -> torch.Tensor:
        """The last ``[n, w, Hq, D]`` queries of some rows of prompts."""
        found = []
        for row in rows:
            request, layer = divmod(row, self.num_layers)
            query = jobs[request].queries.get(layer)
            if query is None or len(query) != window:
                raise RuntimeError(
                    f"request {jobs[request].pack_request.request_id}:"
                    f" {0 if query is None else len(query)} window queries were kept when its"
                    f" prompt was to be packed, {window} are needed"
                )
            found.append(query)
        return found[0][None] if len(found) == 1 else torch.stack(found)

    def _sums(
        self, jobs: Sequence[PackJob], rows: Sequence[int], source: SourcePages
    ) -> torch.Tensor:
        """What was paid to every slot of some rows: of each query head, or the pool's mean."""
        if source.lengths is None:
            own = [jobs[0].sums[row] for row in rows]
            return own[0][None] if len(own) == 1 else torch.stack(own)
        assert self.pool.sums is not None, jobs
        return self.pool.sums.read(source.pages)

    def _divide(
        self,
        method: Method,
        pack_request: PackRequest,
        observed: Sequence[LayerObservation],
        source: SourcePages,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """How many pages each layer keeps, which ones, and how many no layer exceeds.

        Returns:
            ``[L]`` int32, ``[L, max_blocks]`` int32 and a number that the host knows.
        """
        pool, plan = self.pool, pack_request.plan
        first_block = pack_request.tokens // pool.block_size
        if pack_request.destination is None:
            targets, counts = pool.packed(pack_request.request_id)
            pool.advance(pack_request.request_id, first_block)
            return counts, targets, min(most_pages(plan, counts), pool.columns)
        lengths = source.lengths
        caps = None if lengths is None else ((lengths - plan.probe) // pool.block_size).long()
        pages = method.layer_pages(plan, observed, caps)
        counts = to_device(pages, torch.int32, pool.pages.device)
        free = pool.destination(pack_request.destination)[: plan.pages]
        targets = pool.assign(pack_request.request_id, free, counts, first_block)
        return counts, targets, min(most_pages(plan, pages), pool.columns)

    def _merging(
        self, method: Method, pack_requests: Sequence[PackRequest], source: SourcePages, heads: int
    ) -> Merging:
        plan, thresholds = pack_requests[0].plan, None
        if self.pool.thresholds is not None:
            slots = self.pool.slots([pack_request.request_id for pack_request in pack_requests])
            thresholds = self.pool.thresholds.read(slots).flatten(0, 1)
        if source.lengths is None:
            tail_pages = source.pages[:, -1]
        else:
            last = (source.lengths.long() - 1) // self.pool.block_size
            tail_pages = source.pages.gather(1, last[:, None])[:, 0]
        return Merging(
            values_only=method.values_only,
            tail=plan.tail,
            tail_pages=tail_pages,
            thresholds=thresholds,
            least=plan.floor_pages * plan.block_size + plan.tail if source.lengths is None else 1,
            protected=self.protected.every(pack_requests, source, heads),
        )


def _alike(job: PackJob) -> tuple[str, bool, bool, int, int, bool, int, tuple[int, int]]:
    """What requests have in common that are packed together.

    Their method, queries, window and tail, and how many tokens are protected: before those, and in
    all.
    """
    pack_request, plan = job.pack_request, job.pack_request.plan
    protected = plan.guarded, count_before(plan.spans, pack_request.tokens)
    queries = pack_request.uses_ring_queries, plan.window, plan.allocator_window or plan.window
    return (
        str(pack_request.settings),
        pack_request.prefill,
        *queries,
        plan.scored_by_output,
        plan.tail,
        protected,
    )


def _rows_of(source: SourcePages, rows: Sequence[int]) -> SourcePages:
    """Some rows, without an index that would have to go to the device."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return source.some(slice(rows[0], rows[-1] + 1))
    assert source.lengths is None, "rows of different lengths are all scored"
    return replace(source, pages=_of_rows(source.pages, rows))


def _of_rows(every: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of a tensor: a view where they lie side by side."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return every[rows[0] : rows[-1] + 1]
    return torch.stack([every[row] for row in rows])
