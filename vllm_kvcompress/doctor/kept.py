"""Which tokens of one prompt each layer kept, coarse enough to draw."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMap:
    """What became of one prompt.

    Args:
        model: its name or folder.
        method: what compressed it.
        budget: as it was set, a ratio or tokens per layer.
        prompt_tokens: length of the prompt.
        kv_heads: KV heads of a layer, over all ranks.
        kept_tokens: per layer, tokens that stay; its mean over ranks, which may differ.
        share: ``[L][buckets]``, of the pairs of a KV head and a position in the bucket, the part
            that stays. Bucket b holds the positions ``p`` with ``p * buckets // prompt_tokens ==
            b``.
        numbers: the layers' places in the model; empty where all are compressed.
        parts: of a chat, the tokens of each role's messages, of its tools and of the template, and
            the share of these that stays, over all layers and KV heads.
    """

    model: str
    method: str
    budget: float | int
    prompt_tokens: int
    kv_heads: int
    kept_tokens: Sequence[float]
    share: Sequence[Sequence[float]]
    numbers: Sequence[int] = ()
    parts: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def names(self) -> Sequence[int]:
        """What the layers are called: their places in the model."""
        return self.numbers or range(self.layers)

    @property
    def layers(self) -> int:
        return len(self.kept_tokens)

    @property
    def mean(self) -> float:
        """Tokens that stay, mean over layers."""
        return sum(self.kept_tokens) / self.layers

    @property
    def title(self) -> str:
        """What was compressed, and how, in a few words."""
        name = self.model.rstrip("/").rsplit("/", 1)[-1]
        return f"{name}, {self.method}, budget {self.budget}"

    @property
    def summary(self) -> str:
        """How much stayed, in one line."""
        part = self.mean / self.prompt_tokens
        return (
            f"{self.prompt_tokens:,} prompt tokens; a layer keeps {self.mean:,.0f} on average"
            f" ({part:.1%}), from {min(self.kept_tokens):,.0f} to {max(self.kept_tokens):,.0f}"
        )

    @property
    def by_part(self) -> str:
        """How much of each part stayed, in one line; empty where the prompt is no chat."""
        told = (f"{name} {share:.0%} of {n:,}" for name, (n, share) in self.parts.items())
        return f"kept by part: {', '.join(told)} tokens" if self.parts else ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, payload: dict[str, Any]) -> "KeptMap":
        return cls(**payload)
