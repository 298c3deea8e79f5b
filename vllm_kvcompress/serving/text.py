"""Long real English that needs no download: CPython ships its own manual's topics."""

import pydoc_data.topics
from typing import Any

QUESTION = "What is the text above about? Answer in one sentence."


def english() -> str:
    """Half a megabyte of the Python language reference."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def long_prompt(tokenizer: Any, num_tokens: int, question: str = QUESTION) -> str:
    """The start of `english`, cut to about `num_tokens` tokens, and `question` after it.

    Args:
        tokenizer: a Hugging Face tokenizer.
        num_tokens: tokens of the text without the question, at least 1.
    """
    ids = tokenizer.encode(english()[: num_tokens * 12], add_special_tokens=False)[:num_tokens]
    text: str = tokenizer.decode(ids)
    return f"{text}\n\n{question}"
