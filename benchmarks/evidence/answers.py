"""How compressed caches answer, beside how the full one does."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from benchmarks.evidence.kept import Kept, as_rows
from benchmarks.evidence.reader import LONGEST_WINDOW, Prompt, Reader, Rows
from vllm_kvcompress.compare.tasks import Item, score


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The full cache's greedy answer of T tokens, until it ends, and the cache behind it.

    Args:
        prompt: what was asked.
        tokens, text: the answer, its end of turn included.
        logits: ``[T - 1, vocabulary]`` of all its tokens but the first.
        cache: of the prompt and all tokens but the last, which nothing was computed of.
        begun: tokens at its start that were given, and that no cache chooses.
    """

    prompt: Prompt
    tokens: list[int]
    text: str
    logits: torch.Tensor
    cache: Prompt
    begun: int = 0

    def after(self, answered: int) -> Prompt | None:
        """The prompt and so many of the answer's tokens, as a prompt that ends with those.

        None where nothing would be read of it any more, so that an engine would not pack it.
        """
        if len(self.tokens) - 1 <= answered:
            return None
        if not answered:
            return self.prompt
        stop = len(self.prompt.ids) + answered
        return replace(
            self.cache,
            ids=self.cache.ids[:stop],
            keys=[k[:, :stop] for k in self.cache.keys],
            values=[v[:, :stop] for v in self.cache.values],
            queries=[
                torch.cat((before, own[:answered]))[-LONGEST_WINDOW:]
                for before, own in zip(self.prompt.queries, self.cache.queries, strict=True)
            ],
            logits=self.logits[answered - 1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One compressed cache against the full one.

    Args:
        tokens: its own greedy answer; the full cache's as far as it agrees, where no more was
            asked for.
        text: what those tokens say.
        same: whether it is the full cache's, token for token.
        kl: nats from the full cache's distributions, of each token of the full cache's own answer
            but the first, which the prefill computes.
        agreed: whether it would choose that token as well.
    """

    tokens: list[int]
    text: str
    same: bool
    kl: list[float]
    agreed: list[bool]

    @property
    def mean_kl(self) -> float | None:
        """Nats per token; None for an answer of one."""
        return fmean(self.kl) if self.kl else None

    @property
    def top1(self) -> float | None:
        """Share of the tokens that it would choose as well; None for an answer of one."""
        return fmean(self.agreed) if self.agreed else None


def ended(reader: Reader, item: Item, tokens: Sequence[int]) -> bool:
    """At a stop token, the last allowed token, or once every answer was named."""
    if tokens[-1] in reader.stops or len(tokens) >= item.max_tokens:
        return True
    # A number may go on: it has ended once something else follows it.
    return bool(item.answers) and score(item.answers, reader.tokenizer.decode(tokens)[:-1]) == 1.0


def full_answer(reader: Reader, item: Item, prompt: Prompt, begun: Sequence[int] = ()) -> Answer:
    """The full cache's answer.

    Args:
        begun: tokens that it begins with whatever the model would say.
    """
    whole = Kept(keys=prompt.keys, values=prompt.values, tokens=0)
    rows = as_rows(prompt, [whole], item.max_tokens)
    rows.queries = [[q[:0]] for q in prompt.queries]
    tokens = [begun[0] if begun else int(prompt.logits.argmax())]
    logits = [prompt.logits[None][:0]]
    while len(tokens) < len(begun) or not ended(reader, item, tokens):
        at = torch.tensor([[len(tokens) - 1]])
        hidden = reader.answer(rows, torch.tensor([tokens[-1:]]), at)
        logits.append(reader.logits(hidden[0]))
        given = begun[len(tokens)] if len(tokens) < len(begun) else None
        tokens.append(int(logits[-1].argmax()) if given is None else given)
    stop = len(prompt.ids) + len(tokens) - 1
    cache = replace(
        prompt,
        ids=[*prompt.ids, *tokens[:-1]],
        keys=[k[0, :, :stop] for k in rows.keys],
        values=[v[0, :, :stop] for v in rows.values],
        queries=[torch.cat(each) for each in rows.queries],
        sums=None,
    )
    return Answer(
        prompt=prompt,
        tokens=tokens,
        text=text_of(reader, tokens),
        logits=torch.cat(logits),
        cache=cache,
        begun=len(begun),
    )


def text_of(reader: Reader, tokens: Sequence[int]) -> str:
    text: str = reader.tokenizer.decode(tokens, skip_special_tokens=True)
    return text


def compare(
    reader: Reader,
    item: Item,
    prompt: Prompt,
    kept: Sequence[Kept],
    full: Answer,
    *,
    own_answers: bool = True,
) -> list[Compared]:
    """Each cache's answer: the full one's tokens as far as it agrees, then its own.

    That is greedy decoding: a token at which it agrees is the one that it would have chosen.

    Args:
        prompt: what `kept` is of: the full answer's prompt, or what stands `Answer.after` some of
            its tokens, which are then the full cache's own.
        own_answers: decode on from where an answer is another.
    """
    answered = len(prompt.ids) - len(full.prompt.ids)
    rows = as_rows(prompt, kept, item.max_tokens - answered)
    fed = full.tokens[answered:-1]
    own = [list(full.tokens[: answered + 1]) for _ in kept]
    kl = [[0.0] * answered for _ in kept]
    agreed = [[True] * answered for _ in kept]
    if fed:
        at = torch.arange(len(fed)).expand(len(kept), -1)
        hidden = reader.answer(rows, torch.tensor(fed).expand(len(kept), -1), at)
        likely = full.logits[answered:].log_softmax(-1)
        wanted = torch.tensor(full.tokens[answered + 1 :])
        for row, states in enumerate(hidden):
            logits = reader.logits(states)
            chosen = logits.argmax(-1)
            given = max(full.begun - answered - 1, 0)
            chosen[:given] = wanted[:given]
            same = chosen == wanted
            kl[row] += divergence(likely, logits).tolist()
            agreed[row] += same.tolist()
            count = int(same.long().cumprod(0).sum())
            own[row] += [*fed[1:], full.tokens[-1]][:count] + chosen[count : count + 1].tolist()
    if own_answers:
        _go_on(reader, item, rows, own, answered)
    return [
        Compared(
            tokens=tokens,
            text=text_of(reader, tokens),
            same=tokens == full.tokens,
            kl=kl[row],
            agreed=agreed[row],
        )
        for row, tokens in enumerate(own)
    ]


def _go_on(reader: Reader, item: Item, rows: Rows, own: list[list[int]], answered: int) -> None:
    """Decode greedily until each answer ends; `answered` tokens are in the rows' prompt."""
    room = item.max_tokens - answered

    def open_rows(among: Sequence[int]) -> list[int]:
        return [row for row in among if not ended(reader, item, own[row])]

    left = open_rows(range(len(own)))
    mine = list(range(len(own)))  # rows of the batch, as they stand in `rows`
    while left:
        if len(left) <= len(mine) // 2:
            rows, mine = rows.only(torch.tensor([mine.index(row) for row in left])), list(left)
        # Rows that have ended stay in the batch until it is halved; they write behind their end.
        at = torch.tensor([[len(own[row]) - 1 - answered] for row in mine]).clamp(max=room - 1)
        fed = torch.tensor([own[row][-1:] for row in mine])
        chosen = reader.logits(reader.answer(rows, fed, at)[:, -1]).argmax(-1).tolist()
        for row, token in zip(mine, chosen, strict=True):
            if row in left:
                own[row].append(token)
        left = open_rows(left)


def divergence(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``KL(full || other)`` in nats ``[T]``, of log-probabilities and logits ``[T, V]``."""
    return (full.exp() * (full - other.log_softmax(-1))).sum(-1).clamp(min=0)
