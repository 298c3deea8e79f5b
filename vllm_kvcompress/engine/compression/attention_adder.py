"""Adds the attention of the latest queries to each token's accumulated sum, after a step."""

from collections.abc import Sequence
from itertools import groupby

import torch

from vllm_kvcompress.engine.compression.mover import SourcePages
from vllm_kvcompress.engine.compression.packer import Packer
from vllm_kvcompress.engine.messages.step import AttentionAddition
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.paged_layers import attention_to_slots
from vllm_kvcompress.methods.parts.pooling import group_mean
from vllm_kvcompress.planning.memory import requests_per_sum


class AttentionAdder:
    """Maintains the page pool's attention sums for methods that rank by all queries' attention.

    Args:
        packer: this worker's packer.
    """

    def __init__(self, packer: Packer) -> None:
        self._packer, self._pool = packer, packer.pool

    def store_prompt_sums(self, blocks: torch.Tensor, sums: dict[int, torch.Tensor]) -> None:
        """Store the attention sums of a prompt that is not compressed yet.

        Args:
            blocks: ``[ceil(S / bs)]`` int64, vLLM block ids of the prompt.
            sums: by layer, column sums ``[Hq, S]``.
        """
        pool_sums = self._pool.sums
        assert pool_sums is not None
        pages = self._pool.flat_ids_in_all_layers(blocks)
        layers = range(self._packer.num_layers)
        head_means = torch.stack([group_mean(sums[layer], pool_sums.kv_heads) for layer in layers])
        pool_sums.write(pages, pages.new_full((len(pages),), pages.shape[1]), head_means)

    def add(self, additions: Sequence[tuple[AttentionAddition, int]]) -> None:
        """Add the attention of requests' latest queries to the sums of their tokens.

        No token was dropped since the first of these queries, so the attention computed here is
        the attention that decoding used.

        Args:
            additions: pairs of an `AttentionAddition` and the request's row in this step's batch.
        """
        ordered = sorted(additions, key=lambda pair: (pair[0].num_queries, pair[0].max_tokens))
        for _, group in groupby(ordered, key=lambda pair: pair[0].num_queries):
            equal_counts = list(group)
            launch_size = requests_per_sum(
                equal_counts[-1][0].max_tokens, self._pool.max_layer_tokens
            )
            for start in range(0, len(equal_counts), launch_size):
                self._add(equal_counts[start : start + launch_size])

    def _add(self, pairs: Sequence[tuple[AttentionAddition, int]]) -> None:
        """Add the attention of requests that have equally many latest queries, in one launch."""
        pool, additions = self._pool, [addition for addition, _ in pairs]
        num_queries, max_tokens = additions[0].num_queries, additions[-1].max_tokens
        assert pool.ring is not None, pairs
        row_tables = pool.row_tables([row for _, row in pairs], max_tokens // pool.block_size)
        slots = pool.slots([addition.request_id for addition in additions])
        layers = [*range(self._packer.num_layers)] * len(additions)
        query = pool.ring.latest(slots, [addition.tokens for addition in additions], num_queries)
        self._add_to(self._packer.source_pages(*row_tables), layers, query)

    def add_chunk(self, layer: int, batch_row: int, query: torch.Tensor, max_tokens: int) -> None:
        """Add one layer's attention of a prefill chunk to a prompt that is partly packed.

        Args:
            batch_row: the request's row in this step's batch.
            query: ``[r, Hq, D]``, the chunk's queries.
            max_tokens: upper bound on the tokens that the layer holds.
        """
        max_pages = min(-(-max_tokens // self._pool.block_size), self._pool.max_layer_pages)
        source = self._packer.source_pages(*self._pool.row_table(layer, batch_row, max_pages))
        self._add_to(source, [layer], query[None])

    def _add_to(self, source: SourcePages, layers: Sequence[int], query: torch.Tensor) -> None:
        pool, size, lengths = self._pool, self._pool.block_size, source.lengths
        assert pool.sums is not None
        assert lengths is not None
        paged_layers = self._packer.paged_layers(source, layers, Reads.COLUMN_SUMS)
        attention = attention_to_slots(
            paged_layers, query, self._packer.rows_per_launch(source.max_tokens)
        )
        sums = pool.sums.read(source.pages)
        # The latest tokens have no sum yet: their slots contain values of an earlier use.
        slot = torch.arange(sums.shape[2], device=sums.device)
        is_latest = slot >= (lengths - query.shape[1])[:, None, None]
        sums = sums.masked_fill_(is_latest, 0).add_(attention)
        pool.sums.write(source.pages, (lengths + size - 1) // size, sums)
