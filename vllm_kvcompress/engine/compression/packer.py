"""Scores, selects and moves the tokens of requests after a step, without device syncs.

The same path packs prompts at the end of prefill, prompts in pieces, and growing outputs. A row is
one layer of one request. Rows of a request that has dropped no token have no `lengths` tensor; the
page pool supplies the lengths of other rows.
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
from vllm_kvcompress.engine.compression.protected_slots import ProtectedSlots
from vllm_kvcompress.engine.compression.reports import Stopwatch
from vllm_kvcompress.engine.messages.step import PackRequest
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.kept_slots import kept_slots, max_layer_pages
from vllm_kvcompress.methods.method import LayerObservation, Method
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.methods.protected import ProtectedTokens
from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.planning.memory import layers_per_batch, requests_per_pack


@dataclass(slots=True, kw_only=True)
class PackJob:
    """A request to pack.

    Args:
        pack_request: its entry in the scheduler's plan.
        method: the compression method.
        row: its row in this step's batch.
        blocks: for a prompt, ``[n]`` int64 vLLM block ids of its tokens. The request no longer owns
            blocks whose tokens are packed already.
        queries: for a prompt without a look-ahead, by layer whose window is scored, the last
            ``[w, Hq, D]`` queries or those of the probe. Other queries are in the page pool's ring.
        sums: for a prompt that has dropped no token, by layer that needs them, column sums
            ``[Hq, S]`` float32. Other sums are in the page pool.
        stopwatch: measures the packing time; None to skip the measurement.
    """

    pack_request: PackRequest
    method: Method
    row: int = 0
    blocks: torch.Tensor | None = None
    queries: Mapping[int, torch.Tensor] = field(default_factory=dict)
    sums: Mapping[int, torch.Tensor] = field(default_factory=dict)
    stopwatch: Stopwatch | None = None


Observer = Callable[[PackRequest, torch.Tensor, torch.Tensor], None]
"""Called after a request is packed.

Its arguments are the plan's entry, the kept slots ``[L, Hkv, n]`` int32 (-1 after a layer's last
slot), and the number of pages ``[L]`` int32 of each layer.
"""


class Packer:
    """Packs requests in one worker's page pool, after the forward pass.

    Uncompressed prompts are packed one at a time, so only one prompt's scores use memory. Other
    requests with the same method share kernel launches, up to the memory of one longest prompt.

    Args:
        mover: reads and writes the pages of this worker's layers.
        scales: scales of each layer.
        num_layers: compressed layers on this worker, L.
    """

    def __init__(self, mover: Mover, *, scales: Scales, num_layers: int) -> None:
        self.mover, self.pool = mover, mover.pool
        self.scales, self.num_layers = scales, num_layers
        self.protected = ProtectedSlots(mover.pool, num_layers)
        self.observers: list[Observer] = []

    def rows_per_launch(self, tokens: int) -> int:
        """Return how many rows of `tokens` tokens one launch scores."""
        return layers_per_batch(self.pool.max_layer_tokens, tokens)

    def paged_layers(self, source: SourcePages, layers: Sequence[int], reads: Reads) -> PagedLayers:
        """Return the rows in the form that a method takes.

        Args:
            source: the rows' pages.
            layers: layer index of each row.
            reads: the parts of the cache that the method reads.
        """
        readable, scales = self.mover.open(source.pages, reads), self.scales
        num_requests, remainder = divmod(len(layers), self.num_layers)
        all_layers = source.lengths is not None and layers[0] == 0 and not remainder
        if all_layers:
            scale, sinks = scales.of_requests(num_requests), scales.sinks_of_requests(num_requests)
        else:
            scale, sinks = scales.of_layers(layers), scales.sinks_of_layers(layers)
        return PagedLayers(
            key_pages=readable.keys,
            value_pages=readable.values,
            pages=readable.pages,
            lengths=source.lengths,
            max_tokens=source.max_tokens,
            scale=scale,
            layers=layers,
            value_scales=[scales.values[layer] for layer in layers],
            sinks=sinks,
        )

    def column_sums(
        self, layer: int, blocks: torch.Tensor, query: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """Return the attention that a chunk's queries pay to each token of an uncompressed prompt.

        Args:
            layer: layer index on this worker.
            blocks: ``[ceil(tokens / bs)]`` int64, vLLM block ids of the prompt so far.
            query: ``[r, Hq, D]``, the chunk's queries.
            tokens: tokens computed so far, including the chunk.

        Returns:
            ``[Hq, tokens]`` float32.
        """
        readable = self.mover.open(self.pool.flat_ids(layer, blocks), Reads.COLUMN_SUMS)
        return column_sums(
            query,
            readable.keys,
            readable.pages,
            tokens,
            self.scales.logits[layer],
            self.scales.sinks_of(layer),
        )

    def run(self, jobs: Sequence[PackJob]) -> dict[str, torch.Tensor]:
        """Pack requests without reading any result on the host.

        Returns:
            By request id, the number of pages ``[L]`` that each layer keeps, on the device.
        """
        kept = dict[str, torch.Tensor]()
        for group in self._groups(jobs):
            with ExitStack() as stopwatches:
                for job in group:
                    if job.stopwatch is not None:
                        stopwatches.enter_context(job.stopwatch.running())
                counts = self._pack(group)
            kept |= {job.pack_request.request_id: n for job, n in zip(group, counts, strict=True)}
        return kept

    def add_groups(self, pack_request: PackRequest, blocks: torch.Tensor) -> None:
        """Pack the tokens since the last packing in k4v3, all of them.

        Args:
            blocks: ``[n]`` int64, vLLM block ids of the request's tokens up to the last one added.
        """
        pool, plan = self.pool, pack_request.plan
        assert pack_request.destination is not None, pack_request
        tokens, device = plan.tokens, pool.pages.device
        pages = pool.flat_ids_in_all_layers(blocks[len(blocks) - tokens // plan.block_size :])
        targets = pool.destination(pack_request.destination).view(-1, self.num_layers).T.int()
        slots = torch.arange(tokens, dtype=torch.int32, device=device)
        count = targets.shape[1]
        per_layer = torch.ones(self.num_layers, dtype=torch.int32, device=device)
        self.mover.move(
            Move(
                source=SourcePages(pages=pages, lengths=None, max_tokens=tokens),
                kept=slots.expand(self.num_layers, pool.pages.shape[1], -1),
                counts=per_layer * count,
                targets=targets,
                total=self.num_layers * count,
                in_place=pack_request.in_place,
                merging=None,
                group_tokens=per_layer * tokens,
            )
        )
        pool.add_groups(pack_request.request_id, targets, tokens, plan.page_tokens, len(blocks))

    def _groups(self, jobs: Sequence[PackJob]) -> Iterator[list[PackJob]]:
        """Yield uncompressed prompts one by one, then groups of jobs with an equal `_group_key`."""
        yield from ([job] for job in jobs if job.pack_request.nothing_dropped)
        partly_packed = [job for job in jobs if not job.pack_request.nothing_dropped]
        ordered = sorted(
            partly_packed, key=lambda job: (_group_key(job), job.pack_request.plan.tokens)
        )
        for _, equal_keys in groupby(ordered, key=_group_key):
            group = list(equal_keys)
            # Size launches for the longest request (the last) and the most pages of any request.
            largest = max((job.pack_request.plan for job in group), key=lambda plan: plan.pages)
            plan = replace(largest, tokens=group[-1].pack_request.plan.tokens)
            launch_size = requests_per_pack(plan, self.pool.max_layer_tokens)
            for start in range(0, len(group), launch_size):
                yield group[start : start + launch_size]

    def _pack(self, jobs: Sequence[PackJob]) -> list[torch.Tensor]:
        """Pack one group; return the pages ``[L]`` of each request's layers."""
        pool, method, pack_requests = self.pool, jobs[0].method, [job.pack_request for job in jobs]
        plan, layers, source = pack_requests[0].plan, self.num_layers, self._source_of(jobs)
        if plan.keeps_all:
            return [self._pack_all(pack_requests[0], source)]
        # Requests with a slot in the pool may be packed again, so the method keeps state for them.
        packed_again = all(pack_request.request_id in pool for pack_request in pack_requests)
        observed = self._observe(jobs, source)
        request_counts, request_targets, max_pages = [], [], 0
        for index, pack_request in enumerate(pack_requests):
            rows = slice(index * layers, (index + 1) * layers)
            counts, targets, max_request_pages = self._divide(
                method, pack_request, observed[rows], source.slice_rows(rows)
            )
            request_counts.append(counts)
            request_targets.append(targets)
            max_pages = max(max_pages, max_request_pages)
        counts, scores = torch.cat(request_counts), method.scores(observed)
        del observed
        protected = self.protected.before(pack_requests, source, heads=scores.shape[1])
        guarded = None if protected is None else ProtectedTokens(slots=protected)
        kept = kept_slots(
            scores,
            source.tokens,
            counts,
            window=plan.window,
            tail=plan.tail,
            page_tokens=plan.page_tokens,
            max_layer_pages=max_pages,
            selector=method.selector,
            protected=guarded,
        )
        del scores
        move = Move(
            source=source,
            kept=kept,
            counts=counts,
            targets=torch.cat(request_targets)[:, :max_pages],
            total=sum(pack_request.plan.pages for pack_request in pack_requests),
            in_place=any(pack_request.in_place for pack_request in pack_requests),
            merging=self._merging(method, pack_requests, source, kept.shape[1])
            if method.merge
            else None,
            group_tokens=_group_tokens(plan, counts),
        )
        pool_sums = pool.sums if packed_again and Reads.COLUMN_SUMS in method.reads else None
        sums = None if pool_sums is None else pool_sums.read(source.pages)
        thresholds = self.mover.move(move)
        if guarded is not None:
            # Only after the move and `_merging`, which need the slots from before it.
            self.protected.note(pack_requests, kept, guarded.slots)
        if packed_again and thresholds is not None and pool.thresholds is not None:
            slots = pool.slots([pack_request.request_id for pack_request in pack_requests])
            pool.thresholds.write(slots, thresholds.view(len(pack_requests), layers, -1))
        if sums is not None and pool_sums is not None:
            pool_sums.write(move.targets, counts, sums.gather(2, kept.clamp(min=0).long()))
        for observer in self.observers:
            for pack_request, request_kept, page_counts in zip(
                pack_requests, kept.split(layers), request_counts, strict=True
            ):
                observer(pack_request, request_kept, page_counts)
        return request_counts

    def _pack_all(self, pack_request: PackRequest, source: SourcePages) -> torch.Tensor:
        """Pack all tokens of a prompt; return the pages ``[L]`` of its layers."""
        pool, plan, heads = self.pool, pack_request.plan, self.pool.pages.shape[1]
        assert pack_request.destination is not None, pack_request
        device, tokens = pool.pages.device, plan.tokens - plan.tail
        counts = torch.full((self.num_layers,), plan.full_pages, dtype=torch.int32, device=device)
        slots = torch.arange(tokens, dtype=torch.int32, device=device)
        kept = slots.expand(self.num_layers, heads, -1)
        free = pool.destination(pack_request.destination)
        group_tokens = _group_tokens(plan, counts)
        targets = pool.assign(
            pack_request.request_id,
            free,
            counts,
            pack_request.tokens // pool.block_size,
            group_tokens,
        )
        self.mover.move(
            Move(
                source=source,
                kept=kept,
                counts=counts,
                targets=targets[:, : plan.full_pages],
                total=plan.pages,
                in_place=pack_request.in_place,
                merging=None,
                group_tokens=group_tokens,
            )
        )
        for observer in self.observers:
            observer(pack_request, kept, counts)
        return counts

    def _source_of(self, jobs: Sequence[PackJob]) -> SourcePages:
        """Return the jobs' pages: an uncompressed prompt's blocks, or this step's page tables."""
        if jobs[0].pack_request.nothing_dropped:
            assert jobs[0].blocks is not None, jobs
            pages = self.pool.flat_ids_in_all_layers(jobs[0].blocks)
            max_tokens = jobs[0].pack_request.plan.tokens
            return SourcePages(pages=pages, lengths=None, max_tokens=max_tokens)
        plans = [job.pack_request.plan for job in jobs]
        max_pages = max(-(-plan.tokens // plan.block_size) for plan in plans)
        return self.source_pages(*self.pool.row_tables([job.row for job in jobs], max_pages))

    def source_pages(self, tables: torch.Tensor, lengths: torch.Tensor) -> SourcePages:
        """Return the pages of batch rows as `SourcePages`.

        Args:
            tables: ``[R, L, W]`` int64, flat pages.
            lengths: ``[R, L]`` int32, in tokens.
        """
        if lengths.device.type == "cpu":
            # Reading the longest length is free on a CPU, and tables are as wide as the largest.
            tables = tables[..., : -(-int(lengths.max()) // self.pool.block_size)]
        max_tokens = tables.shape[2] * self.pool.block_size
        return SourcePages(
            pages=tables.flatten(0, 1), lengths=lengths.flatten(), max_tokens=max_tokens
        )

    def _observe(self, jobs: Sequence[PackJob], source: SourcePages) -> list[LayerObservation]:
        """Score every row, as many per launch as fit into memory."""
        method, layers, observed = jobs[0].method, self.num_layers, dict[int, LayerObservation]()
        plan = jobs[0].pack_request.plan
        window, uses_ring = plan.window, jobs[0].pack_request.uses_ring_queries
        ring_queries = self._queries_in_ring(jobs, window) if uses_ring else None
        launch_size = self.rows_per_launch(source.max_tokens)
        for scored in (True, False):
            rows = [
                row
                for row in range(len(source.pages))
                if method.scores_layer(row % layers) is scored
            ]
            reads = method.reads if scored else method.allocator.reads
            for start in range(0, len(rows), launch_size):
                launch_rows = rows[start : start + launch_size]
                launch_source = _select_source_rows(source, launch_rows)
                paged_layers = self.paged_layers(
                    launch_source, [row % layers for row in launch_rows], reads
                )
                attention = sums = None
                if Reads.WINDOW in reads:
                    if ring_queries is None:
                        query = self._queries(jobs, launch_rows, window)
                    else:
                        query = _select_rows(ring_queries, launch_rows)
                    attention = method.attention(
                        paged_layers,
                        query,
                        plan.allocator_window,
                        scored_by_output=plan.scored_by_output,
                    )
                if Reads.COLUMN_SUMS in reads:
                    sums = self._sums(jobs, launch_rows, launch_source)
                observations = method.observe(paged_layers, window, attention, sums, scored=scored)
                observed |= zip(launch_rows, observations, strict=True)
        return [observed[row] for row in range(len(source.pages))]

    def _queries_in_ring(self, jobs: Sequence[PackJob], window: int) -> torch.Tensor | None:
        """Return the last ``[N, w, Hq, D]`` queries of every row, or None if none are needed."""
        if Reads.WINDOW not in jobs[0].method.reads:
            return None
        assert self.pool.ring is not None, jobs
        slots = self.pool.slots([job.pack_request.request_id for job in jobs])
        return self.pool.ring.latest(slots, [job.pack_request.tokens for job in jobs], window)

    def _queries(self, jobs: Sequence[PackJob], rows: Sequence[int], window: int) -> torch.Tensor:
        """Return the last ``[n, w, Hq, D]`` queries of the given rows of prompts.

        Raises:
            RuntimeError: the worker has kept another number of queries than the window has.
        """
        queries = []
        for row in rows:
            request_index, layer = divmod(row, self.num_layers)
            query = jobs[request_index].queries.get(layer)
            if query is None or len(query) != window:
                raise RuntimeError(
                    f"request {jobs[request_index].pack_request.request_id}: packing its prompt"
                    f" needs {window} window queries, but the worker kept"
                    f" {0 if query is None else len(query)}"
                )
            queries.append(query)
        return queries[0][None] if len(queries) == 1 else torch.stack(queries)

    def _sums(
        self, jobs: Sequence[PackJob], rows: Sequence[int], source: SourcePages
    ) -> torch.Tensor:
        """Return the attention sums of every slot in the given rows.

        Returns:
            ``[n, Hq, S]`` for an uncompressed prompt, else the pool's means ``[n, Hkv, S]``.
        """
        if source.lengths is None:
            sums = [jobs[0].sums[row] for row in rows]
            return sums[0][None] if len(sums) == 1 else torch.stack(sums)
        assert self.pool.sums is not None, jobs
        return self.pool.sums.read(source.pages)

    def _divide(
        self,
        method: Method,
        pack_request: PackRequest,
        observed: Sequence[LayerObservation],
        source: SourcePages,
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Divide a request's pages among its layers.

        Returns:
            Page counts ``[L]`` int32, the pages ``[L, max_blocks]`` int32, and an upper bound on
            the page counts that the host knows without a sync.
        """
        pool, plan = self.pool, pack_request.plan
        first_block = pack_request.tokens // pool.block_size
        if pack_request.destination is None:
            targets, counts = pool.packed(pack_request.request_id)
            pool.set_first_block(pack_request.request_id, first_block)
            return counts, targets, min(max_layer_pages(plan, counts), pool.max_layer_pages)
        lengths = source.lengths
        caps = None if lengths is None else ((lengths - plan.probe) // pool.block_size).long()
        pages = method.layer_pages(plan, observed, caps)
        counts = to_device(pages, torch.int32, pool.pages.device)
        free = pool.destination(pack_request.destination)[: plan.pages]
        targets = pool.assign(
            pack_request.request_id, free, counts, first_block, _group_tokens(plan, counts)
        )
        return counts, targets, min(max_layer_pages(plan, pages), pool.max_layer_pages)

    def _merging(
        self, method: Method, pack_requests: Sequence[PackRequest], source: SourcePages, heads: int
    ) -> Merging:
        """Return how the dropped tokens of these requests are merged."""
        plan, thresholds = pack_requests[0].plan, None
        if self.pool.thresholds is not None:
            slots = self.pool.slots([pack_request.request_id for pack_request in pack_requests])
            thresholds = self.pool.thresholds.read(slots).flatten(0, 1)
        if source.lengths is None:
            tail_pages = source.pages[:, -1]
        else:
            last_page = (source.lengths.long() - 1) // self.pool.block_size
            tail_pages = source.pages.gather(1, last_page[:, None])[:, 0]
        min_tokens = plan.layer_tokens(plan.floor_pages) if source.lengths is None else 1
        return Merging(
            values_only=method.values_only,
            tail=plan.tail,
            tail_pages=tail_pages,
            thresholds=thresholds,
            min_tokens=min_tokens,
            protected=self.protected.all_slots(pack_requests, source, heads),
        )


def _group_tokens(plan: PagePlan, counts: torch.Tensor) -> torch.Tensor | None:
    """Return ``[L]`` int32, the tokens in each layer's pages, if they hold groups; else None.

    Args:
        plan: the plan of a request that has dropped no token.
        counts: ``[L]`` int32, pages of each layer.
    """
    if plan.packed_page_tokens is None:
        return None
    return (counts * plan.packed_page_tokens).clamp(max=plan.tokens - plan.tail)


def _group_key(job: PackJob) -> tuple[str, bool, bool, int, int, bool, int, tuple[int, int]]:
    """Return the key on which requests must agree to share kernel launches.

    It consists of their settings, the source and number of their queries, their tail, and their
    number of protected tokens (before the window, and in total).
    """
    pack_request, plan = job.pack_request, job.pack_request.plan
    protected = plan.protected_in_pages, count_before(plan.spans, pack_request.tokens)
    queries = pack_request.uses_ring_queries, plan.window, plan.allocator_window or plan.window
    return (
        str(pack_request.settings),
        pack_request.prefill,
        *queries,
        plan.scored_by_output,
        plan.tail,
        protected,
    )


def _select_source_rows(source: SourcePages, rows: Sequence[int]) -> SourcePages:
    """Return the given rows, without copying an index to the device."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return source.slice_rows(slice(rows[0], rows[-1] + 1))
    assert source.lengths is None, "rows of different lengths are all scored"
    return replace(source, pages=_select_rows(source.pages, rows))


def _select_rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the given rows of a tensor; a view if they are contiguous."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return values[rows[0] : rows[-1] + 1]
    return torch.stack([values[row] for row in rows])
