"""Run chats of several turns on a server whose KV pool holds only some of them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from openai import OpenAI
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_kvcompress.demo.ask import ask
from vllm_kvcompress.serving.process import Server

CHATS, TURNS = 8, 3
FIT = 3
"""Uncompressed chats that fit into the pool of vLLM alone."""
BLOCK = 32
"""Tokens of a KV block: a packed page of k4v3 then holds 128 tokens, or 256 in float32."""
TEXT_TOKENS, REPLY_TOKENS = 700, 40
QUESTION_TOKENS = 40
"""Most tokens that a later turn adds beside its reply: the question and the chat template."""
CHAT_TOKENS = TEXT_TOKENS + 100 + TURNS * (REPLY_TOKENS + QUESTION_TOKENS)
"""Most tokens of a chat at its end. The 100 are the first instruction and the chat template."""
FOLLOW_UPS = (
    "What does the text say about exceptions and special cases? Answer in whole sentences.",
    "Rewrite your last answer in simpler and shorter sentences.",
    "Which examples does the text give, and what does each of them show?",
    "What did your last answer leave out?",
    "How does the text begin, and how does it end? Answer in whole sentences.",
    "Give an example for each point of your last answer.",
    "What should a reader be careful about, after the text?",
)
REUSE = "--kv-compress cake-chunk --kv-budget 1.0 --kv-packed-dtype k4v3 --kv-reuse grid"


@dataclass(slots=True, kw_only=True)
class Chat:
    """A chat with one server.

    Args:
        number: number of the chat, the same on all servers.
        messages: all messages so far.
        max_tokens: maximum tokens of each reply.
    """

    number: int
    messages: list[dict[str, str]]
    max_tokens: int

    def ask_follow_up(self, turn: int) -> None:
        """Add the question of a later turn, counted from 1."""
        question = FOLLOW_UPS[(self.number + turn) % len(FOLLOW_UPS)]
        self.messages.append({"role": "user", "content": question})


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of a chat.

    Args:
        cached_tokens: tokens of the prompt that came from the prefix cache.
        first_token_s: seconds from sending the request to its first output token.
    """

    chat: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float

    @property
    def is_warm(self) -> bool:
        """Return whether at least half of the prompt came from the prefix cache."""
        return 2 * self.cached_tokens >= self.prompt_tokens


def pool_blocks(*, compressed: bool, sixteen_bits: bool) -> int:
    """Return the KV blocks of a server's pool: `FIT` uncompressed chats in 16 bits.

    In float32, a packed page takes an eighth of its tokens' blocks instead of a quarter. So the
    compressed server then gets half of the blocks, and its pages the share that they have in 16
    bits.
    """
    blocks = FIT * -(-CHAT_TOKENS // BLOCK)
    return blocks // 2 if compressed and not sixteen_bits else blocks


def run(server: Server, requests: Sequence[str]) -> Iterator[Turn]:
    """Run all turns of chats that begin with `requests`, one request at a time.

    Each turn has an order of its own: in a fixed order, an LRU cache that is too small for all
    chats always evicts the history that is needed next.
    """
    client = OpenAI(base_url=f"{server.url}/v1", api_key="-", timeout=900)
    chats = [
        Chat(number=n, messages=[{"role": "user", "content": text}], max_tokens=REPLY_TOKENS)
        for n, text in enumerate(requests)
    ]
    for turn in range(1, TURNS + 1):
        random.Random(turn).shuffle(chats)
        for chat in chats:
            if turn > 1:
                chat.ask_follow_up(turn)
            reply = ask(client, server, chat.messages, chat.max_tokens, salt="chats")
            chat.messages.append({"role": "assistant", "content": reply.text})
            yield Turn(
                chat=chat.number,
                turn=turn,
                prompt_tokens=reply.prompt_tokens,
                cached_tokens=reply.cached_tokens,
                first_token_s=reply.first_token_s,
            )


def failures(compressed: Sequence[Turn]) -> list[str]:
    """Return why the chats failed: no later turn of the compressed server was warm."""
    if any(turn.is_warm for turn in compressed if turn.turn > 1):
        return []
    return ["No later turn of a chat read its history from the prefix cache."]


def losses(alone: Sequence[Turn], compressed: Sequence[Turn]) -> list[str]:
    """Return the losses against vLLM alone: slower first turns, which find nothing cached."""
    off, on = (
        fmean(turn.first_token_s for turn in turns if turn.turn == 1)
        for turns in (alone, compressed)
    )
    if on <= 1.02 * off:
        return []
    return [f"A chat's first token took {on:.3g} s with --kv-reuse, and {off:.3g} s without."]


def show(
    alone: Sequence[Turn], compressed: Sequence[Turn], *, sixteen_bits: bool, console: Console
) -> None:
    """Print what both servers did with the later turns."""
    blocks = [pool_blocks(compressed=which, sixteen_bits=sixteen_bits) for which in (False, True)]
    console.print(
        f"\n[bold]{CHATS} chats of {TURNS} turns[/], one request at a time. vLLM alone has"
        f" {blocks[0]} KV blocks of {BLOCK} tokens, enough for\n{FIT} chats; the other server has"
        f" {blocks[1]}"
        + ("." if sixteen_bits else ", because packing saves twice as much in float32.")
        + "\n"
    )
    table = Table("", "vLLM alone", "compressed, --kv-reuse grid", box=box.HORIZONTALS)
    later = [[turn for turn in turns if turn.turn > 1] for turns in (alone, compressed)]
    table.add_row(
        "later turns that found half of their prompt or more",
        *(f"{sum(turn.is_warm for turn in turns)} of {len(turns)}" for turns in later),
    )
    table.add_row(
        "prompt tokens of later turns from the prefix cache",
        *(
            f"{sum(t.cached_tokens for t in turns) / sum(t.prompt_tokens for t in turns):.0%}"
            for turns in later
        ),
    )
    table.add_row(
        "time to first token of later turns, mean",
        *(f"{fmean(turn.first_token_s for turn in turns):.2f} s" for turns in later),
    )
    console.print(table)
