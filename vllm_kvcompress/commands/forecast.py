"""What `plan` is asked, and what it says: requests, the blocks that they hold, and how many fit."""

from dataclasses import asdict, dataclass
from typing import Any

from vllm_kvcompress.methods.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that are all alike, and share no prompt.

    Args:
        prompt: tokens of the prompt.
        output: tokens of the answer.
        protected: tokens of the prompt that are kept in any case; its first, as it happens.
    """

    prompt: int
    output: int
    protected: int = 0

    @property
    def spans(self) -> Spans:
        """What of the prompt is protected: of what stands at its end no more is kept."""
        return ((0, self.protected),) if self.protected else ()

    @property
    def cached(self) -> int:
        """Tokens with keys and values when the answer ends: its last token needs none."""
        return self.prompt + self.output - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks that one request holds.

    Args:
        prefill: the most until its prompt is packed, so that it must be there once.
        looking: at the end of a look-ahead; as while decoding where there is none.
        decoding: once its prompt is packed: after the step that ends its prefill, or its
            look-ahead.
        end: the most while it answers: with the last token, or where answers are bounded before
            one of the times that it is packed again. A look-ahead counts to its prefill.
        mean: over the steps of its answer, the look-ahead's included.
    """

    prefill: int
    looking: int
    decoding: int
    end: int
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """Requests at once in one pool.

    Args:
        pool_bytes: memory of the pool per GPU.
        blocks: blocks in it that requests may hold.
        decoding: requests that fit while all decode, each as large as it gets.
        beside_prefill: those that fit while one more prompt is in its prefill, that one included.
        most: what the scheduler runs at once, which both obey.
    """

    pool_bytes: int
    blocks: int
    decoding: int
    beside_prefill: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The request that takes the most among those that may be asked for.

    Args:
        asks: what it asks for.
        pool: requests at once when all are like it; None unless the pool's size was given.
    """

    asks: str
    blocks: Blocks
    pool: Concurrency | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InPieces:
    """Tokens that a layer holds between pieces, and a `max_whole` that holds twice the budget."""

    held_tokens: float
    roomy: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What `plan` says. Memory is per GPU.

    Args:
        left_whole: why the prompt is not compressed; None when it is.
        kept_tokens: tokens that a layer keeps of the prompt, mean over layers.
        pages: pages kept over all layers; 0 when the prompt is left whole.
        extra_bytes: what compression takes beside the pool, at most; its tables alone are
            `table_bytes`.
        group: layers whose pages make up a block; None where those are all.
        pool_off, pool_on: None unless the pool's size was given.
        worst: None unless requests may ask for something.
        in_pieces: None for a prompt that stands whole until its end.
        with_states: some layers keep a state, so that a block is long.
        pays_from: tokens from which on every prompt gives a block back, of such models; None of
            others, or where none does.
    """

    load: Load
    block_size: int
    block_bytes: int
    left_whole: str | None
    kept_tokens: float
    pages: int
    off: Blocks
    on: Blocks
    table_bytes: int
    extra_bytes: int
    pool_off: Concurrency | None
    pool_on: Concurrency | None
    worst: Worst | None = None
    group: int | None = None
    in_pieces: InPieces | None = None
    with_states: bool = False
    pays_from: int | None = None

    def to_json(self) -> dict[str, Any]:
        payload = asdict(self)
        payload["request_off"] = self._with_bytes(payload.pop("off"))
        payload["request_on"] = self._with_bytes(payload.pop("on"))
        if payload["worst"] is not None:
            payload["worst"]["request"] = self._with_bytes(payload["worst"].pop("blocks"))
        return payload

    def _with_bytes(self, blocks: dict[str, int]) -> dict[str, int]:
        sizes = {f"{name}_bytes": round(n * self.block_bytes) for name, n in blocks.items()}
        return {**{f"{name}_blocks": count for name, count in blocks.items()}, **sizes}
