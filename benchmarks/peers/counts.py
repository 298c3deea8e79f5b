"""Kept tokens, the ratios that make kvpress keep them, and where two selections differ.

kvpress's `compression_ratio` is the share that is removed, its counts are truncated, and its window
competes with a score above every other. Here all are plain numbers, so that both sides can be held
to the same count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch

WINDOW = 32
CHUNK = 10


def kept_tokens(tokens: int, budget: float) -> int:
    """Tokens that a budget keeps of a prompt, exact in the ratio as it is written."""
    return int(Fraction(str(budget)) * tokens)


def ratio_for(tokens: int, kept: int) -> float:
    """The compression ratio whose truncated count is `kept`: the middle of its interval.

    Raises:
        ValueError: `kept` is not in [1, tokens).
    """
    if not 1 <= kept < tokens:
        raise ValueError(f"a press keeps at least 1 of {tokens} tokens and drops one, got {kept}")
    return 1 - (kept + 0.5) / tokens


def whole_chunks(tokens: int, kept: int, size: int = CHUNK) -> tuple[int, int]:
    """Most chunks whose tokens do not exceed `kept`, and how many tokens these are.

    kvpress's ChunkKV keeps whole chunks, the prompt's last among them as it lies in the window.
    That chunk may be shorter than the others.
    """
    last = tokens % size or size
    chunks = 1 + (kept - last) // size
    return chunks, last + (chunks - 1) * size


def chunk_ratio(tokens: int, chunks: int, size: int = CHUNK) -> float:
    """The compression ratio at which kvpress's ChunkKV keeps this many chunks."""
    return 1 - (chunks + 0.5) / -(-tokens // size)


def closest_ratio(total: int, tokens: int, summed: Callable[[float], int]) -> float:
    """The ratio at which `summed`, which falls with it, comes closest to `total`, by bisection.

    Args:
        total: tokens of all layers together.
        summed: what all layers together keep at a ratio.
    """
    low, high = 0.0, 1 - 1 / tokens
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if summed(middle) > total else (low, middle)
    return min((low, high), key=lambda ratio: abs(summed(ratio) - total))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Positions that two selections of equal size share, over all layers and KV heads.

    Args:
        kept: positions of one side.
        equal: those that the other has too.
        named: of the others, those that a named difference explains.
        rounding: those whose score is the boundary's up to rounding.
    """

    kept: int = 0
    equal: int = 0
    named: int = 0
    rounding: int = 0

    @property
    def unexplained(self) -> int:
        return self.kept - self.equal - self.named - self.rounding

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(
            kept=self.kept + other.kept,
            equal=self.equal + other.equal,
            named=self.named + other.named,
            rounding=self.rounding + other.rounding,
        )


def masks(positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """``[..., n]`` positions as ``[..., tokens]`` bool."""
    out = torch.zeros(*positions.shape[:-1], tokens, dtype=torch.bool)
    return out.scatter_(-1, positions.long(), True)


def compare(
    ours: torch.Tensor, theirs: torch.Tensor, scores: torch.Tensor, *, tolerance: float = 1e-3
) -> Agreement:
    """Where two selections of equal size differ, if at all by rounding.

    Args:
        ours: ``[H, n]`` positions.
        theirs: ``[H, n]``.
        scores: ``[H, S]`` of ours, +inf where a token is kept whatever its score.
        tolerance: relative distance from the lowest kept score within which the order of two
            tokens is up to rounding: the two sides run different versions of transformers.
    """
    mine, other = masks(ours, scores.shape[-1]), masks(theirs, scores.shape[-1])
    boundary = scores.masked_fill(~mine, torch.inf).amin(-1, keepdim=True)
    near = (scores - boundary).abs() <= tolerance * boundary.abs()
    missing = other & ~mine
    return Agreement(
        kept=int(other.sum()),
        equal=int((mine & other).sum()),
        rounding=int((missing & near).sum()),
    )


def chunk_scores(scores: torch.Tensor, window: int = WINDOW, size: int = CHUNK) -> torch.Tensor:
    """``[chunks]`` mean of each whole chunk of the past of ``[H, S]`` scores, heads summed."""
    past = scores.shape[-1] - window
    whole = past // size
    return scores[:, : whole * size].sum(0).view(whole, size).mean(-1)


def as_kvpress_ranks(
    scores: torch.Tensor, chunks: int, window: int = WINDOW, size: int = CHUNK
) -> torch.Tensor:
    """``[S]`` bool: what kvpress would keep by our scores, as it takes whole chunks.

    Its chunks start at 0 and go on through the window, whose scores are above every other: a chunk
    with one token of the window is kept. And it keeps whole chunks, where ours cuts the last.

    Args:
        scores: ``[H, S]`` of ours.
        chunks: that kvpress keeps, those of the window among them.
    """
    tokens = scores.shape[-1]
    whole = (tokens - window) // size
    kept = torch.zeros(tokens, dtype=torch.bool)
    kept[whole * size :] = True
    rest = chunks - (-(-tokens // size) - whole)
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
    """As `compare`, for ChunkKV: what differs because kvpress keeps whole chunks is named.

    Args:
        ours, theirs: ``[H, n]`` positions, the same in every head.
        scores: ``[H, S]`` of ours, those of the window whatever they are.
        chunks: that kvpress keeps.
    """
    tokens, heads = scores.shape[-1], scores.shape[0]
    mine, other = masks(ours, tokens)[0], masks(theirs, tokens)[0]
    named = as_kvpress_ranks(scores, chunks, window, size)
    missing = other & ~mine
    means = chunk_scores(scores, window, size)
    inside = torch.arange(tokens) // size
    kept = named[: means.numel() * size].view(-1, size)[:, 0]
    boundary = means[kept].min() if kept.any() else torch.tensor(torch.inf)
    near = torch.zeros(tokens, dtype=torch.bool)
    past = inside < means.numel()
    near[past] = (means[inside[past]] - boundary).abs() <= tolerance * boundary.abs()
    return Agreement(
        kept=heads * int(other.sum()),
        equal=heads * int((mine & other).sum()),
        named=heads * int((missing & named).sum()),
        rounding=heads * int((missing & ~named & near).sum()),
    )
