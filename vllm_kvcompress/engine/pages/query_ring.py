"""The last queries of requests, kept for the step that packs them."""

from collections.abc import Sequence

import torch
from vllm.utils.torch_utils import async_tensor_h2d


class QueryRing:
    """Per layer and request slot the queries of the last w tokens, token p at ``p % w``.

    Every step writes the queries of each row's tokens, the last w of them where there are more:
    what a decode step computes, and what a chunk of a prompt leaves. Addresses never change and
    nothing is read on the host, so that a CUDA graph may hold the writing. Slot 0, of requests that
    have none, takes what nobody reads, and so do tokens that pad a graph.

    How tokens are found depends on the sizes of a batch alone, which are those of its graph. Each
    has a place; but where that would be more than w of every row, each row has w.

    Args:
        layers: L.
        slots: requests that have one at once, and slot 0.
        requests: the page pool's slots, slot 0 among them.
        window: w.
        heads, dim: of a query.
        max_rows: rows of the largest batch, padding included.
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
        # The slot here of each slot of the page pool, on the device and on the host.
        self._own = torch.zeros(requests, dtype=torch.int32, device=device)
        self._slots: dict[int, int] = {}
        self._free = list(range(slots - 1, 0, -1))

        def numbers(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        most = max_rows * window
        # Of each row: its slot's first place, its last token, how many of its tokens are kept, and
        # whether it is no padding.
        self._start, self._last, self._length = (numbers(max_rows) for _ in range(3))
        self._live = numbers(max_rows, torch.bool)
        # Of each place in a batch: the row, how far the token is from the row's last one, the token
        # of the batch, and where its query goes.
        self._row, self._back = numbers(most, torch.int64), numbers(most)
        self._tokens, self._index = numbers(most, torch.int64), numbers(most, torch.int64)
        self._at = numbers(most)
        self._kept, self._real = numbers(most, torch.bool), numbers(most, torch.bool)
        self._count = torch.arange(most, dtype=torch.int32, device=device)
        self._rows = self._places = 0
        self._by_row = False

    def admit(self, request: int) -> None:
        """From now on the queries of the request in this slot of the page pool are kept."""
        if request not in self._slots:
            slot = self._slots[request] = self._free.pop()
            self._own[request].fill_(slot)  # a number put there would be copied, and waited for

    def release(self, request: int) -> None:
        """They are no longer needed; nothing happens if they were not kept."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._own[request].fill_(0)
            self._free.append(slot)

    def follow(
        self, row_slots: torch.Tensor, seq_lens: torch.Tensor, live: torch.Tensor, rows: int
    ) -> None:
        """Learn whose rows this step's are, and how long they are after it.

        Args:
            row_slots: ``[>= rows]`` int32, the page pool's slot of each row.
            seq_lens: ``[>= live]`` int32, in tokens.
            live: ``[]`` int32: rows that are no padding.
            rows: rows of the batch, padding included.
        """
        self._rows = rows
        known = min(rows, len(seq_lens))
        torch.sub(seq_lens[:known], 1, out=self._last[:known])
        torch.lt(self._count[:rows], live, out=self._live[:rows])
        start = torch.index_select(self._own, 0, row_slots[:rows], out=self._start[:rows])
        start.mul_(self._live[:rows]).mul_(self.window)

    def lay_out(self, query_start: torch.Tensor, tokens: int, longest: int) -> None:
        """Find where the batch's queries go, once `follow` knows the rows.

        Args:
            query_start: ``[>= rows + 1]`` int32 token offsets of the rows.
            tokens: of the batch, padding included.
            longest: tokens that no row exceeds.
        """
        rows, ends = self._rows, query_start[1 : self._rows + 1]
        self._by_row = tokens > rows * self.window
        self._places = rows * self.window if self._by_row else tokens
        if longest == 1 and not self._by_row:
            # a decode step: the rows are the tokens, and those behind them pad it
            at = torch.remainder(self._last[:rows], self.window, out=self._at[:rows])
            self._index[:rows].copy_(at.add_(self._start[:rows]))
            if tokens > rows:
                self._index[rows:tokens].zero_()
            return
        if self._by_row:
            self._find_rows_last(ends)
        else:
            self._find_tokens(ends)
        torch.sub(ends, query_start[:rows], out=self._length[:rows]).clamp_(max=self.window)
        self._place()

    def _find_tokens(self, ends: torch.Tensor) -> None:
        """Each place is a token's: its row, and how far it is from that row's last one."""
        places = self._places
        token, row, back = self._count[:places], self._row[:places], self._back[:places]
        torch.searchsorted(ends, token, right=True, out=row)
        row.clamp_(max=self._rows - 1)
        torch.index_select(ends, 0, row, out=back)
        back.sub_(1).sub_(token)

    def _find_rows_last(self, ends: torch.Tensor) -> None:
        """Each row has w places, for its last tokens."""
        places, window = self._places, self.window
        row, back = self._row[:places].view(-1, window), self._back[:places].view(-1, window)
        row.copy_(self._count[: self._rows, None])
        back.copy_(self._count[:window])
        token = self._tokens[:places].view(-1, window)
        token.copy_(ends[:, None]).sub_(1).sub_(back).clamp_(min=0)

    def _place(self) -> None:
        """Where the query of each place's token goes: of all but the last w into slot 0."""
        places, window = self._places, self.window
        row, back, at = self._row[:places], self._back[:places], self._at[:places]
        torch.index_select(self._length, 0, row, out=at)
        kept = torch.lt(back, at, out=self._kept[:places])
        kept.logical_and_(torch.ge(back, 0, out=self._real[:places]))
        index = self._index[:places]
        index.copy_(torch.index_select(self._start, 0, row, out=at).mul_(kept))
        torch.index_select(self._last, 0, row, out=at)
        index.add_(at.sub_(back).remainder_(window))

    def store(self, layer: int, query: torch.Tensor) -> None:
        """Keep the queries of one layer.

        Args:
            query: ``[tokens, Hq, D]``, rotated.
        """
        places = self._places
        own = query[:places]
        if self._by_row:
            own = query.index_select(0, self._tokens[:places])
        self._layers[layer].index_copy_(0, self._index[:places], own)

    def latest(self, requests: Sequence[int], tokens: Sequence[int], count: int) -> torch.Tensor:
        """The last queries ``[R * L, count, Hq, D]`` of R requests, in the order of positions.

        The layers of a request lie one after the other.

        Args:
            requests: their slots in the page pool.
            tokens: how many of each were computed.
            count: how many queries of each, at most w.
        """
        w, (layers, places) = self.window, self._queries.shape[:2]
        slots = [self._slots[request] for request in requests]
        latest = [
            slot * w + (computed - count + i) % w
            for slot, computed in zip(slots, tokens, strict=True)
            for i in range(count)
        ]
        at = async_tensor_h2d(latest, device=self._queries.device, dtype=torch.int64)
        layer = torch.arange(layers, device=self._queries.device)[:, None] * places
        every = at.view(len(slots), 1, count) + layer
        found = self._queries.flatten(0, 1).index_select(0, every.flatten())
        return found.view(len(slots) * layers, count, *found.shape[1:])
