"""The quality benchmark's own arithmetic: prompts, divergence, table."""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import needles
import quality
import quality_report


class Words:
    """A tokenizer whose tokens are runs of non-space characters with the space before them."""

    def __call__(self, text: str, **_: object) -> dict[str, list]:
        import re

        spans = [m.span() for m in re.finditer(r"\s*\S+", text)]
        return {"input_ids": [text[a:b] for a, b in spans], "offset_mapping": spans}

    def encode(self, text: str, **_: object) -> list[str]:
        return self(text)["input_ids"]

    def apply_chat_template(self, turn: list[dict[str, str]], **_: object) -> str:
        return f"<user> {turn[0]['content']} <assistant> "


def test_slots_cover_every_depth_and_the_whole_range_of_lengths():
    slots = needles.slots(20)
    for depth in needles.DEPTHS:
        mine = [slot.tokens for slot in slots if slot.depth == depth]
        assert len(mine) == 4
        assert mine[0] < 1700
        assert mine[-1] > 2350
    assert 1500 <= min(s.tokens for s in slots) < 1550
    assert 2850 < max(s.tokens for s in slots) <= 3000


@pytest.mark.parametrize("name", needles.PHRASINGS)
@pytest.mark.parametrize("slot", needles.slots(5), ids=lambda slot: str(slot.depth))
def test_a_needle_lies_at_its_depth_in_a_prompt_of_its_length(name, slot):
    made = needles.needle(Words(), slot, needles.PHRASINGS[name], seed=3)
    assert abs(len(made.ids) - slot.tokens) <= 4
    text = "".join(made.ids)
    assert text.count(made.secret) == 1
    assert text.index(made.secret) / len(text) == pytest.approx(slot.depth, abs=0.08)


def test_a_prompt_follows_from_seed_slot_and_attempt():
    slot, phrasing = needles.slots(5)[1], needles.PHRASINGS["chat"]
    made = [needles.needle(Words(), s, phrasing, seed=0) for s in (slot, slot, slot.next())]
    assert made[0] == made[1]
    assert made[0].ids != made[2].ids
    assert needles.needle(Words(), slot, phrasing, seed=1).ids != made[0].ids


def test_an_answer_must_contain_the_secret():
    made = needles.Needle(slot=needles.slots(1)[0], secret="4561", ids=())
    assert made.answered_by("The secret code of Venice is 4561.")
    assert not made.answered_by("The secret code of Venice is 456.")


def test_a_passage_has_the_length_that_was_asked_for():
    text, ends = needles.passage(Words(), 900, random.Random(0))
    assert len(ends) == 900
    assert len(Words().encode(text)) == 900
    assert len(needles.plain_prompt(Words(), 900, "a")) == 900


def test_divergence_is_torchs_and_zero_for_shifted_logits():
    full, other = torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(0))
    want = torch.nn.functional.kl_div(
        other.double().log_softmax(-1),
        full.double().log_softmax(-1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    torch.testing.assert_close(quality.divergence(full, other), want)
    assert quality.divergence(full, full + 3).abs().max() < 1e-6


def test_the_recorder_keeps_the_logits_and_forces_the_token():
    tape: quality.Tape = {}
    recorder = quality.recorder(tape)(SimpleNamespace(), torch.device("cpu"), False)
    process = recorder.new_req_logits_processor(
        SimpleNamespace(extra_args={"record": "a", "force": [2, 0]})
    )
    logits = torch.tensor([5.0, 1.0, 0.0])
    assert process([], logits).argmax() == 2
    assert process([2], logits + 1).argmax() == 0
    assert tape["a", 0].tolist() == [5.0, 1.0, 0.0]
    assert tape["a", 1].tolist() == [6.0, 2.0, 1.0]
    assert recorder.new_req_logits_processor(SimpleNamespace(extra_args=None)) is None


def test_the_table_has_a_row_for_each_method_and_blanks_for_what_is_missing():
    full = quality_report.FULL

    def pair(method, budget, answered, *texts):
        kl = {"kl": sum(texts) / len(texts), "kl_of_each_text": list(texts)}
        return {
            "method": method,
            "budget": budget,
            "needles_answered": answered,
            "needles": 4,
            **kl,
        }

    pairs = [pair(full, 1.0, 4, 0), pair("a", 0.5, 1, 0.1, 0.2, 0.9), pair("b", 0.1, 1, 1.5)]
    results = {"pairs": pairs}
    assert quality_report.grid(results) == (
        ["method", "needles, 0.5", "needles, 0.1", "KL, 0.5", "KL, 0.1"],
        [
            [full, "100%", "100%", "0.000 (0.000)", "0.000 (0.000)"],
            ["a", "25%", "", "0.400 (0.200)", ""],
            ["b", "", "25%", "", "1.500 (1.500)"],
        ],
    )


def test_resuming_refuses_the_results_of_other_prompts(tmp_path):
    args = quality.parse_args(["--out", str(tmp_path / "q.json"), "--resume", "--seed", "1"])
    (tmp_path / "q.json").write_text(
        '{"run": {"seed": 2}, "pairs": [], "commands": [], "needles": {}, "texts": {}}'
    )
    with pytest.raises(SystemExit, match="choose another --out"):
        quality.begin(args)


def test_combinations_get_the_name_they_are_given():
    text = 'wide={"allocator": "dynamickv", "scorer": "snapkv", "window": 32}'
    args = quality.parse_args(["--presets", "--settings", text, '8={"compress": "snapkv"}'])
    assert args.presets == []
    assert [name for name, _ in args.settings] == ["wide", "8"]
    assert args.settings[0][1]["compress"] == "custom"
    assert args.settings[1][1] == {"compress": "snapkv"}
