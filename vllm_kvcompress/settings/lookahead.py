"""Settings that let an answer's first tokens judge its prompt; off unless a number is given."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads, choose
from vllm_kvcompress.settings.parsing import whole_tokens

MAX_LOOKAHEAD = 1024
Yields = Literal["preemption", "waiting", "never"]
YIELDS: tuple[Yields, ...] = ("preemption", "waiting", "never")


class LookaheadSettings(BaseModel):
    """The settings of `CompressionConfig` that concern the look-ahead."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lookahead: int | None = Field(default=None, ge=0, le=MAX_LOOKAHEAD)
    """Tokens of the answer that a prompt stays whole for, and that judge it then. 0 packs it at the
    end of its prefill; None takes the preset's."""
    lookahead_slots: int | None = Field(default=None, ge=1, strict=True)
    """Requests that look ahead at once, whose last queries are kept; None takes as many as run, and
    no more than 1 GiB of queries (`planning.memory`)."""

    lookahead_yields: Yields = "preemption"
    """When the pool is short, prompts are packed before their look-ahead is over: before a request
    would be preempted, also so that the next waiting one fits, or never."""

    @field_validator("lookahead_yields", mode="before")
    @classmethod
    def _known_word(cls, value: Any) -> str:
        return choose("lookahead_yields", {word: word for word in YIELDS}, str(value))

    @field_validator("lookahead", mode="before")
    @classmethod
    def _tokens_of_an_answer(cls, value: Any) -> Any:
        return whole_tokens(value)

    def refuse_lookahead_nonsense(
        self, compress: str, reads: Reads, least: int, *, bounded: bool
    ) -> None:
        """Check the look-ahead against the method.

        Args:
            compress: the method's name.
            reads: what it reads of a prompt.
            least: smallest observation window that it can judge by.
            bounded: answers have a budget.

        Raises:
            ConfigError: with what must hold, what was given, and what to do.
        """
        if bounded and self.lookahead_slots is not None:
            raise ConfigError(
                f"lookahead_slots={self.lookahead_slots} cannot be set with --kv-decode-budget, for"
                " which the last queries of every request are kept; remove lookahead_slots"
            )
        if not self.lookahead:
            return
        if not scores_by_window(reads):
            raise ConfigError(
                f"lookahead={self.lookahead} needs a method that judges a prompt by its latest"
                f" queries, and {compress!r} does not; set lookahead to 0, or choose another method"
            )
        if self.lookahead < least:
            raise ConfigError(
                f"lookahead must be at least {least} for {compress!r}, got {self.lookahead}; set"
                f" lookahead to {least} or more, or to 0"
            )


def scores_by_window(reads: Reads) -> bool:
    """Whether a method that reads so much judges tokens by the latest queries alone.

    One that adds up the attention of all rows has hundreds of them beside an answer's first ones.
    """
    return Reads.WINDOW in reads and Reads.COLUMN_SUMS not in reads
