"""One streamed chat request, timed by the client, and several of them as one run."""

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
    """What a server answered, and when.

    Args:
        token_ids: all tokens of the answer, also those after the model's end of turn.
        first_token_s: seconds from sending the request to its first token.
        token_s: seconds per token of the second half, which is read from a packed prompt; 0 for
            an answer of one token.
        blocks: KV blocks in use at half of the answer, by vLLM's own gauge; 0 if it had ended when
            the gauge was read.
        compressed: the request's line in the log, None for one that was left whole.
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
    """Stream an answer of exactly `tokens` tokens, greedily.

    Args:
        salt: keeps the prompt apart in the prefix cache; a salt that is new to the server has
            the whole prompt computed.
        on_tokens: is told how many tokens of the answer have come, each time that some come.
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
        # More tokens than the answer has, to time them; the answer is cut at its end of turn.
        extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": salt},
    )
    for event in stream:
        came: Sequence[int] = (
            getattr(event.choices[0], "token_ids", None) or () if event.choices else ()
        )
        if came:
            times.append(time.perf_counter())
            # Once, since reading /metrics takes the server's time, and well before the end, since
            # the engine may be ahead of a busy machine's client.
            if len(ids) < tokens // 2 <= len(ids) + len(came):
                blocks = used_blocks(server)
            ids.extend(came)
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
    """Seconds per token behind the first half of an answer.

    Args:
        times: when some of its tokens came.
        counts: how many there were then.
    """
    half = next(at for at, count in enumerate(counts) if count >= counts[-1] // 2)
    return (times[-1] - times[half]) / max(counts[-1] - counts[half], 1)


def used_blocks(server: Server) -> float:
    """KV blocks in use; one block of vLLM's pool is its null block and never is."""
    total = server.metric("vllm:cache_config_info", "num_gpu_blocks") - 1
    return server.metric("vllm:kv_cache_usage_perc") * total


@dataclass(frozen=True, slots=True)
class Run:
    """What one server did with the same prompt, asked one or several times.

    Args:
        answer: the first answer, up to the model's end of turn.
        token_ids: of that answer, its end of turn left out.
        first_token: the first answer's first token.
        first_token_s: median of the replies.
        token_s: median of the replies.
        blocks: the most of the replies.
        requests: how many replies there were.
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
    """The run that `replies`, at least one, make up.

    Args:
        tokenizer: the model's, a Hugging Face one.
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
