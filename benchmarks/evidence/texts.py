"""Plain texts from CPython's manual, to compare how compressed caches continue them."""

import random
import re

from vllm_kvcompress.compare.tasks import CountTokens, Item
from vllm_kvcompress.compare.tasks.items import largest_fitting
from vllm_kvcompress.serving.text import english

TASK = "texts"
NEXT_TOKENS = 32


def text_items(*, count: int, tokens: int, seed: int, count_tokens: CountTokens) -> list[Item]:
    """Return plain texts of up to `tokens` tokens for the model to continue, without a question."""
    return [
        Item(
            name=f"{TASK}/{number}",
            task=TASK,
            messages=({"role": "assistant", "content": text},),
            answers=(),
            max_tokens=NEXT_TOKENS,
        )
        for number in range(count)
        for text in [passage(tokens, random.Random(f"{seed}:{TASK}:{number}"), count_tokens)]
    ]


def passage(tokens: int, rng: random.Random, count_tokens: CountTokens) -> str:
    """Return the longest passage of up to `tokens` tokens that starts at a random paragraph."""
    text = english()
    starts = [m.end() for m in re.finditer(r"\n\n(?=[A-Z])", text)]
    start = rng.choice([index for index in starts if index + tokens * 12 < len(text)])
    ends = [m.end() for m in re.finditer(r"\S+", text[start : start + tokens * 12])]

    def fits(words: int) -> bool:
        return words <= len(ends) and count_tokens(text[start : start + ends[words - 1]]) <= tokens

    return text[start : start + ends[largest_fitting(fits, 1) - 1]]
