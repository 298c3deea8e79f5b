"""The last queries of answers that grow, kept for the step that packs them again."""

from collections.abc import Sequence

import torch
from vllm.utils.torch_utils import async_tensor_h2d


class QueryRing:
    """Per layer and request slot the queries of the last w tokens, token p at ``p % w``.

    Every step writes the query of each row's last token, wherever that row is in its request: what
    a decode step computes, and of a chunk of a prompt the last, which nobody asks for. Addresses
    never change and nothing is read on the host, so that a CUDA graph may hold the writing.
    Slot 0, of requests that have none, takes what nobody reads, and so do rows that pad a graph.

    Args:
        layers: L.
        slots: request slots, slot 0 among them.
        window: w.
        heads, dim: of a query.
        max_rows: rows of the largest batch, padding included.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
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
        # Where each row's query goes, and which token of the batch it is.
        self._index = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._row = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._live = torch.zeros(max_rows, dtype=torch.bool, device=device)
        self._place = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._rows = 0
        self._one_each = True

    def follow(
        self, row_slots: torch.Tensor, seq_lens: torch.Tensor, live: torch.Tensor, rows: int
    ) -> None:
        """Find where this step's queries go.

        Args:
            row_slots: ``[>= rows]`` int32, the slot of each row.
            seq_lens: ``[>= live]`` int32, in tokens.
            live: ``[]`` int32: rows that are no padding.
            rows: rows of the batch, padding included.
        """
        self._rows = rows
        known = min(rows, len(seq_lens))
        place = self._place[:rows].zero_()
        torch.sub(seq_lens[:known], 1, out=place[:known])
        place.remainder_(self.window)
        place.add_(row_slots[:rows], alpha=self.window)
        torch.lt(self._row[:rows], live, out=self._live[:rows])
        place.mul_(self._live[:rows])
        self._index[:rows].copy_(place)

    def lay_out(self, query_start: torch.Tensor, tokens: int) -> None:
        """Find each row's last token in the batch, once `follow` knows the rows.

        Args:
            query_start: ``[>= rows + 1]`` int32 token offsets of the rows.
            tokens: of the batch, padding included.
        """
        self._one_each = tokens == self._rows
        if not self._one_each:
            ends = query_start[1 : self._rows + 1]
            self._tokens[: self._rows].copy_(ends).sub_(1).clamp_(min=0)

    def store(self, layer: int, query: torch.Tensor) -> None:
        """Keep the rows' queries of one layer.

        Args:
            query: ``[tokens, Hq, D]``, rotated.
        """
        rows = self._rows
        own = query[:rows] if self._one_each else query.index_select(0, self._tokens[:rows])
        self._layers[layer].index_copy_(0, self._index[:rows], own)

    def latest(self, slots: Sequence[int], tokens: Sequence[int], count: int) -> torch.Tensor:
        """The last queries ``[R * L, count, Hq, D]`` of R requests, in the order of positions.

        The layers of a request lie one after the other.

        Args:
            slots: of the requests.
            tokens: how many of each were computed.
            count: how many queries of each, at most w.
        """
        w, (layers, places) = self.window, self._queries.shape[:2]
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
