"""Ordinary requests about two separate halves of CPython's manual, and an engine that runs them."""

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from benchmarks.evidence.reference_model import encode
from vllm_kvcompress.compare.tasks import ORDINARY, build_items
from vllm_kvcompress.serving.text import english

Half = Literal["training", "measured"]
"""Training requests are about the first half of the manual, measured ones about the second."""


class Prompt(NamedTuple):
    """An ordinary request: its name, and the token ids of its chat."""

    name: str
    ids: list[int]


def prompts(
    tokenizer: Any, half: Half, *, shortest: int, longest: int, seed: int
) -> Iterator[Prompt]:
    """Yield ordinary requests forever, the kinds in turns; equal arguments give equal prompts.

    A request whose text is not within `half` of the manual is drawn again.

    Args:
        tokenizer: the model's.
        half: the half of the manual that texts come from.
        shortest, longest: bounds of a text's maximum length in tokens, which is drawn with a
            uniform logarithm. The chat template adds tokens.
        seed: seed of every random draw.
    """
    rng, kinds, number = random.Random(f"{seed}:{half}"), list(ORDINARY), 0
    while True:
        tokens = round(shortest * (longest / shortest) ** rng.random())
        kind = kinds[number % len(kinds)]
        (item,) = build_items(
            [kind],
            count=1,
            tokens=tokens,
            seed=rng.randrange(2**32),
            question="last",
            count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        )
        text = item.messages[0]["content"].split("\n\n", 1)[1].rsplit("\n\n", 1)[0]
        if half_of(text) == half:
            yield Prompt(f"{kind}/{number}", encode(tokenizer, item.messages))
            number += 1


def half_of(text: str) -> Half | None:
    """Return the half of the manual that contains `text`, None if neither does."""
    manual = english()
    start = manual.find(text)
    if start < 0:
        return None  # the text continues at the beginning of the manual
    if start + len(text) <= len(manual) // 2:
        return "training"
    return "measured" if start >= len(manual) // 2 else None


@contextmanager
def engine(model: str, **options: Any) -> Iterator[Any]:
    """Run an LLM in this process, in float32, and shut it down at the end."""
    from vllm import LLM

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
