"""Prompts of English text."""

from typing import Any

from vllm_kvcompress.serving.text import QUESTION, english


def long_prompt(tokenizer: Any, num_tokens: int, question: str = QUESTION) -> str:
    """About the first `num_tokens` tokens of `english`, followed by `question`.

    Args:
        tokenizer: a Hugging Face tokenizer.
        num_tokens: number of text tokens before the question, at least 1.
    """
    ids = tokenizer.encode(english()[: num_tokens * 12], add_special_tokens=False)[:num_tokens]
    text: str = tokenizer.decode(ids)
    return f"{text}\n\n{question}"
