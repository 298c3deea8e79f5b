"""What became of one prompt in one cell: figures, and nothing of what was asked or answered."""

from math import fsum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from vllm_kvcompress.compare.client import Answer, Cell
from vllm_kvcompress.compare.measures import (
    PLACES,
    Agreement,
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
    """One prompt in one cell, beside the full cache's answer to it in the same run.

    Args:
        key: the prompt's (`prompts.keys`).
        task, group: the prompt's; None is a group of its own.
        protect: what was protected, as it was asked for; empty for what the server does by itself.
        lookahead: tokens of the answer that judge the prompt, as it was asked for; None likewise.
        kept_tokens: mean of the layers; None where the server said nothing of it.
        by_role: of each role its tokens and the share that was kept; empty likewise.
        exact, shared, similarity: of the two answers (`measures.Agreement`).
        length, full_length: of the answers, in the unit of `shared`.
        loops, full_loops: whether they end in a loop (`measures.loops`).
        places, same_first, kl: over the text that both share (`measures.Divergence`); None where
            the server tells no log-probabilities.
        by_place: the same for each of `measures.PLACES`.
        score, full_score: share of what is known of a right answer that holds (`Item.score`); None
            where nothing is known.
        rules: of each of the prompt's rules, by its name, whether it is obeyed on this side and on
            the other.
        first_token_s, token_s: on this side, in seconds; `full_` on the other. `token_s` is None
            for an answer of one token.
    """

    key: str
    task: str
    group: str | None
    method: str
    budget: int | float | None
    protect: str
    lookahead: Count | None
    prompt_tokens: Count
    kept_tokens: Amount | None
    by_role: dict[str, tuple[Count, Share]]
    exact: bool
    shared: Count
    similarity: Share
    length: Count
    full_length: Count
    loops: bool
    full_loops: bool
    places: Count | None
    same_first: Count | None
    kl: Amount | None
    by_place: tuple[Divergence, ...] | None
    score: Share | None
    full_score: Share | None
    rules: dict[str, tuple[bool, bool]]
    first_token_s: Amount
    token_s: Amount | None
    full_first_token_s: Amount
    full_token_s: Amount | None

    @property
    def cell(self) -> Cell:
        return Cell(
            method=self.method,
            budget=self.budget,
            protect=self.protect,
            lookahead=self.lookahead,
        )

    @property
    def drawn_with(self) -> str:
        """What this prompt is no independent sample of: its group, or other copies of it."""
        return self.group or self.key.partition("#")[0]

    @classmethod
    def of(
        cls,
        item: Item,
        key: str,
        cell: Cell,
        full: Answer,
        other: Answer,
        *,
        kl: bool = True,
    ) -> Self:
        """Compare two answers.

        Args:
            kl: whether to compare what is likely as well.
        """
        sides = (full.names, other.names)
        tokens = all(sides) or not (full.text or other.text)
        found: Agreement = agreement(*sides) if tokens else agreement(full.text, other.text)
        by_place = _by_place(full, other, found) if kl else None
        full_obeyed = item.obeyed(full.text)
        return cls(
            key=key,
            task=item.task,
            group=item.group,
            method=cell.method,
            budget=cell.budget,
            protect=cell.protect,
            lookahead=cell.lookahead,
            prompt_tokens=full.prompt_tokens,
            kept_tokens=None if other.kept_tokens is None else float(other.kept_tokens),
            by_role=dict(other.by_role),
            exact=found.exact,
            shared=found.shared,
            similarity=found.similarity,
            length=len(sides[1]) if tokens else len(other.text),
            full_length=len(sides[0]) if tokens else len(full.text),
            loops=loops(other.text),
            full_loops=loops(full.text),
            places=None if by_place is None else sum(each.places for each in by_place),
            same_first=None if by_place is None else sum(each.same_first for each in by_place),
            kl=None if by_place is None else fsum(each.kl for each in by_place),
            by_place=by_place,
            score=item.score(other.text) if item.known else None,
            full_score=item.score(full.text) if item.known else None,
            rules={
                name: (obeyed, full_obeyed[name])
                for name, obeyed in item.obeyed(other.text).items()
            },
            first_token_s=other.first_token_s,
            token_s=other.token_s,
            full_first_token_s=full.first_token_s,
            full_token_s=full.token_s,
        )


OUTCOME = TypeAdapter(Outcome)


def _by_place(full: Answer, other: Answer, found: Agreement) -> tuple[Divergence, ...] | None:
    """Both caches over the same text: what the two answers share, and the token where they part.

    The first token is left out. It comes from the full cache on both sides.
    """
    if not full.tokens or not other.tokens:
        return None
    # Where they part, what stands before is still the same.
    stop = min(found.shared + 1, len(full.tokens), len(other.tokens))
    judged = range(1, stop)
    return tuple(
        divergence(
            [full.tokens[place].likely for place in judged if place in every],
            [other.tokens[place].likely for place in judged if place in every],
        )
        for every in (range(stop)[places] for places in PLACES.values())
    )
