"""Ops on paged KV caches, each with a torch reference that defines it."""

from kvcompress_kernels.ops import (
    WindowScores,
    compact,
    gather_kept,
    page_tables,
    scatter_kept,
    window_scores,
)
from kvcompress_kernels.select_ops import select, select_chunks
from kvcompress_kernels.whole_prompt_ops import column_sums, merge_evicted, value_scores

__all__ = [
    "WindowScores",
    "column_sums",
    "compact",
    "gather_kept",
    "merge_evicted",
    "page_tables",
    "scatter_kept",
    "select",
    "select_chunks",
    "value_scores",
    "window_scores",
]
