"""Parameters that a paper publishes per model, selected by the model's name."""

from typing import TypeVar

T = TypeVar("T")

Table = tuple[tuple[tuple[str, ...], T], ...]
"""Entries ``(substrings, parameters)``. An entry fits a model whose name, in lower case, contains
all its substrings."""


def find(table: Table[T], model: str | None) -> T | None:
    """Return the parameters of the first entry that fits the model, or None.

    Args:
        model: name or path, such as ``meta-llama/Llama-3.1-8B-Instruct``.
    """
    name = (model or "").lower().replace("meta-llama-", "llama-")
    fits = (params for substrings, params in table if all(part in name for part in substrings))
    return next(fits, None)
