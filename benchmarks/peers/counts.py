"""Convert budgets to kvpress's compression ratios, and compare kept positions.

kvpress's `compression_ratio` is the share of removed tokens, truncated to a count. Its observation
window competes with other tokens at a score above all others. The functions here use plain token
counts, so that both sides keep the same number.
"""

from collections.abc import Callable
from fractions import Fraction

import torch

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


Agreement = dict[str, int]
"""Numbers of positions that two selections of equal size share, over KV heads.

* kept: positions of kvpress
* equal: positions that our side keeps, too
* named: other positions that differ for a documented reason
* rounding: other positions whose score equals the lowest kept score up to rounding
* unexplained: all others
"""


def agreement(kept: int, *, equal: int, named: int, rounding: int) -> Agreement:
    counts = {"kept": kept, "equal": equal, "named": named, "rounding": rounding}
    return {**counts, "unexplained": kept - equal - named - rounding}


def masks(positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return positions ``[..., n]`` as a mask ``[..., tokens]`` bool."""
    out = torch.zeros(*positions.shape[:-1], tokens, dtype=torch.bool)
    return out.scatter_(-1, positions.long(), True)


def compare(
    ours: torch.Tensor, theirs: torch.Tensor, scores: torch.Tensor, *, tolerance: float = 1e-3
) -> Agreement:
    """Return how well two selections of equal size agree.

    Args:
        ours: ``[H, n]`` positions.
        theirs: ``[H, n]`` positions.
        scores: ``[H, S]`` our scores, +inf for tokens that are always kept.
        tolerance: relative distance from the lowest kept score that counts as rounding. The two
            sides run different versions of transformers.
    """
    mine, other = masks(ours, scores.shape[-1]), masks(theirs, scores.shape[-1])
    boundary = scores.masked_fill(~mine, torch.inf).amin(-1, keepdim=True)
    near = (scores - boundary).abs() <= tolerance * boundary.abs()
    missing = other & ~mine
    return agreement(
        int(other.sum()),
        equal=int((mine & other).sum()),
        named=0,
        rounding=int((missing & near).sum()),
    )


def chunk_scores(scores: torch.Tensor, window: int = WINDOW, size: int = CHUNK) -> torch.Tensor:
    """Return ``[chunks]`` mean scores of the complete chunks before the window, heads summed.

    Args:
        scores: ``[H, S]``.
    """
    past = scores.shape[-1] - window
    num_chunks = past // size
    return scores[:, : num_chunks * size].sum(0).view(num_chunks, size).mean(-1)


def as_kvpress_ranks(
    scores: torch.Tensor, chunks: int, window: int = WINDOW, size: int = CHUNK
) -> torch.Tensor:
    """Return the mask ``[S]`` of the tokens that kvpress would keep with our scores.

    kvpress's chunks start at 0 and continue through the window, whose scores are above all others.
    So it keeps every chunk with a token of the window. It keeps complete chunks only, while our
    selector cuts the last one.

    Args:
        scores: ``[H, S]`` our scores.
        chunks: number of chunks that kvpress keeps, including those of the window.
    """
    tokens = scores.shape[-1]
    num_chunks = (tokens - window) // size
    kept = torch.zeros(tokens, dtype=torch.bool)
    kept[num_chunks * size :] = True
    rest = chunks - (-(-tokens // size) - num_chunks)
    best = chunk_scores(scores, window, size).sort(descending=True, stable=True).indices[:rest]
    for chunk in best.tolist():
        kept[chunk * size : (chunk + 1) * size] = True
    return kept


def compare_chunks(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    scores: torch.Tensor,
    chunks: int,
    *,
    tolerance: float = 1e-3,
    window: int = WINDOW,
    size: int = CHUNK,
) -> Agreement:
    """Like `compare` for ChunkKV; differences due to kvpress's complete chunks count as named.

    Args:
        ours, theirs: ``[H, n]`` positions, the same in every head.
        scores: ``[H, S]`` our scores; those of the window are ignored.
        chunks: number of chunks that kvpress keeps.
    """
    tokens, heads = scores.shape[-1], scores.shape[0]
    mine, other = masks(ours, tokens)[0], masks(theirs, tokens)[0]
    named = as_kvpress_ranks(scores, chunks, window, size)
    missing = other & ~mine
    means = chunk_scores(scores, window, size)
    chunk_of_token = torch.arange(tokens) // size
    kept = named[: means.numel() * size].view(-1, size)[:, 0]
    boundary = means[kept].min() if kept.any() else torch.tensor(torch.inf)
    near = torch.zeros(tokens, dtype=torch.bool)
    past = chunk_of_token < means.numel()
    near[past] = (means[chunk_of_token[past]] - boundary).abs() <= tolerance * boundary.abs()
    return agreement(
        heads * int(other.sum()),
        equal=heads * int((mine & other).sum()),
        named=heads * int((missing & named).sum()),
        rounding=heads * int((missing & ~named & near).sum()),
    )
