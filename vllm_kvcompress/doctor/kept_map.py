"""The share of a prompt's tokens that each layer kept, by ranges of positions."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_kvcompress.settings.packed_dtype import AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMap:
    """Kept tokens of one compressed prompt.

    Args:
        model: name or folder of the model.
        method: compression method.
        budget: the configured budget, a ratio or tokens per layer.
        packed_dtype: format of kept tokens.
        prompt_tokens: length of the prompt.
        kv_heads: KV heads of a layer, over all ranks.
        kept_tokens: kept tokens of each layer, as the mean over ranks.
        share: ``[L][buckets]``, the kept share of all pairs of a KV head and a position in the
            bucket. Bucket b holds the positions ``p`` with ``p * buckets // prompt_tokens == b``.
        numbers: model-wide indices of the layers; empty if all layers are compressed.
        parts: for a chat, by role (also the tools and the template), the number of tokens and their
            kept share over all layers and KV heads.
    """

    model: str
    method: str
    budget: float | int
    packed_dtype: str
    prompt_tokens: int
    kv_heads: int
    kept_tokens: Sequence[float]
    share: Sequence[Sequence[float]]
    numbers: Sequence[int] = ()
    parts: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def names(self) -> Sequence[int]:
        """Model-wide index of each layer."""
        return self.numbers or range(self.layers)

    @property
    def layers(self) -> int:
        return len(self.kept_tokens)

    @property
    def mean(self) -> float:
        """Kept tokens, as the mean over layers."""
        return sum(self.kept_tokens) / self.layers

    @property
    def title(self) -> str:
        """The model, method and budget, and the format of kept tokens if it is not the cache's."""
        name = self.model.rstrip("/").rsplit("/", 1)[-1]
        title = f"{name}, {self.method}, budget {self.budget}"
        return title if self.packed_dtype == AUTO else f"{title}, {self.packed_dtype}"

    @property
    def summary(self) -> str:
        """Return the number of kept tokens, in one line."""
        part = self.mean / self.prompt_tokens
        return (
            f"{self.prompt_tokens:,} prompt tokens; a layer keeps {self.mean:,.0f} on average"
            f" ({part:.1%}), from {min(self.kept_tokens):,.0f} to {max(self.kept_tokens):,.0f}"
        )

    @property
    def by_part(self) -> str:
        """The kept share of each part, in one line; empty if the prompt is not a chat."""
        shares = (f"{name} {share:.0%} of {n:,}" for name, (n, share) in self.parts.items())
        return f"kept by part: {', '.join(shares)} tokens" if self.parts else ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, payload: dict[str, Any]) -> "KeptMap":
        return cls(**payload)
