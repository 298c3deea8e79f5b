"""How compressed caches answer, beside how the full one does."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.evidence.kept import Kept, as_rows
from benchmarks.evidence.reader import Prompt, Reader, Rows
from vllm_kvcompress.compare.tasks import Item, score


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Greedy tokens until the answer ends, and their text."""

    tokens: list[int]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One compressed cache against the full one.

    Args:
        tokens: its own greedy answer.
        score: share of the answers that this names.
        same: whether it is the full cache's, token for token.
        kl: nats per token from the full cache's distributions, along the full cache's own answer
            without its first token, which the prefill computes; None where that has no second.
        top1: share of those tokens that it would choose as well.
    """

    tokens: list[int]
    score: float
    same: bool
    kl: float | None
    top1: float | None


def ended(reader: Reader, item: Item, tokens: Sequence[int]) -> bool:
    """At a stop token, the last allowed token, or once every answer was named."""
    if tokens[-1] in reader.stops or len(tokens) >= item.max_tokens:
        return True
    # A number may go on: it has ended once something else follows it.
    return bool(item.answers) and score(item.answers, reader.tokenizer.decode(tokens)[:-1]) == 1.0


def full_answer(reader: Reader, item: Item, prompt: Prompt) -> tuple[Answer, torch.Tensor]:
    """The full cache's answer of T tokens, and its logits ``[T - 1, vocabulary]`` but the first."""
    whole = Kept(keys=prompt.keys, values=prompt.values, tokens=0)
    rows = as_rows(prompt, [whole], item.max_tokens)
    tokens = [int(prompt.logits.argmax())]
    logits = [prompt.logits[None][:0]]
    while not ended(reader, item, tokens):
        at = torch.tensor([[len(tokens) - 1]])
        logits.append(reader.answer(rows, torch.tensor([tokens[-1:]]), at)[0])
        tokens.append(int(logits[-1].argmax()))
    return _answer(reader, tokens), torch.cat(logits)


def _answer(reader: Reader, tokens: list[int]) -> Answer:
    return Answer(tokens=tokens, text=reader.tokenizer.decode(tokens, skip_special_tokens=True))


def compare(
    reader: Reader,
    item: Item,
    prompt: Prompt,
    kept: Sequence[Kept],
    full: Answer,
    full_logits: torch.Tensor,
) -> list[Compared]:
    """Each cache's answer: the full one's tokens as far as it agrees, then its own.

    That is greedy decoding: a token at which it agrees is the one that it would have chosen.
    """
    rows = as_rows(prompt, kept, item.max_tokens)
    steps = len(full.tokens) - 1
    own = [list(full.tokens[:1]) for _ in kept]
    kl: list[float | None] = [None] * len(kept)
    top1: list[float | None] = [None] * len(kept)
    if steps:
        at = torch.arange(steps).expand(len(kept), -1)
        fed = torch.tensor(full.tokens[:-1]).expand(len(kept), -1)
        logits = reader.answer(rows, fed, at)
        chosen, wanted = logits.argmax(-1), torch.tensor(full.tokens[1:])
        agreed = (chosen == wanted).long()
        kl = divergence(full_logits, logits).mean(-1).tolist()
        top1 = agreed.double().mean(-1).tolist()
        for row, count in enumerate(agreed.cumprod(-1).sum(-1).tolist()):
            end = int(count) + 1
            own[row] = [*full.tokens[:end], *chosen[row, count : count + 1].tolist()]
    _go_on(reader, item, rows, own)
    return [
        Compared(
            tokens=tokens,
            score=score(item.answers, reader.tokenizer.decode(tokens, skip_special_tokens=True)),
            same=tokens == full.tokens,
            kl=kl[row],
            top1=top1[row],
        )
        for row, tokens in enumerate(own)
    ]


def _go_on(reader: Reader, item: Item, rows: Rows, own: list[list[int]]) -> None:
    """Decode greedily until each answer ends."""

    def open_rows(among: Sequence[int]) -> list[int]:
        return [row for row in among if not ended(reader, item, own[row])]

    left = open_rows(range(len(own)))
    mine = list(range(len(own)))  # rows of the batch, as they stand in `rows`
    while left:
        if len(left) <= len(mine) // 2:
            rows, mine = rows.only(torch.tensor([mine.index(row) for row in left])), list(left)
        # Rows that have ended stay in the batch until it is halved; they write behind their end.
        at = torch.tensor([[len(own[row]) - 1] for row in mine]).clamp(max=item.max_tokens - 1)
        fed = torch.tensor([own[row][-1:] for row in mine])
        chosen = reader.answer(rows, fed, at)[:, -1].argmax(-1).tolist()
        for row, token in zip(mine, chosen, strict=True):
            if row in left:
                own[row].append(token)
        left = open_rows(left)


def divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``KL(full || other)`` in nats ``[R, T]`` of logits ``[T, V]`` and ``[R, T, V]``."""
    p = full.log_softmax(-1)
    return (p.exp() * (p - other.log_softmax(-1))).sum(-1).clamp(min=0)
