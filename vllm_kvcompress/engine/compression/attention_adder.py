"""After a step: the attention that latest queries paid is added to that of the earlier ones."""

from collections.abc import Sequence
from itertools import groupby

import torch

from vllm_kvcompress.engine.compression.mover import SourcePages
from vllm_kvcompress.engine.compression.packer import Packer
from vllm_kvcompress.engine.messages.step import Addition
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.paged_layers import attention_paid
from vllm_kvcompress.methods.scorers.pooling import group_mean
from vllm_kvcompress.planning.memory import additions_at_once


class AttentionAdder:
    """Keeps the page pool's attention sums, for methods that rank by the attention of all rows.

    Args:
        packer: of this worker's pages.
    """

    def __init__(self, packer: Packer) -> None:
        self._packer, self._pool = packer, packer.pool

    def remember_whole(self, blocks: torch.Tensor, sums: dict[int, torch.Tensor]) -> None:
        """Keep the attention that a prompt's tokens were paid, while all of them stand.

        Args:
            blocks: ``[ceil(S / bs)]`` int64, vLLM block ids of the prompt.
            sums: column sums ``[Hq, S]`` of every layer.
        """
        own = self._pool.sums
        assert own is not None
        pages = self._pool.every_layer(blocks)
        layers = range(self._packer.num_layers)
        paid = torch.stack([group_mean(sums[layer], own.kv_heads) for layer in layers])
        own.write(pages, pages.new_full((len(pages),), pages.shape[1]), paid)

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
        pool, pack_requests = self._pool, [pack_request for pack_request, _ in latest]
        count, most = pack_requests[0].latest, pack_requests[-1].most
        assert pool.ring is not None, latest
        rows = pool.held([row for _, row in latest], most // pool.block_size)
        slots = pool.slots([pack_request.request_id for pack_request in pack_requests])
        layers = [*range(self._packer.num_layers)] * len(pack_requests)
        query = pool.ring.latest(
            slots, [pack_request.tokens for pack_request in pack_requests], count
        )
        self._add_to(self._packer.held_rows(*rows), layers, query)

    def add_chunk(self, layer: int, row: int, query: torch.Tensor, most: int) -> None:
        """Add the attention of a prefill's chunk, whose first tokens are packed, in one layer.

        Args:
            row: of this step's batch.
            query: ``[r, Hq, D]``, the chunk's.
            most: tokens that the layer holds at most.
        """
        columns = min(-(-most // self._pool.block_size), self._pool.columns)
        source = self._packer.held_rows(*self._pool.held_in(layer, row, columns))
        self._add_to(source, [layer], query[None])

    def _add_to(self, source: SourcePages, layers: Sequence[int], query: torch.Tensor) -> None:
        pool, size, lengths = self._pool, self._pool.block_size, source.lengths
        assert pool.sums is not None
        assert lengths is not None
        rows = self._packer.rows(source, layers, Reads.COLUMN_SUMS)
        paid = attention_paid(rows, query, self._packer.at_once(source.most))
        before = pool.sums.read(source.pages)
        # Slots of the latest queries have what was left in their pages.
        column = torch.arange(before.shape[2], device=before.device)
        latest = column >= (lengths - query.shape[1])[:, None, None]
        sums = before.masked_fill_(latest, 0).add_(paid)
        pool.sums.write(source.pages, (lengths + size - 1) // size, sums)
