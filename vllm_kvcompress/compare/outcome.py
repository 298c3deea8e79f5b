"""Result of one prompt in one cell, as numbers only: no prompt or output text."""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from vllm_kvcompress.compare.client import Cell, Completion
from vllm_kvcompress.compare.measures import (
    POSITION_RANGES,
    Divergence,
    agreement,
    divergence,
    loops,
)
from vllm_kvcompress.compare.tasks import Item

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True))
class Outcome:
    """One prompt in one cell, compared with the full cache's output in the same run.

    A line of ``journal.jsonl`` holds these fields. Fields with the prefix ``full_`` are of the
    full cache.

    Args:
        key: SHA-256 key of the prompt (`prompts.keys`).
        task: task of the prompt.
        group: shared by prompts over the same text. None if the prompt has its text for itself.
        prompt_tokens: prompt length in tokens.
        kept_tokens: tokens kept per layer, mean over layers. None if the server did not report it.
        exact, shared, similarity: comparison of the two outputs (`measures.Agreement`).
        length, full_length: output lengths, in the unit of `shared`.
        loops, full_loops: whether the output repeats itself (`measures.loops`).
        by_place: comparison of probabilities over the shared text and the next token, for each of
            `measures.POSITION_RANGES`. None if the server reports no log-probabilities.
        score, full_score: share of the expected answers and rules that hold (`Item.score`). None
            if the prompt has neither.
        rules: for each rule name, whether the compressed and the full cache obey it.
        first_token_s, full_first_token_s: time to first token in seconds.
        token_s, full_token_s: seconds per further output token. None for a single output token.
        bytes: bytes of the compressed prompt, relative to an uncompressed cache in the model's
            dtype. For another server, those of its cache's dtype. None if not known.
    """

    key: str
    task: str
    group: str | None
    cell: Cell
    prompt_tokens: Count
    kept_tokens: Amount | None
    exact: bool
    shared: Count
    similarity: Share
    length: Count
    full_length: Count
    loops: bool
    full_loops: bool
    by_place: tuple[Divergence, ...] | None
    score: Share | None
    full_score: Share | None
    rules: dict[str, tuple[bool, bool]]
    first_token_s: Amount
    token_s: Amount | None
    full_first_token_s: Amount
    full_token_s: Amount | None
    bytes: Amount | None = None

    @property
    def drawn_with(self) -> str:
        """Return the sampling group: the group of the prompt, or the key shared by its copies."""
        return self.group or self.key.partition("#")[0]

    @classmethod
    def of(
        cls,
        item: Item,
        key: str,
        cell: Cell,
        full: Completion,
        compressed: Completion,
        *,
        kl: bool = True,
        dtype_bytes: float | None = 1.0,
    ) -> Self:
        """Return the comparison of two completions of one prompt.

        Args:
            kl: also compare token probabilities.
            dtype_bytes: bytes of a token in the KV cache of the server that wrote `compressed`,
                relative to the model's dtype. None if not known.
        """
        # Without tokens, compare characters, unless both outputs are empty.
        has_tokens = bool(full.tokens and compressed.tokens) or not (full.text or compressed.text)
        full_output = full.tokens if has_tokens else full.text
        output = compressed.tokens if has_tokens else compressed.text
        agreed = agreement(full_output, output)
        share = 1.0 if cell.server else compressed.bytes_share
        obeyed, full_obeyed = item.obeyed(compressed.text), item.obeyed(full.text)
        return cls(
            key=key,
            task=item.task,
            group=item.group,
            cell=cell,
            bytes=None if share is None or dtype_bytes is None else share * dtype_bytes,
            prompt_tokens=full.prompt_tokens,
            kept_tokens=None if compressed.kept_tokens is None else float(compressed.kept_tokens),
            exact=agreed.exact,
            shared=agreed.shared,
            similarity=agreed.similarity,
            length=len(output),
            full_length=len(full_output),
            loops=loops(compressed.text),
            full_loops=loops(full.text),
            by_place=_by_place(full, compressed, agreed.shared) if kl else None,
            score=item.score(compressed.text) if item.known else None,
            full_score=item.score(full.text) if item.known else None,
            rules={name: (obeyed[name], full_obeyed[name]) for name in obeyed},
            first_token_s=compressed.first_token_s,
            token_s=compressed.token_s,
            full_first_token_s=full.first_token_s,
            full_token_s=full.token_s,
        )


OUTCOME = TypeAdapter(Outcome)


def _by_place(
    full: Completion, compressed: Completion, shared: int
) -> tuple[Divergence, ...] | None:
    """Return the divergence in each position range, over the shared tokens and the next one.

    Leaves out the first output token, which comes from the full cache on both sides. Returns None
    if a side has no tokens.
    """
    if not full.tokens or not compressed.tokens:
        return None
    # At the first different token, the preceding text is still the same on both sides.
    stop = min(shared + 1, len(full.tokens), len(compressed.tokens))
    ranges = (range(stop)[bounds] for bounds in POSITION_RANGES.values())
    return tuple(
        divergence(
            [full.logprobs[i] for i in positions if i],
            [compressed.logprobs[i] for i in positions if i],
        )
        for positions in ranges
    )
