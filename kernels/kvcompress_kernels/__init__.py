"""Ops on paged KV caches, each with a torch reference that defines it."""

from kvcompress_kernels.ops import (
    WindowScores,
    compact,
    gather_kept,
    page_tables,
    scatter_kept,
    window_scores,
)

__all__ = [
    "WindowScores",
    "compact",
    "gather_kept",
    "page_tables",
    "scatter_kept",
    "window_scores",
]
