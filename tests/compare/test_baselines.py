"""What stands beside the methods: ``streamingllm`` and ``random``, which they have to beat."""

import json

import pytest

from fake_vllm import write_prompts

BESIDE = ["streamingllm", "random"]


@pytest.fixture
def asked(compare, fake, tmp_path):
    """Compare ten prompts at a server that takes any method; further flags may follow."""
    fake.allowed += BESIDE

    def asking(*more):
        write_prompts(tmp_path / "mine.jsonl", range(10))
        return compare(
            "--url",
            fake.url,
            "--prompts",
            "mine.jsonl",
            "--methods",
            "snapkv",
            "--max-drop",
            "0.3",
            *more,
        )

    return asking


def report(tmp_path):
    return json.loads((tmp_path / "out" / "report.json").read_text())


def rows(found):
    return [(c["method"], c["budget"], c["baseline"], c["asked"]) for c in found["cells"]]


def beside(*budgets, asked=10):
    return [(method, budget, True, asked) for method in BESIDE for budget in budgets]


def test_they_are_asked_at_each_budget_and_stand_last(asked, fake, tmp_path):
    done = asked("--budgets", "0.5,0.2")
    assert rows(report(tmp_path)) == [
        ("snapkv", 0.5, False, 10),
        ("snapkv", 0.2, False, 10),
        *beside(0.5, 0.2),
    ]
    methods = [b["vllm_xargs"]["kv_compress"] for b in fake.prompts]
    assert {m: methods.count(m) for m in methods} == {
        **{"off": 10, "snapkv": 20},
        **dict.fromkeys(BESIDE, 20),
    }
    lines = [line.split() for line in done.out.splitlines() if "10 of 10" in line]
    assert [line[0] for line in lines] == ["snapkv"] * 2 + [m for m in BESIDE for _ in "12"]
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "| *random* | 0.2 | 10 of 10 |" in markdown
    assert "| snapkv | 0.2 | 10 of 10 |" in markdown
    assert "Methods in italics stand beside the others" in markdown


def test_they_are_never_recommended(asked, tmp_path):
    """Here they answer everything, and the method every second prompt."""
    done = asked("--budgets", "0.2")
    assert done.status == 1
    assert "No recommendation: no method at any budget keeps the loss" in done.out
    assert "The nearest is snapkv 0.2" in " ".join(done.out.split())


def test_a_method_that_does_not_beat_them_is_said_to(asked, tmp_path):
    done = asked("--budgets", "0.5")
    assert done.status == 0
    assert report(tmp_path)["recommendation"]["cell"]["method"] == "snapkv"
    said = [n for n in report(tmp_path)["notes"] if "loses no more than snapkv 0.5" in n]
    assert said == [
        "streamingllm 0.5 loses no more than snapkv 0.5: on these prompts the choice of tokens"
        " decides little, and on others it may."
    ]


def test_whoever_is_named_is_a_method_as_any_other(asked, tmp_path):
    done = asked("--methods", "random,snapkv", "--budgets", "0.2")
    assert done.status == 0
    assert report(tmp_path)["recommendation"]["cell"] == {
        "method": "random",
        "budget": 0.2,
        "protect": "",
        "lookahead": None,
    }
    assert [row[:3] for row in rows(report(tmp_path))] == [
        ("random", 0.2, False),
        ("snapkv", 0.2, False),
        ("streamingllm", 0.2, True),
    ]


def test_a_server_that_does_not_allow_them(asked, fake, tmp_path):
    fake.allowed.remove("random")
    asked("--budgets", "0.2")
    assert [row[0] for row in rows(report(tmp_path))] == ["snapkv", "streamingllm"]
    (said,) = [note for note in report(tmp_path)["notes"] if "random" in note]
    assert said.startswith("What a method has to beat is not all there, since the server refuses")
    assert "random (kv_compress must be one of" in said
    done = asked("--methods", "snapkv,random", "--budgets", "0.2", "--out", "other")
    assert done.status == 2
    assert "the server refuses random 0.2: kv_compress must be one of" in done.err


def test_they_come_and_go_while_a_run_goes_on(asked, fake, tmp_path):
    asked("--budgets", "0.2", "--no-baselines")
    without = report(tmp_path)
    assert rows(without) == [("snapkv", 0.2, False, 10)]
    assert {b["vllm_xargs"]["kv_compress"] for b in fake.asked} <= {"off", "snapkv"}
    done = asked("--budgets", "0.2")
    assert "10 of 30 are there already." in done.err
    assert rows(report(tmp_path)) == [("snapkv", 0.2, False, 10), *beside(0.2)]
    asked_before = len(fake.prompts)
    done = asked("--budgets", "0.2", "--no-baselines")
    assert "10 of 10 are there already." in done.err
    assert report(tmp_path)["cells"] == without["cells"]
    fake.allowed.remove("random")
    done = asked("--budgets", "0.2")
    assert "20 of 20 are there already." in done.err
    assert len(fake.prompts) == asked_before
