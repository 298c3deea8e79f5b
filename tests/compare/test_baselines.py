"""The baselines ``streamingllm`` and ``random``, which a method should beat."""

import json

import pytest

from fake_vllm import write_prompts

BASELINES = ["streamingllm", "random"]


@pytest.fixture
def run_compare(compare, fake, tmp_path):
    """Return a function that compares ten prompts on a server that accepts the baselines."""
    fake.allowed_methods += BASELINES

    def run(*flags):
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
            *flags,
        )

    return run


def read_report(tmp_path):
    return json.loads((tmp_path / "out" / "report.json").read_text())


def rows(report):
    return [(c["method"], c["budget"], c["baseline"], c["asked"]) for c in report["cells"]]


def baseline_rows(*budgets, prompts=10):
    return [(method, budget, True, prompts) for method in BASELINES for budget in budgets]


def test_baselines_run_at_each_budget_and_come_last(run_compare, fake, tmp_path):
    result = run_compare("--budgets", "0.5,0.2")
    assert rows(read_report(tmp_path)) == [
        ("snapkv", 0.5, False, 10),
        ("snapkv", 0.2, False, 10),
        *baseline_rows(0.5, 0.2),
    ]
    methods = [b["vllm_xargs"]["kv_compress"] for b in fake.prompt_requests]
    assert {m: methods.count(m) for m in methods} == {
        **{"off": 10, "snapkv": 20},
        **dict.fromkeys(BASELINES, 20),
    }
    lines = [line.split() for line in result.out.splitlines() if "10 of 10" in line]
    assert [line[0] for line in lines] == ["snapkv"] * 2 + [m for m in BASELINES for _ in "12"]
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "| *random* | 0.2 | 10 of 10 |" in markdown
    assert "| snapkv | 0.2 | 10 of 10 |" in markdown
    assert "Methods in italics are baselines." in markdown


def test_baselines_are_never_recommended(run_compare, tmp_path):
    """On the fake server, baselines keep every output, and snapkv at 0.2 only every second."""
    result = run_compare("--budgets", "0.2")
    assert result.status == 1
    assert "No recommendation: no method at any budget keeps the loss" in result.out
    assert "The nearest is snapkv 0.2" in " ".join(result.out.split())


def test_a_note_names_a_baseline_that_loses_no_more_than_the_recommendation(run_compare, tmp_path):
    result = run_compare("--budgets", "0.5")
    assert result.status == 0
    assert read_report(tmp_path)["recommendation"]["cell"]["method"] == "snapkv"
    notes = [n for n in read_report(tmp_path)["notes"] if "loses no more than snapkv 0.5" in n]
    assert notes == [
        "streamingllm 0.5 loses no more than snapkv 0.5: on these prompts it matters little which"
        " tokens are kept. On other prompts it may."
    ]


def test_a_baseline_named_in_methods_is_an_ordinary_method(run_compare, tmp_path):
    result = run_compare("--methods", "random,snapkv", "--budgets", "0.2")
    assert result.status == 0
    assert read_report(tmp_path)["recommendation"]["cell"] == {
        "method": "random",
        "budget": 0.2,
        "protect": "",
        "lookahead": None,
        "packed_dtype": "",
        "server": "",
    }
    assert [row[:3] for row in rows(read_report(tmp_path))] == [
        ("random", 0.2, False),
        ("snapkv", 0.2, False),
        ("streamingllm", 0.2, True),
    ]


def test_a_baseline_that_the_server_refuses_is_left_out_with_a_note(run_compare, fake, tmp_path):
    fake.allowed_methods.remove("random")
    run_compare("--budgets", "0.2")
    assert [row[0] for row in rows(read_report(tmp_path))] == ["snapkv", "streamingllm"]
    (note,) = [note for note in read_report(tmp_path)["notes"] if "random" in note]
    assert note.startswith("Some baselines are missing because the server refuses")
    assert "random (kv_compress must be one of" in note
    result = run_compare("--methods", "snapkv,random", "--budgets", "0.2", "--out", "other")
    assert result.status == 2
    assert "the server refuses random 0.2: kv_compress must be one of" in result.err


def test_a_resumed_run_may_add_and_drop_baselines(run_compare, fake, tmp_path):
    run_compare("--budgets", "0.2", "--no-baselines")
    without = read_report(tmp_path)
    assert rows(without) == [("snapkv", 0.2, False, 10)]
    assert {b["vllm_xargs"]["kv_compress"] for b in fake.requests} <= {"off", "snapkv"}
    result = run_compare("--budgets", "0.2")
    assert "Resuming: 10 of 30 results were saved earlier." in result.err
    assert rows(read_report(tmp_path)) == [("snapkv", 0.2, False, 10), *baseline_rows(0.2)]
    num_requests = len(fake.prompt_requests)
    result = run_compare("--budgets", "0.2", "--no-baselines")
    assert "Resuming: 10 of 10 results were saved earlier." in result.err
    assert read_report(tmp_path)["cells"] == without["cells"]
    fake.allowed_methods.remove("random")
    result = run_compare("--budgets", "0.2")
    assert "Resuming: 20 of 20 results were saved earlier." in result.err
    assert len(fake.prompt_requests) == num_requests
