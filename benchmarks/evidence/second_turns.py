"""Measure second turns of chats when the history is packed in k4v3 or stored as fp8.

    python -m benchmarks.evidence.second_turns --model .cache/smollm2-135m-instruct \\
        --out second_turns.jsonl
    python -m benchmarks.evidence.second_turns --report second_turns.jsonl

The full cache writes the first reply and then the second one, both greedily. Every system is fed
the same chat and the same second reply, so all systems are compared on the same tokens. Each line
of the result has one chat and one system. Run the same command again to continue an interrupted
run.

Systems:

* grid: tokens are packed every 512 tokens, in prompts and outputs. A warm second turn equals a cold
  one.
* late, cold: the history and the second question are computed exactly and packed after the prefill.
* late, warm: the second question reads the first prompt and reply, which are packed already.
* fp8: all tokens have the format fp8 e4m3 with scale 1, during the prefill too.

The first 16 tokens stay exact on the grid and with late packing, and pages hold 64 tokens: the
engine's with KV blocks of 16 tokens in 16 bits.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence.cache_formats import CACHE_FORMATS, CacheFormat
from benchmarks.evidence.outputs import decode_text, divergence
from benchmarks.evidence.reference_model import CacheBatch, ReferenceModel
from benchmarks.evidence.second_turns_table import report
from benchmarks.field import field_items
from benchmarks.field.data import FieldData
from benchmarks.jsonl import append, lines
from benchmarks.origin import commit, machine
from vllm_kvcompress.compare.measures import shared_length
from vllm_kvcompress.compare.tasks import ORDINARY, Item, Message, build_items
from vllm_kvcompress.methods.page_plan import RECENT_TOKENS
from vllm_kvcompress.offline import quantised

CELL = 512
"""Tokens between two packings on the grid."""
PAGE = 64
EXACT_TOKENS = 16
CHUNK = 512
"""Tokens per forward pass."""
GRID = "k4v3, grid"
LATE_COLD, LATE_WARM, FP8 = "k4v3, late, cold", "k4v3, late, warm", "fp8"
SYSTEMS = (GRID, LATE_COLD, LATE_WARM, FP8)
ABOUT_TEXT, ABOUT_REPLY = "about the text", "about the reply"
NUMBERS, READING = "hidden numbers", "reading"
KINDS = (ABOUT_TEXT, ABOUT_REPLY, NUMBERS, READING)
QUESTIONS: Mapping[str, Sequence[str]] = {
    ABOUT_TEXT: (
        "Which examples does the text give, and what does each of them show?",
        "What does the text say about exceptions and special cases? Answer in whole sentences.",
        "How does the text begin, and how does it end? Answer in whole sentences.",
        "What should a reader be careful about, after the text? Answer in whole sentences.",
        "Which sentences of the text matter most to a programmer? Quote them.",
        "List five exact terms of the text, and say what each of them means there.",
    ),
    ABOUT_REPLY: (
        "Rewrite your answer in simpler and shorter sentences.",
        "Give an example for each point of your answer.",
        "What did your answer leave out?",
        "Rewrite your answer as questions and answers.",
        "Rewrite your answer as a friendly letter to a colleague.",
        "Which part of your answer is the most important one, and why?",
    ),
}
"""Second questions of chats whose first one is an ordinary request."""
READING_TASKS = ("hotpotqa_second_turn", "squad_second_turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat of two turns.

    Args:
        kind, name: kind of the second turn, and a unique name.
        first: the first turn's messages. If the last one is the assistant's, the model continues
            it.
        second: the second turn's message.
        begin: beginning of the second reply, sent as the assistant's message; may be empty.
        answers: words that the second reply must name; empty if they are unknown.
        max_tokens: maximum tokens of each reply.
    """

    kind: str
    name: str
    first: tuple[Message, ...]
    second: str
    begin: str
    answers: tuple[str, ...]
    max_tokens: int


@dataclass(slots=True, kw_only=True)
class GrowingCache:
    """The KV cache of one sequence, parts of which may be packed in the format k4v3.

    Args:
        batch: the cache, with space for tokens to come.
        computed: tokens computed so far.
        cell: tokens between two packings while the sequence grows; None if only `pack` packs.
        packed_end: tokens up to which the cache is packed, apart from the first EXACT_TOKENS.
    """

    model: ReferenceModel
    batch: CacheBatch
    computed: int = 0
    cell: int | None = None
    packed_end: int = EXACT_TOKENS

    @classmethod
    def empty(
        cls,
        model: ReferenceModel,
        max_tokens: int,
        *,
        cell: int | None = None,
        cache_format: CacheFormat | None = None,
    ) -> "GrowingCache":
        """Return a cache with space for `max_tokens` tokens."""
        shape = (1, model.kv_heads, max_tokens, model.dim)
        batch = CacheBatch(
            keys=[torch.zeros(shape) for _ in range(model.num_layers)],
            values=[torch.zeros(shape) for _ in range(model.num_layers)],
            lengths=[torch.tensor([0])] * model.num_layers,
            starts=[0] * model.num_layers,
            position=0,
            sliding_windows=model.sliding_windows,
            cache_formats=[cache_format],
        )
        return cls(model=model, batch=batch, cell=cell)

    def copy(self) -> "GrowingCache":
        """Return a copy that can grow on its own."""
        return replace(self, batch=self.batch.select(torch.tensor([0])))

    def add(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute tokens, pack full cells, and return the tokens' hidden states ``[T, d]``."""
        hidden, start = [], 0
        while start < len(tokens):
            cell_end = CHUNK if self.cell is None else self.packed_end + self.cell - self.computed
            part = tokens[start : start + min(CHUNK, cell_end)]
            indices = torch.arange(self.computed, self.computed + len(part))[None]
            hidden.append(self.model.decode(self.batch, torch.tensor([part]), indices)[0])
            self.computed += len(part)
            start += len(part)
            if self.cell is not None and self.computed == self.packed_end + self.cell:
                self.pack()
        return torch.cat(hidden)

    def pack(self) -> None:
        """Round all whole pages that are not packed yet as the format k4v3 does.

        Without a cell, the last tokens stay as they are.
        """
        recent_tokens = RECENT_TOKENS if self.cell is None else 0
        unpacked = self.computed - self.packed_end - recent_tokens
        stop = self.packed_end + max(unpacked, 0) // PAGE * PAGE
        part = slice(self.packed_end, stop)
        if part.start == part.stop:
            return
        for keys, values in zip(self.batch.keys, self.batch.values, strict=True):
            keys[0, :, part], values[0, :, part] = quantised(keys[0, :, part], values[0, :, part])
        self.packed_end = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """Both turns of a chat as the full cache answers them.

    Args:
        first_prompt, second_prompt: token ids. The second one contains the first reply.
        first_reply, second_reply: the output tokens.
        logits: ``[T, vocabulary]`` of the second reply's T tokens.
        after_first_prompt, after_second_prompt: the cache when these had been computed.
    """

    first_prompt: list[int]
    first_reply: list[int]
    second_prompt: list[int]
    second_reply: list[int]
    logits: torch.Tensor
    after_first_prompt: GrowingCache
    after_second_prompt: GrowingCache

    @property
    def max_tokens(self) -> int:
        return len(self.second_prompt) + len(self.second_reply)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct", help="model folder")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--count", type=int, default=6, help="chats of each kind")
    parser.add_argument("--tokens", type=int, default=1500, help="maximum tokens of a first prompt")
    parser.add_argument("--output-tokens", type=int, default=96, help="of a reply to a request")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="JSONL file to append to")
    parser.add_argument(
        "--report", nargs="+", type=Path, metavar="FILE", help="print tables of results instead"
    )
    args = parser.parse_args(argv)
    if args.out is None and not args.report:
        parser.error("give --out to measure, or --report to print tables")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if args.report:
        print(report(args.report))
        return
    torch.set_num_threads(args.threads)
    model = ReferenceModel(args.model)
    origin = {
        "model": Path(args.model).name,
        "tokens": args.tokens,
        "seed": args.seed,
        "commit": commit(),
        "machine": machine(),
    }
    of_chat: dict[str, set[str]] = {}
    for line in lines(args.out):
        if all(line[key] == origin[key] for key in ("model", "tokens", "seed")):
            of_chat.setdefault(line["chat"], set()).add(line["system"])
    chats, start = two_turn_chats(model, args), time.perf_counter()
    for number, chat in enumerate(chats):
        measured = of_chat.get(chat.name, set())
        pending = [system for system in args.systems if system not in measured]
        if pending:
            replies = full_cache_replies(model, chat)
            for system in pending:
                line = {**origin, "kind": chat.kind, "chat": chat.name, "system": system}
                append(args.out, [{**line, **compared(model, chat, replies, system)}])
        seconds = time.perf_counter() - start
        print(f"{chat.name}: {number + 1} of {len(chats)}, {seconds:.0f} s", flush=True)


def two_turn_chats(model: ReferenceModel, args: argparse.Namespace) -> list[Chat]:
    """Return all chats; kinds take turns, so that an interrupted run has all of them."""
    by_kind = [_BUILDERS[kind](model, args, kind) for kind in args.kinds]
    return [chat for of_number in zip(*by_kind, strict=True) for chat in of_number]


def _requests(model: ReferenceModel, args: argparse.Namespace, kind: str) -> list[Chat]:
    """Return chats that begin with an ordinary request about a text."""
    tasks = list(ORDINARY)
    per_task = -(-args.count // len(tasks))
    # Every kind has its own texts.
    seed = args.seed * len(QUESTIONS) + list(QUESTIONS).index(kind)
    items = build_items(tasks, count=per_task, seed=seed, **_text_options(model, args))
    in_turns = [items[task * per_task + n] for n in range(per_task) for task in range(len(tasks))]
    return [
        Chat(
            kind=kind,
            name=f"{kind}/{number}",
            first=item.messages,
            second=QUESTIONS[kind][number % len(QUESTIONS[kind])],
            begin="",
            answers=(),
            max_tokens=args.output_tokens,
        )
        for number, item in enumerate(in_turns[: args.count])
    ]


def _numbers(model: ReferenceModel, args: argparse.Namespace, kind: str) -> list[Chat]:
    """Return chats whose turns ask for two hidden numbers of one text."""
    items = build_items(
        ["niah-multikey-1"],
        count=2 * args.count,
        seed=args.seed,
        questions_per_text=2,
        **_text_options(model, args),
    )
    return [
        Chat(
            kind=kind,
            name=f"{kind}/{number}",
            first=first.messages,
            second=second.messages[0]["content"].rsplit("\n\n", 1)[1],
            begin=second.messages[1]["content"],
            answers=second.answers,
            max_tokens=second.max_tokens,
        )
        for number, (first, second) in enumerate(zip(items[::2], items[1::2], strict=True))
    ]


def _reading(model: ReferenceModel, args: argparse.Namespace, kind: str) -> list[Chat]:
    """Return the field's chats with a second question about the same documents."""
    per_task = -(-args.count // len(READING_TASKS))
    items: list[Item] = field_items(
        FieldData(),
        READING_TASKS,
        count=per_task,
        tokens=args.tokens,
        seed=args.seed,
        count_tokens=model.count_tokens,
    )
    in_turns = [
        item for pair in zip(items[:per_task], items[per_task:], strict=True) for item in pair
    ]
    return [
        Chat(
            kind=kind,
            name=item.name,
            first=item.messages[:1],
            second=item.messages[1]["content"],
            begin="",
            answers=(),
            max_tokens=item.max_tokens,
        )
        for item in in_turns[: args.count]
    ]


def _text_options(model: ReferenceModel, args: argparse.Namespace) -> dict[str, Any]:
    return {"tokens": args.tokens, "question": "last", "count_tokens": model.count_tokens}


_BUILDERS: Mapping[str, Callable[[ReferenceModel, argparse.Namespace, str], list[Chat]]] = {
    ABOUT_TEXT: _requests,
    ABOUT_REPLY: _requests,
    NUMBERS: _numbers,
    READING: _reading,
}


def full_cache_replies(model: ReferenceModel, chat: Chat) -> Replies:
    """Return both replies of the full cache."""
    first_prompt = model.encode(chat.first)
    cache = GrowingCache.empty(model, len(first_prompt) + 4 * chat.max_tokens + 512)
    logits = model.logits(cache.add(first_prompt)[-1])
    after_first_prompt = cache.copy()
    first_reply, _ = greedy(cache, logits, chat.max_tokens)
    begun = chat.first[-1]["content"] if chat.first[-1]["role"] == "assistant" else ""
    messages: list[Message] = [
        *(message for message in chat.first if message["role"] != "assistant"),
        {"role": "assistant", "content": begun + decode_text(model, first_reply)},
        {"role": "user", "content": chat.second},
    ]
    if chat.begin:
        messages.append({"role": "assistant", "content": chat.begin})
    second_prompt = model.encode(messages)
    known = shared_length(second_prompt, first_prompt)
    cache = after_first_prompt.copy()
    cache.computed = known
    last_logits = model.logits(cache.add(second_prompt[known:])[-1])
    after_second_prompt = cache.copy()
    second_reply, reply_logits = greedy(cache, last_logits, chat.max_tokens, chat.answers)
    return Replies(
        first_prompt=first_prompt,
        first_reply=first_reply,
        second_prompt=second_prompt,
        second_reply=second_reply,
        logits=reply_logits,
        after_first_prompt=after_first_prompt,
        after_second_prompt=after_second_prompt,
    )


def greedy(
    cache: GrowingCache, logits: torch.Tensor, max_tokens: int, answers: Sequence[str] = ()
) -> tuple[list[int], torch.Tensor]:
    """Return the output, and its logits ``[T, vocabulary]``.

    Args:
        cache: the cache of the prompt, which grows by the output.
        logits: ``[vocabulary]`` of the first output token.
        answers: the output ends when it contains all of them, if there are any.
    """
    model, tokens, all_logits = cache.model, [int(logits.argmax())], [logits]
    while len(tokens) < max_tokens and tokens[-1] not in model.stop_tokens:
        if answers and contains(model, tokens, answers):
            break
        logits = model.logits(cache.add(tokens[-1:])[0])
        tokens.append(int(logits.argmax()))
        all_logits.append(logits)
    return tokens, torch.stack(all_logits)


def contains(model: ReferenceModel, tokens: Sequence[int], answers: Sequence[str]) -> bool:
    text = decode_text(model, list(tokens))
    return all(answer in text for answer in answers)


def compared(model: ReferenceModel, chat: Chat, replies: Replies, system: str) -> dict[str, Any]:
    """Return a system's figures along the full cache's second reply."""
    cache, first_logits = second_turn(model, replies, system)
    fed = replies.second_reply[:-1]
    logits = first_logits[None]
    if fed:
        logits = torch.cat([logits, model.logits(cache.add(fed))])
    kl = divergence(replies.logits.log_softmax(-1), logits)
    agreed = logits.argmax(-1) == replies.logits.argmax(-1)
    result = {
        "first_prompt_tokens": len(replies.first_prompt),
        "second_prompt_tokens": len(replies.second_prompt),
        "kl": [round(number, 7) for number in kl.tolist()],
        "agreed": "".join("01"[same] for same in agreed.tolist()),
    }
    if chat.answers and contains(model, replies.second_reply, chat.answers):
        result["found"] = bool(agreed.all())
    return result


def second_turn(
    model: ReferenceModel, replies: Replies, system: str
) -> tuple[GrowingCache, torch.Tensor]:
    """Return a system's cache of the second prompt, and the reply's first logits ``[vocabulary]``.

    The logits are those of the prefill, which late packing follows.
    """
    prompt, max_tokens = replies.second_prompt, replies.max_tokens
    if system == LATE_COLD:
        cache = replies.after_second_prompt.copy()
        logits = replies.logits[0]
    elif system == LATE_WARM:
        cache = replies.after_first_prompt.copy()
        known = shared_length(prompt, [*replies.first_prompt, *replies.first_reply])
        cache.computed = min(cache.computed, known)
        cache.pack()
        if replied := prompt[cache.computed : known]:
            cache.add(replied)
            cache.pack()
        logits = model.logits(cache.add(prompt[known:])[-1])
    else:
        options: dict[str, Any] = {"cell": CELL}
        if system == FP8:
            options = {"cache_format": CACHE_FORMATS["fp8"]}
        cache = GrowingCache.empty(model, max_tokens, **options)
        return cache, model.logits(cache.add(prompt)[-1])
    cache.pack()
    return cache, logits


if __name__ == "__main__":
    main()
