"""Stores the last queries of requests until a later step packs them."""

from collections.abc import Sequence

import torch
from vllm.utils.torch_utils import async_tensor_h2d


class QueryRing:
    """Ring buffers with the queries of the last w tokens, by layer and ring slot.

    The query of token p is at index ``p % w`` of its slot. If any request of the batch has a ring
    slot, the step writes the last w queries of each batch row. Queries of requests without a slot,
    and of padding tokens, go to slot 0, which is never read.

    Addresses never change and the host reads nothing, so a CUDA graph can record the writes. A
    replayed graph always writes; if no request has a slot, all its writes go to slot 0.

    A batch has a number of write positions that depends only on its shape, and so on its graph: one
    for each token if those are at most w per row on average, else w for each row.

    Args:
        layers: compressed layers on this worker, L.
        slots: ring slots, including slot 0.
        requests: slots of the page pool, including slot 0.
        window: stored queries per request, w.
        heads, dim: query heads and head dim.
        max_rows: rows of the largest batch, including padding.
        dtype: dtype of a query.
        device: device of the page pool.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        requests: int,
        window: int,
        heads: int,
        dim: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window = window
        self._queries = torch.zeros(layers, slots * window, heads, dim, dtype=dtype, device=device)
        self._layers = self._queries.unbind()
        # The ring slot of each slot of the page pool, on the device and on the host.
        self._ring_slots = torch.zeros(requests, dtype=torch.int32, device=device)
        self._slots: dict[int, int] = {}
        self._free = list(range(slots - 1, 0, -1))

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        max_writes = max_rows * window
        # By row: first index of its ring slot, index of its last token, number of its tokens to
        # store, and whether it is a real row (not padding).
        self._start, self._last, self._length = (zeros(max_rows) for _ in range(3))
        self._live = zeros(max_rows, torch.bool)
        # By write: its row, the token's distance from the row's last token, the token's index in
        # the batch, and the index in the ring that is written.
        self._row, self._distance = zeros(max_writes, torch.int64), zeros(max_writes)
        self._tokens, self._index = zeros(max_writes, torch.int64), zeros(max_writes, torch.int64)
        self._scratch = zeros(max_writes)
        self._in_window, self._real = zeros(max_writes, torch.bool), zeros(max_writes, torch.bool)
        self._count = torch.arange(max_writes, dtype=torch.int32, device=device)
        self._rows = self._num_writes = 0
        self._by_row = False
        # Whether the batch's queries are stored.
        self.stores_queries = False

    def admit(self, pool_slot: int) -> None:
        """Start storing the queries of the request in this slot of the page pool."""
        if pool_slot not in self._slots:
            slot = self._slots[pool_slot] = self._free.pop()
            # Assigning a Python number would copy it with a sync.
            self._ring_slots[pool_slot].fill_(slot)

    def release(self, pool_slot: int) -> None:
        """Stop storing the request's queries; do nothing if none are stored."""
        slot = self._slots.pop(pool_slot, None)
        if slot is not None:
            self._ring_slots[pool_slot].fill_(0)
            self._free.append(slot)

    def begin_batch(self, pool_slots: Sequence[int], *, recorded: bool) -> None:
        """Determine whether this batch's queries are stored: `stores_queries`.

        Args:
            pool_slots: slots of the batch's requests in the page pool.
            recorded: whether a CUDA graph may record the writes, for any later batch.
        """
        active = recorded or not self._slots.keys().isdisjoint(pool_slots)
        if self.stores_queries and not active:
            # A replayed graph writes in any case, and must not overwrite other requests' queries.
            self._index.zero_()
            self._tokens.zero_()
        self.stores_queries = active

    def set_batch_rows(
        self, row_slots: torch.Tensor, seq_lens: torch.Tensor, live: torch.Tensor, rows: int
    ) -> None:
        """Set the slot and length of each row in this step's batch, after `begin_batch`.

        Args:
            row_slots: ``[>= rows]`` int32, the page pool's slot of each row.
            seq_lens: ``[>= live]`` int32, tokens of each row after this step.
            live: ``[]`` int32, number of real rows.
            rows: rows of the batch, including padding.
        """
        self._rows = rows
        if not self.stores_queries:
            return
        known = min(rows, len(seq_lens))
        torch.sub(seq_lens[:known], 1, out=self._last[:known])
        torch.lt(self._count[:rows], live, out=self._live[:rows])
        start = torch.index_select(self._ring_slots, 0, row_slots[:rows], out=self._start[:rows])
        start.mul_(self._live[:rows]).mul_(self.window)

    def lay_out(self, query_start: torch.Tensor, tokens: int, max_query_len: int) -> None:
        """Compute the ring index of each write of this batch, after `set_batch_rows`.

        Args:
            query_start: ``[>= rows + 1]`` int32, token offsets of the rows.
            tokens: tokens in the batch, including padding.
            max_query_len: maximum tokens of a row in the batch.
        """
        rows, ends = self._rows, query_start[1 : self._rows + 1]
        self._by_row = tokens > rows * self.window
        self._num_writes = rows * self.window if self._by_row else tokens
        if not self.stores_queries:
            return
        if max_query_len == 1 and not self._by_row:
            # In a decode step every row has one token; tokens after the rows are padding.
            index = torch.remainder(self._last[:rows], self.window, out=self._scratch[:rows])
            self._index[:rows].copy_(index.add_(self._start[:rows]))
            if tokens > rows:
                self._index[rows:tokens].zero_()
            return
        if self._by_row:
            self._find_last_tokens(ends)
        else:
            self._find_all_tokens(ends)
        torch.sub(ends, query_start[:rows], out=self._length[:rows]).clamp_(max=self.window)
        self._compute_indices()

    def _find_all_tokens(self, ends: torch.Tensor) -> None:
        """Assign one write to each token: set its row and its distance from the row's end."""
        n = self._num_writes
        token, row, distance = self._count[:n], self._row[:n], self._distance[:n]
        torch.searchsorted(ends, token, right=True, out=row)
        row.clamp_(max=self._rows - 1)
        torch.index_select(ends, 0, row, out=distance)
        distance.sub_(1).sub_(token)

    def _find_last_tokens(self, ends: torch.Tensor) -> None:
        """Assign w writes to each row, for its last w tokens."""
        n, window = self._num_writes, self.window
        row, distance = self._row[:n].view(-1, window), self._distance[:n].view(-1, window)
        row.copy_(self._count[: self._rows, None])
        distance.copy_(self._count[:window])
        token = self._tokens[:n].view(-1, window)
        token.copy_(ends[:, None]).sub_(1).sub_(distance).clamp_(min=0)

    def _compute_indices(self) -> None:
        """Compute the ring index of each write; tokens before the last w go to slot 0."""
        n, window = self._num_writes, self.window
        row, distance, scratch = self._row[:n], self._distance[:n], self._scratch[:n]
        torch.index_select(self._length, 0, row, out=scratch)
        in_window = torch.lt(distance, scratch, out=self._in_window[:n])
        in_window.logical_and_(torch.ge(distance, 0, out=self._real[:n]))
        index = self._index[:n]
        index.copy_(torch.index_select(self._start, 0, row, out=scratch).mul_(in_window))
        torch.index_select(self._last, 0, row, out=scratch)
        index.add_(scratch.sub_(distance).remainder_(window))

    def store(self, layer: int, query: torch.Tensor) -> None:
        """Write the queries of one layer to the ring.

        Args:
            layer: layer index on this worker.
            query: ``[tokens, Hq, D]``, rotated.
        """
        n = self._num_writes
        queries = query[:n]
        if self._by_row:
            queries = query.index_select(0, self._tokens[:n])
        self._layers[layer].index_copy_(0, self._index[:n], queries)

    def indices(self, pool_slots: Sequence[int], tokens: Sequence[int], count: int) -> torch.Tensor:
        """Return where `gather` finds the last `count` queries of R requests.

        Args:
            pool_slots: slots of the requests in the page pool.
            tokens: tokens computed of each request.
            count: number of queries of each request, at most w.

        Returns:
            ``[R * L, count]`` int64, in the order of the queries' positions. The L layers of a
            request are consecutive.
        """
        w, (layers, layer_size) = self.window, self._queries.shape[:2]
        slots = [self._slots[pool_slot] for pool_slot in pool_slots]
        latest = [
            slot * w + (computed - count + i) % w
            for slot, computed in zip(slots, tokens, strict=True)
            for i in range(count)
        ]
        index_in_layer = async_tensor_h2d(latest, device=self._queries.device, dtype=torch.int64)
        layer_start = torch.arange(layers, device=self._queries.device)[:, None] * layer_size
        index: torch.Tensor = index_in_layer.view(len(slots), 1, count) + layer_start
        return index.flatten(0, 1)

    def latest(self, pool_slots: Sequence[int], tokens: Sequence[int], count: int) -> torch.Tensor:
        """Return the last `count` queries of R requests, ``[R * L, count, Hq, D]``."""
        return self.gather(self.indices(pool_slots, tokens, count))

    def gather(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the queries ``[n, count, Hq, D]`` at some rows ``[n, count]`` of `indices`."""
        queries = self._queries.flatten(0, 1).index_select(0, indices.flatten())
        return queries.view(*indices.shape, *queries.shape[1:])
