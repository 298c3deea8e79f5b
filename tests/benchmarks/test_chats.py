"""The chats benchmark: its servers, its prompts, what it sends, and its tables. No times."""

import json
from itertools import count
from types import SimpleNamespace

import pytest

from benchmarks import chats
from benchmarks.chats_table import ALONE, PRESSURE, WARM, is_warm, report
from vllm_kvcompress.demo import ask
from vllm_kvcompress.demo.ask import Reply
from vllm_kvcompress.demo.chats import FOLLOW_UPS

ARGS = chats.arguments(["--chats", "7", "--out", "unused"])


def count_words(text):
    return len(text.split())


@pytest.mark.parametrize(
    ("sixteen_bits", "share"), [(True, 1), (False, 2)], ids=["16 bits", "float32"]
)
def test_all_pools_have_the_bytes_of_the_same_sixteen_bit_tokens(sixteen_bits, share):
    """In float32, a packed page holds the tokens of twice as many blocks."""
    alone, fp8, plugin = chats.systems(ARGS, PRESSURE, sixteen_bits=sixteen_bits, fp8_cache=False)
    assert (alone.name, fp8.name) == (ALONE, chats.FP8_BLOCKS)
    assert alone.flags == fp8.flags == ()
    assert plugin.flags[-2:] == ("--kv-reuse", "grid")
    assert (fp8.blocks, plugin.blocks) == (2 * alone.blocks, alone.blocks // share)
    tokens = alone.blocks * ARGS.block_size
    assert tokens // chats.chat_tokens(ARGS) == ARGS.fit


def test_a_real_fp8_cache_replaces_its_stand_in():
    _, fp8, _ = chats.systems(ARGS, PRESSURE, sixteen_bits=True, fp8_cache=True)
    assert fp8.flags == ("--kv-cache-dtype", "fp8")


def test_the_warm_part_holds_all_chats_on_both_servers():
    alone, plugin = chats.systems(ARGS, WARM, sixteen_bits=False, fp8_cache=False)
    assert alone.blocks == plugin.blocks
    assert alone.blocks * ARGS.block_size >= ARGS.warm_chats * chats.max_tokens(ARGS)


def test_each_chat_has_a_text_of_its_own_and_the_lengths_vary():
    prompts = chats.first_prompts(ARGS, ARGS.chats, count_words)
    assert len(set(prompts)) == ARGS.chats
    assert len({prompt[:200] for prompt in prompts}) == ARGS.chats
    lengths = [count_words(prompt) for prompt in prompts]
    shortest, longest = ARGS.prompt
    assert shortest * 0.9 < min(lengths) < shortest + 100
    assert longest * 0.9 < max(lengths) <= longest


class FakeServer:
    """A server that has every earlier prompt in its cache and counts one token per message."""

    def __init__(self):
        self.sent = []

    def __call__(self, _server, chat):
        self.sent.append([message["content"] for message in chat.messages])
        text, turn = f"reply {len(self.sent)}", len(chat.messages)
        return Reply(text, (1,), turn, turn - 1, first_token_s=0.5, end_s=1.0, compressed=None)


@pytest.mark.parametrize("run", [chats.run_under_pressure, chats.run_warm])
def test_a_turn_sends_the_whole_chat_with_the_servers_own_replies(run, monkeypatch):
    fake = FakeServer()
    monkeypatch.setattr(chats, "send", fake)
    system = chats.System(name=ALONE, flags=(), blocks=9)
    running = chats.RunningSystem(
        system=system, server=None, chats=chats.new_chats(ARGS, ["first", "second"])
    )
    found = [line for turn in (1, 2, 3) for line in run([running], turn, 1)]
    assert [(line["chat"], line["turn"]) for line in found] == [
        (chat, turn) for turn in (1, 2, 3) for chat in (0, 1)
    ]
    questions = [FOLLOW_UPS[number] for number in (2, 3)]
    assert fake.sent[4] == ["first", "reply 1", questions[0], "reply 3", questions[1]]
    assert len(running.wall_s) == (3 if run is chats.run_under_pressure else 0)


def streamed(pieces, usage):
    """Return the events of a stream, one with the role alone at its start."""
    deltas = [("", None), *((piece, [number]) for number, piece in enumerate(pieces))]
    for content, ids in deltas:
        choice = SimpleNamespace(delta=SimpleNamespace(content=content), token_ids=ids)
        yield SimpleNamespace(choices=[choice], usage=None, id="chatcmpl-1")
    yield SimpleNamespace(choices=[], usage=usage, id="chatcmpl-1")


@pytest.mark.parametrize("cached", [0, None, 512])
def test_the_first_token_is_timed_and_cached_tokens_are_read(cached, monkeypatch):
    details = None if cached is None else SimpleNamespace(cached_tokens=cached)
    usage = SimpleNamespace(prompt_tokens=900, completion_tokens=2, prompt_tokens_details=details)
    create = SimpleNamespace(create=lambda **_: streamed(["a", "b"], usage))
    client = SimpleNamespace(chat=SimpleNamespace(completions=create))
    monkeypatch.setattr(chats, "OpenAI", lambda **_: client)
    clock = count()
    monkeypatch.setattr(ask.time, "perf_counter", lambda: float(next(clock)))
    server = SimpleNamespace(url="", compressed=list)
    reply = chats.send(server, chats.Chat(number=0, messages=[], max_tokens=2))
    assert (reply.text, reply.token_ids, reply.first_token_s) == ("ab", (0, 1), 1.0)
    assert reply.cached_tokens == (cached or 0)


def requests(part, system, cached, first_token_s):
    """Return the lines of two chats with two turns of 1,000 tokens."""
    return [
        {
            **{"part": part, "system": system, "chat": chat, "turn": turn},
            **{"prompt_tokens": 1000, "cached_tokens": cached[chat] * (turn > 1)},
            **{"output_tokens": 9, "first_token_s": first_token_s, "end_s": 9.0},
        }
        for turn in (1, 2)
        for chat in (0, 1)
    ]


def test_the_report_counts_warm_chats_and_pairs_first_token_times(tmp_path):
    total = {"part": PRESSURE, "system": ALONE, "blocks": 77, "wall_s": [3.0, 4.0]}
    total |= {"prefix_cache_hits": 1400, "prefix_cache_queries": 4000, "preemptions": 2}
    rows = [
        {"command": "..."},
        *requests(PRESSURE, ALONE, (499, 900), 2.0),
        total,
        *requests(PRESSURE, "plugin", (0, 0), 1.0),
        *requests(WARM, ALONE, (992, 992), 0.5),
        *requests(WARM, "plugin", (512, 512), 0.6),
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report([path])
    assert f"|  | {ALONE} | plugin |" in text
    assert "| hit rate of later turns | 70% (50% to 90%) | 0% (0% to 0%) |" in text
    assert "| warm chats, by turn | 1 of 2 | 0 of 2 |" in text
    assert "| prefix-cache hits, of queried tokens | 1,400 of 4,000 |  |" in text
    assert "| all turns | 7 s |  |" in text
    assert "| plugin | 2 of 2 | 488 | 0.60 s | 1.20 times (quartiles 1.20 and 1.20) |" in text


def test_a_chat_is_warm_from_half_of_its_prompt_on():
    assert is_warm({"prompt_tokens": 1000, "cached_tokens": 500})
    assert not is_warm({"prompt_tokens": 1001, "cached_tokens": 500})
