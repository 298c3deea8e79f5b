"""Long English text that needs no download: the reference manual of CPython 3.11.7.

The text is stored beside this file, because every Python release ships a different manual and the
prompts must be the same on every machine.
"""

import gzip
from functools import cache
from importlib.resources import files
from typing import Any

QUESTION = "What is the text above about? Answer in one sentence."


@cache
def english() -> str:
    """Half a megabyte of the Python language reference."""
    packed = files(__package__).joinpath("manual.txt.gz").read_bytes()
    return gzip.decompress(packed).decode()


def long_prompt(tokenizer: Any, num_tokens: int, question: str = QUESTION) -> str:
    """About the first `num_tokens` tokens of `english`, followed by `question`.

    Args:
        tokenizer: a Hugging Face tokenizer.
        num_tokens: number of text tokens before the question, at least 1.
    """
    ids = tokenizer.encode(english()[: num_tokens * 12], add_special_tokens=False)[:num_tokens]
    text: str = tokenizer.decode(ids)
    return f"{text}\n\n{question}"
