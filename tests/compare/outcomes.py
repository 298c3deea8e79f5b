"""Factory of outcomes for tests."""

from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.compare.measures import Divergence
from vllm_kvcompress.compare.outcome import Outcome


def outcome(key: str = "k", cell: Cell | None = None, **figures) -> Outcome:
    """Return an outcome of a 100-token prompt that equals the full cache's, except for `figures`.

    The default cell is ``snapkv`` at 0.2. Probabilities are compared at seven tokens.
    """
    cell = cell or Cell(method="snapkv", budget=0.2)
    defaults = dict(
        task="prompts", group=None, prompt_tokens=100, kept_tokens=20.0, exact=True,
        shared=8,
        similarity=1.0, length=8, full_length=8, loops=False, full_loops=False,
        by_place=places(7), score=1.0, full_score=1.0, rules={},
        first_token_s=0.5, token_s=0.02, full_first_token_s=0.4, full_token_s=0.03,
    )  # fmt: skip
    return Outcome(key=key, cell=cell, **{**defaults, **figures})


def places(places: int, same_first: int | None = None, kl: float = 0.0) -> tuple[Divergence, ...]:
    """Return the `Outcome.by_place` of an output of up to 32 tokens, all the same by default."""
    same_first = places if same_first is None else same_first
    return tuple(
        Divergence(places=n, same_first=s, kl=k)
        for n, s, k in ((places, same_first, kl), (0, 0, 0.0), (0, 0, 0.0))
    )
