"""Ops on paged KV caches, each with a torch reference that defines it."""

from kvcompress_kernels.ops import (
    WindowScores,
    move_kept,
    window_scores,
)
from kvcompress_kernels.page_tables_ops import page_tables, page_tables_into
from kvcompress_kernels.select_ops import select, select_chunks
from kvcompress_kernels.whole_prompt_ops import column_sums, merge_evicted, value_scores

__all__ = [
    "WindowScores",
    "column_sums",
    "merge_evicted",
    "move_kept",
    "page_tables",
    "page_tables_into",
    "select",
    "select_chunks",
    "value_scores",
    "window_scores",
]
