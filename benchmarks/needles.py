"""Prompts for `quality.py`, and what the full cache makes of them.

The text is CPython's own manual (`vllm_kvcompress.demo.text`), so nothing is downloaded, and every
prompt follows from its seed alone: real English, with or without a fact hidden in it.
"""

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_kvcompress.demo.text import english

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
SHORTEST, LONGEST = 1520, 2980  # tokens of a prompt
FORCED = 32  # tokens whose distributions are compared, the first included
ANSWER = 16  # tokens of an answer
ATTEMPTS = 6  # prompts to try for a needle until the full cache answers one
PLACES = (
    *("Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Oslo", "Cairo", "Tokyo", "Lima"),
    *("Dublin", "Athens", "Moscow", "Boston", "Chicago", "Sydney", "Toronto", "Delhi", "Seoul"),
    *("Lisbon", "Prague", "Warsaw", "Geneva", "Venice", "Munich", "Havana", "Dallas", "Denver"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrasing:
    """How a fact is stated and asked for; ``{place}`` and ``{secret}`` are filled in.

    Args:
        fact: the sentence that is hidden.
        question: what follows the text; with `chat` the user's last line.
        reply: how the answer begins, written for the model.
        chat: whether the prompt is a chat turn (the tokenizer's template) or plain text.
    """

    fact: str
    question: str
    reply: str = ""
    chat: bool = False


# Of 20 prompts (`slots`, seed 0) the demo model's full cache answered: chat 19, qa 18, plain 15; of
# ten of them: chat-reply 9, question 9, magic 7.
_CODE = "The secret code of {place} is {secret}."
PHRASINGS = {
    "plain": Phrasing(fact=_CODE, question="The secret code of {place} is"),
    "question": Phrasing(
        fact=_CODE,
        question="What is the secret code of {place}? The secret code of {place} is",
    ),
    "qa": Phrasing(
        fact=_CODE,
        question="Question: What is the secret code of {place}?\n"
        "Answer: The secret code of {place} is",
    ),
    "magic": Phrasing(
        fact="The special magic number for {place} is: {secret}.",
        question="What is the special magic number for {place} in the text above?"
        " The special magic number for {place} is:",
    ),
    "chat": Phrasing(
        fact=_CODE,
        question="What is the secret code of {place}? Answer with the code alone.",
        chat=True,
    ),
    "chat-reply": Phrasing(
        fact=_CODE,
        question="What is the secret code of {place}?",
        reply="The secret code of {place} is",
        chat=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place among the needles: where the fact lies and how long the prompt is.

    Args:
        index: number of the slot.
        depth: share of the text before the fact.
        tokens: wanted length of the prompt.
        attempt: prompts that were tried for this slot before.
    """

    index: int
    depth: float
    tokens: int
    attempt: int = 0

    def next(self) -> "Slot":
        return replace(self, attempt=self.attempt + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """A prompt with a hidden fact: `ids` are its tokens, `secret` what an answer must contain."""

    slot: Slot
    secret: str
    ids: tuple[int, ...]

    def answered_by(self, text: str) -> bool:
        return self.secret.lower() in text.lower()


def text_lengths(count: int) -> list[int]:
    """`count` lengths from SHORTEST to LONGEST tokens, ascending; more short ones than long."""
    steps = [(i + 0.5) / count for i in range(count)]
    return [SHORTEST + round((LONGEST - SHORTEST) * x * x) for x in steps]


def slots(count: int) -> list[Slot]:
    """`count` slots, depths taking turns from the shortest prompt to the longest."""
    depths = [DEPTHS[(i + i // len(DEPTHS)) % len(DEPTHS)] for i in range(count)]
    pairs = zip(depths, text_lengths(count), strict=True)
    return [Slot(index=i, depth=d, tokens=n) for i, (d, n) in enumerate(pairs)]


def passage(tokenizer: Any, tokens: int, rng: random.Random) -> tuple[str, list[int]]:
    """A stretch of the manual that starts with a paragraph.

    Returns:
        The text, and for each of its `tokens` tokens the offset at which it ends.
    """
    text = english()
    starts = [m.end() for m in re.finditer(r"\n\n(?=[A-Z])", text)]
    room = [at for at in starts if at + tokens * 12 < len(text)]
    start = rng.choice(room)
    part = text[start : start + tokens * 12]
    coded = tokenizer(part, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in coded["offset_mapping"][:tokens]]
    if len(ends) < tokens:
        raise ValueError(f"{tokens} tokens must fit into {len(part)} characters, got {len(ends)}")
    return part[: ends[-1]], ends


def plain_prompt(tokenizer: Any, tokens: int, seed: str) -> list[int]:
    """About `tokens` tokens of the manual and nothing else."""
    text, _ = passage(tokenizer, tokens, random.Random(seed))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def hide(text: str, ends: Sequence[int], fact: str, depth: float) -> str:
    """`text` with `fact` after the sentence that ends nearest to token ``depth * len(ends)``."""
    wanted = ends[min(int(depth * len(ends)), len(ends) - 1)]
    stops = [m.end() for m in re.finditer(r"\.(?=\s)", text)] or [len(text)]
    at = min(stops, key=lambda stop: abs(stop - wanted))
    return f"{text[:at]} {fact}{text[at:]}"


def needle(tokenizer: Any, slot: Slot, phrasing: Phrasing, seed: int) -> Needle:
    """The prompt of a slot's attempt: text, place and secret follow from `seed` and the slot."""
    rng = random.Random(f"{seed}:needle:{slot.index}:{slot.attempt}")
    fill = {"place": rng.choice(PLACES), "secret": str(rng.randrange(1000, 10000))}

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    frame = count(_framed(tokenizer, phrasing.fact.format(**fill), phrasing, fill))
    while True:
        text, ends = passage(tokenizer, slot.tokens - frame, rng)
        if fill["secret"] not in text:
            break
    hidden = hide(text, ends, phrasing.fact.format(**fill), slot.depth)
    prompt = _framed(tokenizer, hidden, phrasing, fill)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return Needle(slot=slot, secret=fill["secret"], ids=tuple(ids))


def _framed(tokenizer: Any, text: str, phrasing: Phrasing, fill: dict[str, str]) -> str:
    """`text` with the question after it, as the model is to see it."""
    asked = f"{text}\n\n{phrasing.question.format(**fill)}"
    if not phrasing.chat:
        return asked
    turn = [{"role": "user", "content": asked}]
    start: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return start + phrasing.reply.format(**fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request for `tokens` tokens, greedily; with `record` its logits are kept.

    Args:
        ids: the prompt.
        force: tokens to emit whatever the logits say.
    """

    name: str
    ids: Sequence[int]
    tokens: int
    record: bool = False
    force: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Prompts, and the full cache's answers to them.

    Args:
        needles: those that it answers.
        texts: prompts of the KL part, by name.
        greedy: its next FORCED tokens after each text.
        logits: ``[FORCED, vocabulary]`` float32 of those tokens.
    """

    needles: Sequence[Needle]
    texts: Mapping[str, list[int]]
    greedy: Mapping[str, list[int]]
    logits: Mapping[str, torch.Tensor]

    def jobs(self) -> list[Job]:
        """The questions, and the texts with their tokens forced."""
        ask = [Job(name=f"needle{n.slot.index}", ids=n.ids, tokens=ANSWER) for n in self.needles]
        return ask + [
            Job(name=name, ids=ids, tokens=FORCED, record=True, force=self.greedy[name])
            for name, ids in self.texts.items()
        ]


def reference(
    engine: Any,
    *,
    needles: int,
    texts: int,
    phrasing: str,
    seed: int,
    known: Mapping[str, Any] | None = None,
) -> tuple[Reference, dict[str, Any]]:
    """Ask the full cache: find needles that it answers, and record its distributions.

    Args:
        engine: a `quality.Engine` that compresses nothing.
        known: the second value of an earlier call, whose prompts are taken again.

    Returns:
        The reference, and how the needles were found.

    Raises:
        RuntimeError: a known needle is not answered any more.
    """
    tokenizer = engine.llm.get_tokenizer()
    prompts = {
        f"text{i}": plain_prompt(tokenizer, n, f"{seed}:text:{i}")
        for i, n in enumerate(text_lengths(texts))
    }
    listen = [Job(name=n, ids=i, tokens=FORCED, record=True) for n, i in prompts.items()]
    greedy = {name: said.token_ids for name, said in engine.run(listen).items()}
    logits = engine.logits(list(prompts))
    todo = slots(needles)
    if known:
        attempts = {int(index): attempt for index, attempt in known["attempts"].items()}
        todo = [replace(s, attempt=attempts[s.index]) for s in todo if s.index in attempts]
    kept: list[Needle] = []
    asked: Counter[float] = Counter()
    while todo:
        made = [needle(tokenizer, slot, PHRASINGS[phrasing], seed) for slot in todo]
        said = engine.run([Job(name=str(n.slot.index), ids=n.ids, tokens=ANSWER) for n in made])
        right = [n for n in made if n.answered_by(said[str(n.slot.index)].text)]
        if known and len(right) < len(made):
            raise RuntimeError("the full cache does not answer the earlier run's needles any more")
        asked.update(n.slot.depth for n in made)
        kept += right
        found = {n.slot.index for n in right}
        todo = [s.next() for s in todo if s.index not in found and s.attempt + 1 < ATTEMPTS]
    kept.sort(key=lambda n: n.slot.index)
    passed = Counter(n.slot.depth for n in kept)
    how = known or {
        "found": len(kept),
        "asked": asked.total(),
        "full_cache_pass_rate": round(len(kept) / max(asked.total(), 1), 3),
        "by_depth": {str(d): f"{passed[d]} of {asked[d]}" for d in sorted(asked)},
        "tokens": [len(n.ids) for n in kept],
        "attempts": {str(n.slot.index): n.slot.attempt for n in kept},
    }
    return Reference(needles=kept, texts=prompts, greedy=greedy, logits=logits), dict(how)
