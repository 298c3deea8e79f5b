"""Markdown tables, and estimates as the text of a cell."""

from collections.abc import Sequence

from vllm_kvcompress.compare.statistics import Estimate


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1
) -> str:
    """Return a table that ends with a line break.

    Args:
        text_columns: columns at the left that are aligned to the left.
    """
    alignment = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    lines = [header, alignment, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def with_interval(found: Estimate | None, form: str) -> str:
    """Return ``mean (low to high)``, or "" for None.

    Args:
        form: format of each number, such as ``.3f`` or ``.0%``.
    """
    if found is None:
        return ""
    return f"{found.mean:{form}} ({found.low:{form}} to {found.high:{form}})"
