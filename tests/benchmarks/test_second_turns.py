"""Second turns: caches that grow and are packed, and systems that are fed one reply."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.evidence import second_turns
from benchmarks.evidence.cache_formats import CACHE_FORMATS
from benchmarks.evidence.reference_model import ReferenceModel
from benchmarks.evidence.second_turns import (
    CELL,
    EXACT_TOKENS,
    FP8,
    GRID,
    LATE_COLD,
    LATE_WARM,
    PAGE,
    GrowingCache,
)
from benchmarks.evidence.second_turns_table import report
from checkpoints import NumberTokenizer, make, tokens
from vllm_kvcompress.offline import quantised


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ReferenceModel(make("llama-gqa", tmp_path_factory.mktemp("models")))


def test_a_growing_cache_without_packing_equals_a_prefill(model):
    ids = tokens(700, seed=3)
    cache = GrowingCache.empty(model, 720)
    cache.add(ids[:90])
    logits = model.logits(cache.add(ids[90:])[-1])
    full = model.prefill(ids, with_column_sums=False)
    assert torch.allclose(logits, full.logits, atol=1e-3)
    assert torch.allclose(cache.batch.keys[1][0, :, :700], full.keys[1], atol=1e-3)


def test_fp8_equals_a_prefill_that_reads_fp8(model):
    ids = tokens(300, seed=4)
    cache_format = CACHE_FORMATS["fp8"]
    cache = GrowingCache.empty(model, 300, cache_format=cache_format)
    logits = model.logits(cache.add(ids)[-1])
    full = model.prefill(ids, with_column_sums=False, cache_format=cache_format)
    assert torch.allclose(logits, full.logits, atol=1e-3)


def test_the_grid_packs_full_cells_behind_the_exact_tokens_whatever_the_chunks(model):
    ids = tokens(EXACT_TOKENS + 2 * CELL + 30, seed=5)
    caches = []
    for lengths in ((len(ids),), (500, 13, 200, len(ids))):
        cache, start = GrowingCache.empty(model, len(ids), cell=CELL), 0
        for length in lengths:
            hidden = cache.add(ids[start : start + length])
            start += length
        caches.append((cache, hidden[-1]))
    (one, hidden), (other, other_hidden) = caches
    assert one.packed_end == other.packed_end == EXACT_TOKENS + 2 * CELL
    assert torch.allclose(hidden, other_hidden, atol=1e-3)
    exact = model.prefill(ids[: EXACT_TOKENS + CELL], with_column_sums=False)
    cell = slice(EXACT_TOKENS, EXACT_TOKENS + CELL)
    stored, _ = quantised(exact.keys[0][:, cell], exact.values[0][:, cell])
    assert torch.allclose(one.batch.keys[0][0, :, cell], stored, atol=1e-3)
    assert torch.equal(one.batch.keys[0][0, :, :8], exact.keys[0][:, :8])


def test_late_packing_leaves_the_last_partial_page_exact(model):
    ids = tokens(400, seed=6)
    cache = GrowingCache.empty(model, 400)
    cache.add(ids)
    before = cache.batch.values[0].clone()
    cache.pack()
    assert cache.packed_end == EXACT_TOKENS + (400 - EXACT_TOKENS - 32) // PAGE * PAGE
    changed = (cache.batch.values[0] != before)[0].any(-1).any(0)
    assert not changed[:EXACT_TOKENS].any()
    assert changed[EXACT_TOKENS : cache.packed_end].all()
    assert not changed[cache.packed_end :].any()


def test_every_system_reads_one_reply_and_only_late_and_cold_keeps_its_first_token(
    model, monkeypatch
):
    """A chat's messages are token ids as text. The template adds nothing."""
    monkeypatch.setattr(ReferenceModel, "tokenizer", NumberTokenizer())

    def encode(_model, messages, _tools=()):
        return [int(word) for message in messages for word in message["content"].split()]

    monkeypatch.setattr(ReferenceModel, "encode", encode)
    first = {"role": "user", "content": " ".join(map(str, tokens(700, seed=7)))}
    second = " ".join(map(str, tokens(40, seed=8)))
    texts = {"first": (first,), "second": second, "begin": "", "answers": ()}
    chat = second_turns.Chat(kind="about the text", name="about/0", max_tokens=12, **texts)
    replies = second_turns.full_cache_replies(model, chat)
    assert replies.second_prompt[:700] == replies.first_prompt
    assert len(replies.second_prompt) == 700 + len(replies.first_reply) + 40
    loss = {}
    for system in (GRID, LATE_COLD, LATE_WARM, FP8):
        found = second_turns.compared(model, chat, replies, system)
        loss[system] = found["kl"]
        assert len(found["kl"]) == len(found["agreed"]) == len(replies.second_reply)
    assert loss.pop(LATE_COLD)[0] == 0
    assert all(of_system[0] > 0 for of_system in loss.values())


def test_chats_of_all_kinds_take_turns_and_ask_about_their_own_texts(monkeypatch):
    counting = SimpleNamespace(count_tokens=lambda text: len(text.split()))
    kinds = [second_turns.ABOUT_TEXT, second_turns.ABOUT_REPLY, second_turns.NUMBERS]
    words = ["--out", "unused", "--count", "6", "--kinds", *kinds]
    args = second_turns.arguments(words)
    chats = second_turns.two_turn_chats(counting, args)
    assert [chat.kind for chat in chats[:3]] == list(args.kinds)
    assert len({chat.name for chat in chats}) == len(chats) == 18
    assert len({chat.first[0]["content"] for chat in chats}) == 18
    for chat in chats:
        if chat.kind == second_turns.NUMBERS:
            (answer,) = chat.answers
            assert answer in chat.first[0]["content"]
            assert answer not in chat.second
            assert chat.second not in chat.first[0]["content"]


def test_the_report_pairs_systems_with_fp8(tmp_path):
    common = {"model": "m", "kind": "about the text"}
    rows = []
    for chat, kl in (("a", 0.1), ("b", 0.3)):
        for system, factor in (("fp8", 1), (GRID, 2)):
            line = {**common, "chat": chat, "system": system, "kl": [0.0, kl * factor]}
            rows.append({**line, "agreed": "10", "found": factor == 1})
    path = tmp_path / "second_turns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report([path])
    assert "**m, all chats**" in text
    assert "**m, about the text**" in text
    difference = "+0.1000 (+0.0500 to +0.1500)"
    assert f"| `{GRID}` | 2, 4 | 0.2000 (0.1000 to 0.3000) | {difference} |" in text
    assert "| 50.0% (50.0% to 50.0%) | 0 of 2 |" in text
    assert "| `fp8` | 2, 4 | 0.1000 (0.0500 to 0.1500) |  |" in text
