"""After a step: what some requests hold, judged and packed again, in the pages they have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from vllm_kvcompress.devices import to_device
from vllm_kvcompress.engine.compression.merging import Held
from vllm_kvcompress.engine.compression.packer import Packer
from vllm_kvcompress.engine.messages.step import Addition, Repack
from vllm_kvcompress.engine.pages.layouts import Opened
from vllm_kvcompress.engine.pages.query_ring import QueryRing
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.pipeline import Method, Observed, method_of
from vllm_kvcompress.planning.memory import additions_at_once, answers_at_once, layers_at_once
from vllm_kvcompress.repacking import (
    LATEST,
    Rows,
    adds_up,
    attention_paid,
    keeps_sums,
    kept_slots,
    observe_rows,
)
from vllm_kvcompress.settings.config import CompressionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A request that is to be packed again.

    Args:
        todo: its place in the scheduler's plan.
        row: of this step's batch.
        queries: per layer the last ``[w, Hq, D]`` of a prefill; empty where the ring has them.
        blocks: of a prefill, ``[n]`` int64 vLLM block ids of its tokens; those that were packed
            are no longer its own.
    """

    todo: Repack
    row: int
    queries: Mapping[int, torch.Tensor] = field(default_factory=dict)
    blocks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the layers of some requests lie: N rows, those of a request one after the other.

    Args:
        cache: as ops read it.
        rows: the same as `repacking` takes it.
        pages: ``[N, W]`` int64 flat pages.
    """

    cache: Opened
    rows: Rows
    pages: torch.Tensor


class Repacker:
    """Packs what requests hold again, within the page pool of one worker.

    Requests of one method share their launches, as many as take no more memory than the
    compression of one longest prompt does. All of them are read before any is written, through a
    staging buffer of one KV head.

    Args:
        packer: of this worker's pages.
        ring: the last queries; None where no method reads any.
    """

    def __init__(self, packer: Packer, ring: QueryRing | None) -> None:
        self._packer, self._pool, self._ring = packer, packer.pool, ring

    def add(self, latest: Sequence[tuple[Addition, int]]) -> None:
        """Add the attention of some requests' latest queries to that of the earlier ones.

        Nothing was dropped since the first of them, so these rows are what decoding used.

        Args:
            latest: each with its row of this step's batch.
        """
        ordered = sorted(latest, key=lambda each: (each[0].latest, each[0].most))
        for _, group in groupby(ordered, key=lambda each: each[0].latest):
            together = list(group)
            at_once = additions_at_once(together[-1][0].most, self._pool.longest)
            for start in range(0, len(together), at_once):
                self._add(together[start : start + at_once])

    def _add(self, latest: Sequence[tuple[Addition, int]]) -> None:
        pool, size = self._pool, self._pool.block_size
        todos = [todo for todo, _ in latest]
        count, most = todos[0].latest, todos[-1].most
        assert self._ring is not None, latest
        assert pool.sums is not None, latest
        place = self._place(*pool.held([row for _, row in latest], most // size))
        slots = pool.slots([todo.request_id for todo in todos])
        self._add_to(place, self._ring.latest(slots, [todo.tokens for todo in todos], count))

    def add_chunk(self, layer: int, row: int, query: torch.Tensor, most: int) -> None:
        """The same of a chunk of a prefill whose first tokens are packed, in one layer.

        Args:
            row: of this step's batch.
            query: ``[r, Hq, D]``, the chunk's.
            most: tokens that the layer holds at most.
        """
        columns = min(-(-most // self._pool.block_size), self._pool.columns)
        place = self._place(*self._pool.held_in(layer, row, columns), layer)
        self._add_to(place, query[None])

    def _add_to(self, place: _Place, query: torch.Tensor) -> None:
        pool, size, lengths = self._pool, self._pool.block_size, place.rows.lengths
        assert pool.sums is not None
        at_once = layers_at_once(pool.longest, place.rows.most)
        paid = attention_paid(place.rows, query, at_once)
        before = pool.sums.read(place.pages)
        # Slots of the latest queries have what was left in their pages.
        column = torch.arange(before.shape[2], device=before.device)
        latest = column >= (lengths - query.shape[1])[:, None, None]
        pool.sums.write(
            place.pages, (lengths + size - 1) // size, before.masked_fill_(latest, 0).add_(paid)
        )

    def run(self, due: Sequence[Due]) -> dict[str, torch.Tensor]:
        """Pack all of them; how much each layer keeps stays on the device.

        Returns:
            Of each request ``[L]`` int32: pages that its layers keep.
        """
        kept = dict[str, torch.Tensor]()
        ordered = sorted(due, key=lambda each: (_alike(each), each.todo.plan.tokens))
        for _, group in groupby(ordered, key=_alike):
            together = list(group)
            # the last one is the longest, and those of one method keep as much
            largest = max((each.todo.plan for each in together), key=lambda plan: plan.pages)
            plan = replace(largest, tokens=together[-1].todo.plan.tokens)
            at_once = answers_at_once(plan, self._pool.longest)
            for start in range(0, len(together), at_once):
                some = together[start : start + at_once]
                counts = self._run(method_of(some[0].todo.settings), some)
                kept |= {each.todo.request_id: n for each, n in zip(some, counts, strict=True)}
        return kept

    def warm_up(
        self,
        settings: CompressionConfig,
        window: int,
        queries: tuple[int, int, torch.dtype] | None = None,
    ) -> None:
        """Pack what nobody holds: the null block, as if it were the first request's of a batch.

        Args:
            window: queries that choose.
            queries: query heads, head dim and dtype of a prefill's; None for an answer's.
        """
        layers, size = self._packer.num_layers, self._pool.block_size
        pages = layers * (window // size + 2)
        plan = PagePlan(
            num_layers=layers,
            tokens=(window // size + 4) * size,
            block_size=size,
            window=window,
            budget=pages // layers * size,
            pages=pages,
            total=pages * size,
        )
        asked: dict[int, torch.Tensor] = {}
        if queries is not None:
            heads, dim, dtype = queries
            nothing = torch.zeros(window, heads, dim, dtype=dtype, device=self._pool.pages.device)
            asked = dict.fromkeys(range(layers), nothing)
        self._pool.admit("")
        for destination in ((0,) * plan.blocks, ()):
            if asked and not destination:
                # a prompt's layers divide anew at every boundary
                continue
            todo = Repack(
                request_id="",
                settings=settings,
                plan=plan,
                tokens=plan.tokens,
                destination=destination,
                prefill=queries is not None,
            )
            self._pool.rehearse(plan.tokens)
            self.run([Due(todo=todo, row=0, queries=asked)])
        if queries is None and adds_up(settings):
            self._warm_up_adding(settings.decode_interval)
        if queries is not None and keeps_sums(settings):
            self._warm_up_chunks(*queries)
        self._pool.rehearse(0)
        self._pool.forget("")

    def _warm_up_chunks(self, heads: int, dim: int, dtype: torch.dtype) -> None:
        """As many rows at once as there are kernels of."""
        size = self._pool.block_size
        for latest in [2**power for power in range(3, 8)]:
            tokens = (latest // size + 1) * size
            self._pool.rehearse(tokens)
            query = torch.zeros(latest, heads, dim, dtype=dtype, device=self._pool.pages.device)
            self.add_chunk(0, 0, query, tokens)

    def _warm_up_adding(self, interval: int) -> None:
        """As many queries at once as there are kernels of."""
        size, most = self._pool.block_size, min(interval, LATEST)
        for latest in {min(2**power, most) for power in range(3, 8)}:
            tokens = (latest // size + 1) * size
            self._pool.rehearse(tokens)
            self.add([(Addition(request_id="", tokens=0, latest=latest, most=tokens), 0)])

    def _run(self, method: Method, due: Sequence[Due]) -> list[torch.Tensor]:
        pool, size = self._pool, self._pool.block_size
        layers, todos = self._packer.num_layers, [each.todo for each in due]
        window, tail = todos[0].plan.window, todos[0].plan.tail
        most_pages = max(todo.plan.full_blocks for todo in todos) + (tail > 0)
        most_pages = min(most_pages, pool.columns)
        place = self._place(*pool.held([each.row for each in due], most_pages))
        rows, lengths = place.rows, place.rows.lengths.view(-1, layers)
        at_once = layers_at_once(pool.longest, rows.most)
        query = None
        if Reads.WINDOW in method.reads:
            query = self._queries(due, window)
        sums = None
        if Reads.COLUMN_SUMS in method.reads:
            assert pool.sums is not None, due
            sums = pool.sums.read(place.pages)
        scores, observed = observe_rows(method, rows, query, window, at_once, sums)
        every_count, every_target = [], []
        for index, todo in enumerate(todos):
            own = observed[index * layers : (index + 1) * layers]
            counts, targets = self._places(method, todo, own, lengths[index] // size)
            every_count.append(counts)
            every_target.append(targets)
        counts = torch.cat(every_count)
        targets = torch.cat(every_target)
        widest = min(max(todo.plan.most_pages for todo in todos), pool.columns)
        if counts.device.type == "cpu":
            widest = int(counts.max())
        kept = kept_slots(scores, rows, counts, window, size, widest, method.selector, tail)
        move = kept, counts, targets[:, :widest], sum(todo.plan.pages for todo in todos)
        if method.merge:
            self._merge(method, place, [todo.request_id for todo in todos], *move, tail=tail)
        else:
            self._packer.move_in_place(place.cache, *move)
        if sums is not None:
            assert pool.sums is not None, due
            pool.sums.write(targets[:, :widest], counts, sums.gather(2, kept.clamp(min=0).long()))
        return every_count

    def _place(
        self, tables: torch.Tensor, lengths: torch.Tensor, layer: int | None = None
    ) -> _Place:
        """What some rows of this step's batch hold: ``[R, L, W]`` int64 and ``[R, L]`` int32.

        Args:
            layer: the only one of these rows; None where they have all.
        """
        scales = self._packer.scales
        if lengths.device.type == "cpu":
            # It costs nothing to ask, and tables are as wide as any layer could be.
            tables = tables[..., : -(-int(lengths.max()) // self._pool.block_size)]
        pages = tables.flatten(0, 1)
        cache = self._packer.opened(pages)
        rows = Rows(
            key_pages=cache.keys,
            value_pages=cache.values,
            pages=cache.pages,
            lengths=lengths.flatten(),
            most=tables.shape[2] * self._pool.block_size,
            scale=scales.of_requests(len(lengths)) if layer is None else scales.logits[layer],
            sinks=scales.sinks_of_requests(len(lengths))
            if layer is None
            else scales.sinks_of_layers([layer]),
        )
        return _Place(cache=cache, rows=rows, pages=pages)

    def _merge(
        self,
        method: Method,
        place: _Place,
        request_ids: Sequence[str],
        kept: torch.Tensor,
        counts: torch.Tensor,
        targets: torch.Tensor,
        total: int,
        *,
        tail: int,
    ) -> None:
        """Move what is kept, with what is dropped folded in; a request's threshold goes on."""
        pool = self._pool
        assert pool.thresholds is not None, request_ids
        slots = pool.slots(request_ids)
        before = pool.thresholds.read(slots)
        lengths = place.rows.lengths
        last = (lengths.long() - 1) // pool.block_size
        held = Held(
            lengths=lengths,
            most=place.rows.most,
            thresholds=before.flatten(0, 1),
            values_only=method.values_only,
            tail=tail,
            tail_pages=place.pages.gather(1, last[:, None])[:, 0],
        )
        after = self._packer.merge_in_place(place.cache, held, kept, counts, targets, total)
        pool.thresholds.write(slots, after.view_as(before))

    def _queries(self, due: Sequence[Due], window: int) -> torch.Tensor:
        """The last ``[N, w, Hq, D]`` queries of every row."""
        layers = range(self._packer.num_layers)
        if due[0].todo.prefill:
            found = [each.queries[layer] for each in due for layer in layers]
            if any(len(query) != window for query in found):
                raise RuntimeError(
                    f"requests {[each.todo.request_id for each in due]}: {window} window queries"
                    f" are needed at a boundary, {[len(query) for query in found]} were kept"
                )
            return torch.stack(found)
        assert self._ring is not None, due
        slots = self._pool.slots([each.todo.request_id for each in due])
        return self._ring.latest(slots, [each.todo.tokens for each in due], window)

    def _places(
        self, method: Method, todo: Repack, observed: list[Observed], held: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many pages each layer keeps ``[L]`` int32, and which ``[L, max_blocks]`` int32."""
        pool, first_block = self._pool, todo.tokens // self._pool.block_size
        if not todo.destination:
            targets, counts = pool.packed(todo.request_id)
            pool.advance(todo.request_id, first_block)
            return counts, targets
        pages = method.layer_pages(todo.plan, observed, held.long())
        counts = to_device(pages, torch.int32, pool.pages.device)
        free = pool.destination(todo.destination)[: todo.plan.pages]
        return counts, pool.assign(todo.request_id, free, counts, first_block)


def _alike(due: Due) -> tuple[str, bool, int]:
    """What requests have in common that are packed together: method, window and tail."""
    todo = due.todo
    return str(todo.settings), todo.prefill, todo.plan.tail
