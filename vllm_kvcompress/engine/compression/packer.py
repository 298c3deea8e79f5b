"""Scores, selects and moves the tokens of requests after a step, without device syncs.

The same path packs prompts at the end of prefill, prompts in pieces, and growing outputs. A row is
one layer of one request. The rows of a single prompt that has dropped no token are equally long and
need no `lengths` tensor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from vllm.utils.torch_utils import async_tensor_h2d

from kvcompress_kernels.column_sums import column_sums
from vllm_kvcompress.devices import to_device
from vllm_kvcompress.engine.compression.merging import Merging
from vllm_kvcompress.engine.compression.mover import Move, Mover, SourcePages
from vllm_kvcompress.engine.compression.protected_slots import ProtectedSlots
from vllm_kvcompress.engine.compression.reports import Stopwatch
from vllm_kvcompress.engine.messages.step import AddGroups, PackRequest, ScoredByRing
from vllm_kvcompress.engine.pages.draft_pages import DraftMove
from vllm_kvcompress.engine.pages.pool import PackedBlocks
from vllm_kvcompress.engine.pages.scales import Scales
from vllm_kvcompress.errors import quoted_id
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.budget_spec import LayerStats
from vllm_kvcompress.methods.kept_slots import kept_in_pages, kept_slots, max_layer_pages
from vllm_kvcompress.methods.method import Method, join_observations
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.paged_layers import PagedLayers
from vllm_kvcompress.methods.protected import ProtectedTokens
from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.planning.memory import (
    MAX_SCORED_PROMPTS,
    requests_per_pack,
    scored_tokens,
)


@dataclass(slots=True, kw_only=True)
class PackJob:
    """A request to pack.

    Args:
        pack_request: its entry in the scheduler's plan.
        method: the compression method.
        batch_row: its row in this step's batch.
        blocks: for a prompt, ``[n]`` int64 vLLM block ids of its tokens. The request no longer owns
            blocks whose tokens are packed already.
        queries: for a prompt without a look-ahead, by layer whose window is scored, the last
            ``[w, Hq, D]`` queries or those of the probe. Other queries are in the page pool's ring.
        log_sums: by layer in `queries`, the log-sum-exp ``[Hq, w]`` float32 of each query's scaled
            logits, if the attention backend returned it.
        sums: for a prompt that has dropped no token, by layer that needs them, column sums
            ``[Hq, S]`` float32. Other sums are in the page pool.
        stopwatch: measures the packing time; None to skip the measurement.
        draft_pages: ``[D, n]`` int64, flat pages with the tokens of the request's first n blocks in
            the layers of a draft model; None without one.
    """

    pack_request: PackRequest
    method: Method
    batch_row: int = 0
    blocks: torch.Tensor | None = None
    queries: Mapping[int, torch.Tensor] = field(default_factory=dict)
    log_sums: Mapping[int, torch.Tensor] = field(default_factory=dict)
    sums: Mapping[int, torch.Tensor] = field(default_factory=dict)
    stopwatch: Stopwatch | None = None
    draft_pages: torch.Tensor | None = None


Observer = Callable[[PackRequest, torch.Tensor, torch.Tensor], None]
"""Called after a request is packed.

Its arguments are the plan's entry, the slots kept in pages ``[L, Hkv, n]`` int32 (-1 after a
layer's last slot), and the number of pages ``[L]`` int32 of each layer.
"""


class Packer:
    """Packs requests in one worker's page pool, after the forward pass.

    Requests with the same method share kernel launches, up to the memory of one longest prompt.

    Args:
        mover: reads and writes the pages of this worker's layers.
        scales: scales of each layer.
        num_layers: compressed layers on this worker, L.
    """

    def __init__(self, mover: Mover, *, scales: Scales, num_layers: int) -> None:
        self.mover, self.pool = mover, mover.pool
        self.scales, self.num_layers = scales, num_layers
        self.protected = ProtectedSlots(num_layers)
        self.observers: list[Observer] = []

    def rows_per_launch(self, tokens: int) -> int:
        """Return how many rows of `tokens` tokens one launch scores."""
        limit = scored_tokens(self.num_layers, self.pool.max_layer_tokens)
        return max(min(limit // tokens, self.num_layers * MAX_SCORED_PROMPTS), 1)

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
            value_scale=1.0 if source.lengths is not None else scales.values_of_layers(layers),
            sinks=sinks,
            offsets=readable.offsets,
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
            By request id, the number of pages ``[L]`` that each layer keeps, on the device. A
            request that adds groups has an entry only if this completes its prompt.
        """
        pages = dict[str, torch.Tensor]()
        for batch in self._batches(jobs):
            with ExitStack() as stopwatches:
                for job in batch:
                    if job.stopwatch is not None:
                        stopwatches.enter_context(job.stopwatch.running(shared_by=len(batch)))
                first = batch[0].pack_request
                if isinstance(first, AddGroups):
                    pages |= self._add_groups(first, batch[0])
                else:
                    pages |= self._pack(batch)
        return pages

    def _add_groups(self, pack_request: AddGroups, job: PackJob) -> dict[str, torch.Tensor]:
        """Pack all tokens since the last packing, in k4v3. Return the same as `run`.

        Args:
            job: its `blocks` are those of the request's tokens up to the last one added.
        """
        pool, plan, tokens = self.pool, pack_request.plan, pack_request.added_tokens
        blocks = job.blocks
        assert pack_request.destination is not None, pack_request
        assert blocks is not None, pack_request
        # A prompt may end before it has filled another page.
        if tokens:
            device = pool.pages.device
            pages = pool.flat_ids_in_all_layers(blocks[len(blocks) - tokens // plan.block_size :])
            count = -(-tokens // plan.page_tokens)
            destination = pool.destination(pack_request.destination)[: self.num_layers * count]
            targets = destination.view(count, self.num_layers).T.int()
            slots = torch.arange(tokens, dtype=torch.int32, device=device)
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
                    drafts=self._draft_move([job]),
                )
            )
            leading = blocks[: pack_request.leading_blocks]
            pool.add_groups(
                pack_request.request_id,
                targets,
                tokens,
                plan.page_tokens,
                len(blocks),
                leading=pool.flat_ids_in_all_layers(leading) if len(leading) else None,
            )
        if not pack_request.completes_prompt:
            return {}
        kept, counts = self._all_slots(plan)
        self._notify(pack_request, kept, counts)
        return {pack_request.request_id: counts}

    def _batches(self, jobs: Sequence[PackJob]) -> Iterator[list[PackJob]]:
        """Yield the jobs in batches that share kernel launches.

        Jobs with an equal `_batch_key` share launches, as many as fit into memory. Added groups,
        and some prompts (`_packs_alone`), are packed alone.
        """
        yield from ([job] for job in jobs if isinstance(job.pack_request, AddGroups))
        batches = dict[tuple[Any, ...], list[PackJob]]()
        for job in jobs:
            if isinstance(job.pack_request, AddGroups):
                continue
            if _packs_alone(job):
                yield [job]
            else:
                batches.setdefault(self._batch_key(job), []).append(job)
        for batch in batches.values():
            batch.sort(key=lambda job: job.pack_request.plan.tokens)
            # Size launches for the longest request (the last) and the most pages of any request.
            largest = max((job.pack_request.plan for job in batch), key=lambda plan: plan.pages)
            plan = replace(largest, tokens=batch[-1].pack_request.plan.tokens)
            staged = any(job.pack_request.in_place for job in batch)
            launch_size = requests_per_pack(plan, self.pool.max_layer_tokens, staged=staged)
            for start in range(0, len(batch), launch_size):
                yield batch[start : start + launch_size]

    def _batch_key(self, job: PackJob) -> tuple[Any, ...]:
        """Return the key on which requests must agree to share kernel launches.

        It consists of the method, how the tokens are read, the source and number of queries,
        the number of first and of last tokens that are always kept, and the number of protected
        tokens (between these, and in total with the first ones). With merging it also has the tail
        length.
        """
        pack_request, plan = job.pack_request, job.pack_request.plan
        method = job.method
        return (
            (method.allocator, method.scorer, method.selector, method.merge),
            pack_request.prefill,
            pack_request.reads_page_tables,
            pack_request.destination is None,
            pack_request.request_id in self.pool,
            isinstance(pack_request, ScoredByRing),
            plan.window,
            plan.allocator_window or plan.window,
            plan.scored_by_output,
            plan.kept_after,
            plan.leading_tokens,
            plan.tail if job.method.merge else 0,
            plan.page_tokens,
            plan.protected_in_pages,
            count_before(plan.always_kept_spans, pack_request.tokens),
        )

    def _pack(self, jobs: Sequence[PackJob]) -> dict[str, torch.Tensor]:
        """Pack one batch. Return the same as `run`."""
        pool, method, pack_requests = self.pool, jobs[0].method, [job.pack_request for job in jobs]
        plan, layers, source = pack_requests[0].plan, self.num_layers, self._source_of(jobs)
        # Requests with a slot in the pool may be packed again, so the method keeps state for them.
        packed_again = all(pack_request.request_id in pool for pack_request in pack_requests)
        observed = self._observe(jobs, source)
        divided = [
            self._divide(method, pack_request, observed[rows], source.slice_rows(rows))
            for pack_request, rows in zip(
                pack_requests, _row_ranges(len(jobs), layers), strict=True
            )
        ]
        request_counts = [counts for counts, _ in divided]
        max_pages = max(max_request_pages for _, max_request_pages in divided)
        counts, scores = _concatenated(request_counts), method.scores(observed)
        del observed
        in_pages = _concatenated(
            [
                kept_in_pages(pack_request.plan, counts)
                for pack_request, counts in zip(pack_requests, request_counts, strict=True)
            ]
        )
        group_tokens = None if plan.packed_page_tokens is None else in_pages
        targets = self._assign(
            pack_requests,
            counts.view(-1, layers),
            None if group_tokens is None else group_tokens.view(-1, layers),
            source.pages[:, 0].view(-1, layers) if plan.leading_tokens else None,
        )
        protected = self.protected.before(pack_requests, source, heads=scores.shape[1])
        guarded = None if protected is None else ProtectedTokens(slots=protected)
        kept = kept_slots(
            scores,
            source.tokens,
            in_pages,
            window=plan.window,
            tail=self._tails(pack_requests),
            width=max(
                min(max_pages * plan.page_tokens, pack_request.plan.max_tokens_in_pages)
                for pack_request in pack_requests
            ),
            selector=method.selector,
            protected=guarded,
            leading=plan.leading_tokens,
        )
        del scores
        move = Move(
            source=source,
            kept=kept,
            counts=counts,
            targets=_concatenated(targets)[:, :max_pages],
            total=sum(pack_request.plan.pages for pack_request in pack_requests),
            in_place=any(pack_request.in_place for pack_request in pack_requests),
            merging=self._merging(method, pack_requests, source, kept.shape[1])
            if method.merge
            else None,
            group_tokens=group_tokens,
            drafts=self._draft_move(jobs),
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
        for pack_request, request_kept, page_counts in zip(
            pack_requests, kept.split(layers), request_counts, strict=True
        ):
            self._notify(pack_request, request_kept, page_counts)
        request_ids = [pack_request.request_id for pack_request in pack_requests]
        return dict(zip(request_ids, request_counts, strict=True))

    def _tails(self, pack_requests: Sequence[PackRequest]) -> int | torch.Tensor:
        """Return the tail tokens of all rows: one number if they are equal, else ``[N]`` int32."""
        tails = [pack_request.plan.tail for pack_request in pack_requests]
        return tails[0] if len(set(tails)) == 1 else self._per_row(tails)

    def _per_row(self, values: Sequence[int]) -> torch.Tensor:
        """Return each value once per layer, ``[R * L]`` int32 on the device, without a sync."""
        per_row = [value for value in values for _ in range(self.num_layers)]
        device = self.pool.pages.device
        on_device: torch.Tensor = async_tensor_h2d(per_row, device=device, dtype=torch.int32)
        return on_device

    def _all_slots(self, plan: PagePlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kept slots and page counts, as for `Observer`, if a plan keeps all tokens."""
        device, layers = self.pool.pages.device, self.num_layers
        counts = torch.full((layers,), plan.full_pages, dtype=torch.int32, device=device)
        end = plan.tokens - plan.tail
        slots = torch.arange(plan.leading_tokens, end, dtype=torch.int32, device=device)
        return slots.expand(layers, self.pool.pages.shape[1], -1), counts

    def _notify(self, pack_request: PackRequest, kept: torch.Tensor, counts: torch.Tensor) -> None:
        for observer in self.observers:
            observer(pack_request, kept, counts)

    def _source_of(self, jobs: Sequence[PackJob]) -> SourcePages:
        """Return the jobs' pages: uncompressed prompts' blocks, or this step's page tables."""
        plans = [job.pack_request.plan for job in jobs]
        max_tokens = max(plan.tokens for plan in plans)
        if jobs[0].pack_request.reads_page_tables:
            max_pages = max(-(-plan.tokens // plan.block_size) for plan in plans)
            tables, lengths = self.pool.row_tables([job.batch_row for job in jobs], max_pages)
            if isinstance(jobs[0].pack_request, ScoredByRing):
                # The step's lengths include draft tokens, which may be rejected.
                lengths = self.pool.lengths_at(
                    [job.pack_request.request_id for job in jobs],
                    [job.pack_request.tokens for job in jobs],
                )
            return self.source_pages(tables, lengths)
        request_blocks = [job.blocks for job in jobs if job.blocks is not None]
        assert len(request_blocks) == len(jobs), jobs
        if len(jobs) == 1:
            pages = self.pool.flat_ids_in_all_layers(request_blocks[0])
            return SourcePages(pages=pages, lengths=None, max_tokens=max_tokens)
        blocks = pad_sequence(request_blocks, batch_first=True)
        return SourcePages(
            pages=self.pool.flat_ids_in_all_layers(blocks[:, None]).flatten(0, 1),
            lengths=self._per_row([plan.tokens for plan in plans]),
            max_tokens=max_tokens,
        )

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

    def _observe(self, jobs: Sequence[PackJob], source: SourcePages) -> LayerStats:
        """Score every row, as many per launch as fit into memory."""
        method, layers, num_rows = jobs[0].method, self.num_layers, len(source.pages)
        ring_indices = self._ring_indices(jobs)
        scored = [row for row in range(num_rows) if method.scores_layer(row % layers)]
        if len(scored) == num_rows:
            parts = [
                (rows, self._observe_rows(jobs, source, rows, ring_indices))
                for rows in self._launches(scored, source.max_tokens)
            ]
            return join_observations([part for _, part in parts], [len(rows) for rows, _ in parts])
        # Some layers reuse another layer's scores. Observe both kinds separately, then restore the
        # order.
        by_row = dict[int, LayerStats]()
        reusing = [row for row in range(num_rows) if not method.scores_layer(row % layers)]
        for kind in (scored, reusing):
            for rows in self._launches(kind, source.max_tokens):
                part = self._observe_rows(jobs, source, rows, ring_indices, scored=kind is scored)
                by_row |= {row: part[index : index + 1] for index, row in enumerate(rows)}
        return join_observations([by_row[row] for row in range(num_rows)], [1] * num_rows)

    def _launches(self, rows: Sequence[int], tokens: int) -> Iterator[Sequence[int]]:
        """Yield the rows that each launch scores, given the tokens of the longest row."""
        size = self.rows_per_launch(tokens)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def _observe_rows(
        self,
        jobs: Sequence[PackJob],
        source: SourcePages,
        rows: Sequence[int],
        ring_indices: torch.Tensor | None,
        *,
        scored: bool = True,
    ) -> LayerStats:
        """Return the observations of some rows, without scores unless `scored`.

        Args:
            ring_indices: where the ring has the window queries of all rows, if it stores them.
        """
        method, plan = jobs[0].method, jobs[0].pack_request.plan
        reads = method.reads if scored else method.allocator.reads
        row_source = _select_source_rows(source, rows)
        paged_layers = self.paged_layers(row_source, [row % self.num_layers for row in rows], reads)
        attention = sums = log_sums = None
        if Reads.WINDOW in reads:
            if ring_indices is None:
                query = self._queries(jobs, rows, plan.window)
                if not jobs[0].pack_request.reads_page_tables:
                    log_sums = self._log_sums(jobs, rows, plan.window)
            else:
                assert self.pool.ring is not None, jobs
                query = self.pool.ring.gather(_select_rows(ring_indices, rows))
            attention = method.attention(
                paged_layers,
                query,
                plan.allocator_window,
                scored_by_output=plan.scored_by_output,
                row_log_sums=log_sums,
            )
        if Reads.COLUMN_SUMS in reads:
            sums = self._sums(jobs, rows, row_source)
        return method.observe(paged_layers, plan.window, attention, sums, scored=scored)

    def _ring_indices(self, jobs: Sequence[PackJob]) -> torch.Tensor | None:
        """Return where the ring has every row's window queries ``[N, w]``, if it stores them."""
        pack_request, pool = jobs[0].pack_request, self.pool
        if not isinstance(pack_request, ScoredByRing) or Reads.WINDOW not in jobs[0].method.reads:
            return None
        assert pool.ring is not None, jobs
        slots = pool.slots([job.pack_request.request_id for job in jobs])
        tokens = [job.pack_request.tokens for job in jobs]
        return pool.ring.indices(slots, tokens, pack_request.plan.window)

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
                shown = quoted_id(jobs[request_index].pack_request.request_id)
                raise RuntimeError(
                    f"request {shown}: packing its prompt"
                    f" needs {window} window queries, but the worker kept"
                    f" {0 if query is None else len(query)}"
                )
            queries.append(query)
        return queries[0][None] if len(queries) == 1 else torch.stack(queries)

    def _log_sums(
        self, jobs: Sequence[PackJob], rows: Sequence[int], window: int
    ) -> torch.Tensor | None:
        """Return the log-sum-exp ``[n, Hq, w]`` of the rows' queries, or None if one is missing."""
        log_sums = []
        for row in rows:
            request_index, layer = divmod(row, self.num_layers)
            layer_log_sums = jobs[request_index].log_sums.get(layer)
            if layer_log_sums is None or layer_log_sums.shape[1] != window:
                return None
            log_sums.append(layer_log_sums)
        return log_sums[0][None] if len(log_sums) == 1 else torch.stack(log_sums)

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
        observed: LayerStats,
        source: SourcePages,
    ) -> tuple[torch.Tensor, int]:
        """Divide a request's pages among its layers.

        Returns:
            Page counts ``[L]`` int32, and an upper bound on them that the host knows without a
            sync.
        """
        pool, plan = self.pool, pack_request.plan
        if pack_request.destination is None:
            _, counts = pool.packed(pack_request.request_id)
            return counts, min(max_layer_pages(plan, counts), pool.max_layer_pages)
        caps = None
        if pack_request.reads_page_tables:
            assert source.lengths is not None, pack_request
            caps = ((source.lengths - plan.probe) // pool.block_size).long()
        pages = method.layer_pages(plan, observed, caps)
        counts = to_device(pages, torch.int32, pool.pages.device)
        return counts, min(max_layer_pages(plan, pages), pool.max_layer_pages)

    def _assign(
        self,
        pack_requests: Sequence[PackRequest],
        counts: torch.Tensor,
        group_tokens: torch.Tensor | None,
        leading: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Assign the requests' new pages; return each request's pages ``[L, max_blocks]`` int32.

        A request without a destination keeps its pages.

        Args:
            counts: ``[R, L]`` int32, pages of each layer.
            group_tokens: ``[R, L]`` int32, tokens of each layer, if the pages hold groups.
            leading: as in `PagePool.assign`.
        """
        pool, assigned = self.pool, list[PackedBlocks]()
        for pack_request in pack_requests:
            first_block = pack_request.packed_end // pool.block_size
            if pack_request.destination is None:
                pool.set_first_block(pack_request.request_id, first_block)
            else:
                blocks = PackedBlocks(
                    pack_request.request_id, pack_request.destination, first_block
                )
                assigned.append(blocks)
        if len(assigned) == len(pack_requests):
            return pool.assign(assigned, counts, group_tokens, leading)
        assert not assigned, "a batch must not mix requests with and without a destination"
        return [pool.packed(pack_request.request_id)[0] for pack_request in pack_requests]

    def _draft_move(self, jobs: Sequence[PackJob]) -> DraftMove | None:
        """Assign the jobs' draft pages, and return how to move them; None without a draft model."""
        pool, rows = self.pool, list[tuple[torch.Tensor, torch.Tensor]]()
        for job in jobs:
            plan, pages = job.pack_request.plan, job.draft_pages
            if pool.drafts is None or pages is None:
                continue
            assert job.pack_request.destination is not None, job.pack_request
            destination = pool.destination(job.pack_request.destination)
            targets = destination[len(destination) - plan.draft_pages :].view(len(pages), -1).int()
            leading, moved = pages[:, : plan.leading_blocks], pages[:, plan.leading_blocks :]
            pool.admit(job.pack_request.request_id)
            (slot,) = pool.slots([job.pack_request.request_id])
            pool.drafts.assign(slot, leading, targets)
            rows += zip(moved, targets, strict=True)
        if not rows:
            return None
        counts = [len(targets) for _, targets in rows]
        return DraftMove(
            pages=pad_sequence([pages for pages, _ in rows], batch_first=True),
            counts=async_tensor_h2d(counts, device=pool.pages.device, dtype=torch.int32),
            targets=pad_sequence([targets for _, targets in rows], batch_first=True),
            total=sum(counts),
        )

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
        min_tokens = 1
        if not pack_requests[0].reads_page_tables:
            min_tokens = plan.layer_tokens(plan.floor_pages)
        return Merging(
            values_only=method.values_only,
            leading=plan.leading_tokens,
            tail=plan.tail,
            tail_pages=tail_pages,
            thresholds=thresholds,
            min_tokens=min_tokens,
            protected=self.protected.all_slots(pack_requests, source, heads),
        )


def _packs_alone(job: PackJob) -> bool:
    """Return whether a job shares no kernel launch with other requests.

    It applies only to prompts that have dropped no token. They are packed alone if

    * their method needs the whole prompt,
    * their method reads column sums, which are stored per prompt, or
    * tokens are merged, which takes the memory reserved for one prompt.
    """
    pack_request, method = job.pack_request, job.method
    return not pack_request.reads_page_tables and bool(
        method.needs_whole_prompt or Reads.COLUMN_SUMS in method.reads or method.merge
    )


def _row_ranges(num_requests: int, layers: int) -> Iterator[slice]:
    """Yield the rows of each request."""
    return (slice(index * layers, (index + 1) * layers) for index in range(num_requests))


def _concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _select_source_rows(source: SourcePages, rows: Sequence[int]) -> SourcePages:
    """Return the given rows, without copying an index to the device."""
    if len(rows) == len(source.pages):
        return source
    if rows[-1] - rows[0] + 1 == len(rows):
        return source.slice_rows(slice(rows[0], rows[-1] + 1))
    assert source.lengths is None, "rows of different lengths are all scored"
    return replace(source, pages=_select_rows(source.pages, rows))


def _select_rows(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return the given rows of a tensor; a view if they are contiguous."""
    if len(rows) == len(values):
        return values
    if rows[-1] - rows[0] + 1 == len(rows):
        return values[rows[0] : rows[-1] + 1]
    return torch.stack([values[row] for row in rows])
