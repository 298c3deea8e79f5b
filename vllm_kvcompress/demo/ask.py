"""Send a chat request, stream and time its output, and summarise several replies."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from openai import OpenAI

from vllm_kvcompress.serving.process import Compressed, Server

NAME = "demo"


@dataclass(frozen=True, slots=True)
class Reply:
    """The output of one request, and its timing.

    Args:
        token_ids: all output tokens, including those after the model's end of turn.
        first_token_s: seconds from sending the request to its first output token.
        token_s: seconds per token in the second half of the output, when the prompt is already
            compressed; 0 for an output of one token.
        blocks: KV blocks in use halfway through the output, from vLLM's own gauge; 0 if the request
            had ended when the gauge was read.
        compressed: the request's log line, None if its prompt was not compressed.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int
    first_token_s: float
    token_s: float
    blocks: float
    compressed: Compressed | None


def ask(
    server: Server,
    prompt: str,
    *,
    tokens: int,
    salt: str,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Reply:
    """Send a prompt, and return the timed reply: exactly `tokens` greedy output tokens.

    Args:
        salt: the prefix-cache salt. With a salt that is new to the server, the server computes
            the prompt in full.
        on_tokens: called with the number of output tokens so far, each time that some arrive.
    """
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
    ids: list[int] = []
    times: list[float] = []
    counts: list[int] = []
    prompt_tokens, blocks = 0, 0.0
    lines, start = len(server.compressed()), time.perf_counter()
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        # Generate past the model's end of turn, to have enough tokens to time.
        extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": salt},
    )
    for event in stream:
        new_ids: Sequence[int] = (
            getattr(event.choices[0], "token_ids", None) or () if event.choices else ()
        )
        if new_ids:
            times.append(time.perf_counter())
            # Read the gauge once, because /metrics costs server time. Read it halfway, because on
            # a busy machine the engine may finish before the client has read the last tokens.
            if len(ids) < tokens // 2 <= len(ids) + len(new_ids):
                blocks = used_blocks(server)
            ids.extend(new_ids)
            counts.append(len(ids))
            on_tokens(len(ids))
        if event.usage:
            prompt_tokens = event.usage.prompt_tokens
    reports = server.compressed()[lines:]
    return Reply(
        token_ids=tuple(ids),
        prompt_tokens=prompt_tokens,
        first_token_s=times[0] - start,
        token_s=_per_token(times, counts),
        blocks=blocks,
        compressed=reports[-1] if reports else None,
    )


def _per_token(times: Sequence[float], counts: Sequence[int]) -> float:
    """Return the seconds per token in the second half of an output.

    Args:
        times: the times at which tokens arrived.
        counts: the number of tokens received by each of these times.
    """
    half = next(at for at, count in enumerate(counts) if count >= counts[-1] // 2)
    return (times[-1] - times[half]) / max(counts[-1] - counts[half], 1)


def used_blocks(server: Server) -> float:
    """Return the number of KV blocks in use. vLLM's null block never counts as used."""
    total = server.metric("vllm:cache_config_info", "num_gpu_blocks") - 1
    return server.metric("vllm:kv_cache_usage_perc") * total


@dataclass(frozen=True, slots=True)
class Run:
    """A summary of one server's replies to the same prompt.

    Args:
        answer: text of the first reply, up to the model's end of turn.
        token_ids: tokens of `answer`, without the end of turn.
        first_token: first token of the first reply.
        first_token_s: median over the replies.
        token_s: median over the replies.
        blocks: maximum over the replies.
        requests: number of replies.
    """

    answer: str
    token_ids: tuple[int, ...]
    first_token: str
    first_token_id: int
    prompt_tokens: int
    first_token_s: float
    token_s: float
    blocks: float
    requests: int
    compressed: Compressed | None


def summary(replies: Sequence[Reply], tokenizer: Any) -> Run:
    """Return a summary of `replies`, of which there must be at least one.

    Args:
        tokenizer: the model's Hugging Face tokenizer.
    """
    first = replies[0]
    ids = list(first.token_ids)
    end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
    return Run(
        answer=tokenizer.decode(ids[:end]).strip(),
        token_ids=tuple(ids[:end]),
        first_token=tokenizer.decode(ids[:1]),
        first_token_id=ids[0],
        prompt_tokens=first.prompt_tokens,
        first_token_s=median(reply.first_token_s for reply in replies),
        token_s=median(reply.token_s for reply in replies),
        blocks=max(reply.blocks for reply in replies),
        requests=len(replies),
        compressed=first.compressed,
    )
