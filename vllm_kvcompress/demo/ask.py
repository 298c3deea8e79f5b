"""Send chat requests to a server at once, stream their outputs, and sample the server's gauges."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, cast

from openai import OpenAI

from vllm_kvcompress.serving.exposition import Host, Metrics
from vllm_kvcompress.serving.process import Compressed, Server

NAME = "demo"
SAMPLE_EVERY_S = 0.25
"""Seconds between two samples. Each costs the server a few milliseconds."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The output of one request, and its timing.

    Args:
        text: the decoded output.
        token_ids: all output tokens, including those after the model's end of turn.
        cached_tokens: tokens of the prompt that came from the prefix cache.
        first_token_s: seconds from sending the request to its first output token.
        end_s: seconds from sending the request to its last output token.
        compressed: the request's log line, None if its prompt was not compressed.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    end_s: float
    compressed: Compressed | None

    @property
    def token_s(self) -> float:
        """Return the mean seconds per output token after the first, with the compression."""
        return (self.end_s - self.first_token_s) / max(len(self.token_ids) - 1, 1)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one server did with prompts that were sent at once.

    Args:
        wall_s: seconds until the last request ended.
        mean_running, max_running: running requests, by vLLM's gauge, which counts a request from
            the start of its prefill.
        max_blocks: KV blocks in use, by vLLM's gauge, without its null block.
        blocks_per_request: mean number of blocks that a running request held.
        last_blocks: blocks in use shortly before the end; 0 if the gauge was never read.
        preemptions: how often vLLM took the blocks of a running request.
        first_token_s: median time to first token.
        prefill_s: seconds that requests spent in their prefill, summed over the requests.
        compression_s: seconds that compressions took.
    """

    replies: tuple[Reply, ...]
    wall_s: float
    tokens_per_s: float
    mean_running: float
    max_running: float
    max_blocks: float
    blocks_per_request: float
    last_blocks: float
    preemptions: int
    first_token_s: float
    prefill_s: float
    compression_s: float

    @property
    def request_s(self) -> float:
        """Return the mean seconds until a request was done."""
        return fmean(reply.end_s for reply in self.replies)


def ask_all(
    server: Server,
    prompts: Sequence[str],
    *,
    tokens: int,
    salt: str,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Measured:
    """Send all prompts at once, and return what the server did until all had ended.

    Args:
        tokens: exact number of output tokens of each request.
        salt: prefix of the prefix-cache salts. With a salt that is new to the server, the server
            computes each prompt in full.
        on_tokens: called with the number of output tokens of all requests so far.
    """
    host, client = Host(server.url), OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=900)
    counts = [0] * len(prompts)
    before = host.metrics(30)

    def ask_one(number: int) -> Reply:
        def count(so_far: int) -> None:
            counts[number] = so_far
            on_tokens(sum(counts))

        messages = [{"role": "user", "content": prompts[number]}]
        return ask(client, server, messages, tokens, salt=f"{salt} {number}", on_tokens=count)

    with _sampled(host) as samples, ThreadPoolExecutor(len(prompts)) as pool:
        start = time.perf_counter()
        replies = tuple(pool.map(ask_one, range(len(prompts))))
        wall_s = time.perf_counter() - start
    after = host.metrics(30)

    def increase(name: str) -> float:
        return after.total(name) - before.total(name)

    running, blocks = zip(*samples, strict=True) if samples else ((0.0,), (0.0,))
    return Measured(
        replies=replies,
        wall_s=wall_s,
        tokens_per_s=sum(counts) / wall_s,
        mean_running=fmean(running),
        max_running=max(running),
        max_blocks=max(blocks),
        blocks_per_request=sum(blocks) / (sum(running) or 1),
        last_blocks=next((used for used in reversed(blocks) if used), 0.0),
        preemptions=round(increase("vllm:num_preemptions_total")),
        first_token_s=median(reply.first_token_s for reply in replies),
        prefill_s=increase("vllm:request_prefill_time_seconds_sum"),
        compression_s=increase("vllm:kv_compress_seconds_sum"),
    )


def ask(
    client: OpenAI,
    server: Server,
    messages: Sequence[dict[str, str]],
    tokens: int,
    *,
    salt: str,
    ignore_eos: bool = True,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Reply:
    """Send a chat, and return the timed greedy reply.

    Args:
        tokens: maximum number of output tokens.
        ignore_eos: write `tokens` output tokens even past the model's end of turn, so that all
            servers write equally many.
    """
    ids: list[int] = []
    times: list[float] = []
    text, usage, request = "", None, ""
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model=NAME,
        messages=cast(Any, messages),
        max_tokens=tokens,
        temperature=0,
        seed=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": ignore_eos, "return_token_ids": True, "cache_salt": salt},
    )
    for event in stream:
        for choice in event.choices:
            text += choice.delta.content or ""
            if new_ids := getattr(choice, "token_ids", None):
                times.append(time.perf_counter() - start)
                ids.extend(new_ids)
                on_tokens(len(ids))
        usage = event.usage or usage
        request = event.id
    # The engine adds a suffix to the id.
    lines = [line for line in server.compressed() if line.request.startswith(request)]
    details = usage and usage.prompt_tokens_details
    return Reply(
        text=text,
        token_ids=tuple(ids),
        prompt_tokens=usage.prompt_tokens if usage else 0,
        cached_tokens=(details and details.cached_tokens) or 0,
        first_token_s=times[0],
        end_s=times[-1],
        compressed=lines[-1] if lines else None,
    )


@contextmanager
def _sampled(host: Host) -> Iterator[list[tuple[float, float]]]:
    """Sample the running requests and the KV blocks in use in a thread until the block ends."""
    samples: list[tuple[float, float]] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_EVERY_S):
            metrics = host.metrics(30)
            running = metrics.total("vllm:num_requests_running")
            samples.append((running, _used_blocks(metrics)))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def _used_blocks(metrics: Metrics) -> float:
    """Return the number of KV blocks in use. vLLM's null block never counts as used."""
    (config,) = metrics.of("vllm:cache_config_info")
    total = int(config.labels["num_gpu_blocks"]) - 1
    return round(metrics.total("vllm:kv_cache_usage_perc") * total, 1)
