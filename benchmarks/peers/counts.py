"""Convert budgets to kvpress's compression ratios.

kvpress's `compression_ratio` is the share of removed tokens, truncated to a count. Its observation
window competes with other tokens at a score above all others. The functions here use plain token
counts, so that both sides keep the same number.
"""

from collections.abc import Callable
from fractions import Fraction

WINDOW = 32
CHUNK = 10


def kept_tokens(tokens: int, budget: float) -> int:
    """Return the tokens that a budget keeps of a prompt, computed without float rounding."""
    return int(Fraction(str(budget)) * tokens)


def ratio_for(tokens: int, kept: int) -> float:
    """Return the compression ratio whose truncated count is `kept`: the middle of its interval.

    Raises:
        ValueError: `kept` is not in [1, tokens).
    """
    if not 1 <= kept < tokens:
        raise ValueError(
            f"a press must keep at least 1 of {tokens} tokens and drop at least 1, got {kept} kept"
        )
    return 1 - (kept + 0.5) / tokens


def complete_chunks(tokens: int, kept: int, size: int = CHUNK) -> tuple[int, int]:
    """Return the maximum number of complete chunks within `kept` tokens, and their tokens.

    kvpress's ChunkKV keeps complete chunks. The last chunk of the prompt is always kept, because it
    is in the window; it may be shorter than the others.
    """
    last_chunk = tokens % size or size
    chunks = 1 + (kept - last_chunk) // size
    return chunks, last_chunk + (chunks - 1) * size


def chunk_ratio(tokens: int, chunks: int, size: int = CHUNK) -> float:
    """Return the compression ratio at which kvpress's ChunkKV keeps `chunks` chunks."""
    return 1 - (chunks + 0.5) / -(-tokens // size)


def closest_ratio(total: int, tokens: int, kept_at: Callable[[float], int]) -> float:
    """Return the ratio at which `kept_at` comes closest to `total`, by bisection.

    Args:
        total: kept tokens, summed over layers.
        kept_at: returns the kept tokens at a ratio, summed over layers. It decreases.
    """
    low, high = 0.0, 1 - 1 / tokens
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if kept_at(middle) > total else (low, middle)
    return min((low, high), key=lambda ratio: abs(kept_at(ratio) - total))
