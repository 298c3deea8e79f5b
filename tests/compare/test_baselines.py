"""The baselines ``streamingllm`` and ``random``, which a method should beat."""

import pytest

from fake_vllm import read_report

BASELINES = ["streamingllm", "random"]


@pytest.fixture
def run_snapkv(run_compare, fake):
    """Return a function that compares snapkv at 0.2 on a server that accepts the baselines."""
    fake.allowed_methods += BASELINES
    return lambda line="": run_compare(f"--methods snapkv --budgets 0.2 --max-drop 0.3 {line}")


def rows(report):
    return [(c["method"], c["budget"], c["baseline"], c["asked"]) for c in report["cells"]]


def baseline_rows(*budgets, prompts=10):
    return [(method, budget, True, prompts) for method in BASELINES for budget in budgets]


def test_baselines_run_at_each_budget_and_come_last(run_snapkv, fake, tmp_path):
    result = run_snapkv("--budgets 0.5,0.2")
    assert rows(read_report(tmp_path)) == [
        ("snapkv", 0.5, False, 10),
        ("snapkv", 0.2, False, 10),
        *baseline_rows(0.5, 0.2),
    ]
    methods = [b["vllm_xargs"]["kv_compress"] for b in fake.prompt_requests]
    counts = {m: methods.count(m) for m in methods}
    assert counts == {"off": 10, "snapkv": 20, **dict.fromkeys(BASELINES, 20)}
    lines = [line.split() for line in result.out.splitlines() if "10 of 10" in line]
    assert [line[0] for line in lines] == ["snapkv"] * 2 + [m for m in BASELINES for _ in "12"]
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert "| *random* | 0.2 | 10 of 10 |" in markdown
    assert "| snapkv | 0.2 | 10 of 10 |" in markdown
    assert "Methods in italics are baselines." in markdown


def test_baselines_are_never_recommended(run_snapkv, tmp_path):
    """On the fake server, baselines keep every output, and snapkv at 0.2 only every second."""
    result = run_snapkv()
    assert result.status == 1
    assert "No recommendation: no method at any budget keeps the loss" in result.out
    assert "The nearest is snapkv 0.2" in " ".join(result.out.split())


def test_a_note_names_a_baseline_that_loses_no_more_than_the_recommendation(run_snapkv, tmp_path):
    result = run_snapkv("--budgets 0.5")
    assert result.status == 0
    assert read_report(tmp_path)["recommendation"]["cell"]["method"] == "snapkv"
    notes = [n for n in read_report(tmp_path)["notes"] if "loses no more than snapkv 0.5" in n]
    assert notes == [
        "streamingllm 0.5 loses no more than snapkv 0.5: on these prompts it matters little which"
        " tokens are kept. On other prompts it may."
    ]


def test_a_baseline_named_in_methods_is_an_ordinary_method(run_snapkv, tmp_path):
    result = run_snapkv("--methods random,snapkv")
    assert result.status == 0
    assert read_report(tmp_path)["recommendation"]["cell"]["method"] == "random"
    assert [row[:3] for row in rows(read_report(tmp_path))] == [
        ("random", 0.2, False),
        ("snapkv", 0.2, False),
        ("streamingllm", 0.2, True),
    ]


def test_a_baseline_that_the_server_refuses_is_left_out_with_a_note(run_snapkv, fake, tmp_path):
    fake.allowed_methods.remove("random")
    run_snapkv()
    assert [row[0] for row in rows(read_report(tmp_path))] == ["snapkv", "streamingllm"]
    (note,) = [note for note in read_report(tmp_path)["notes"] if "random" in note]
    assert note.startswith("Some baselines are missing because the server refuses")
    assert "random (kv_compress must be one of" in note
    result = run_snapkv("--methods snapkv,random --out other")
    assert result.status == 2
    assert "the server refuses random 0.2: kv_compress must be one of" in result.err


def test_a_resumed_run_may_add_and_drop_baselines(run_snapkv, fake, tmp_path):
    run_snapkv("--no-baselines")
    without = read_report(tmp_path)
    assert rows(without) == [("snapkv", 0.2, False, 10)]
    assert {b["vllm_xargs"]["kv_compress"] for b in fake.requests} <= {"off", "snapkv"}
    result = run_snapkv()
    assert "Resuming: 10 of 30 results were saved earlier." in result.err
    assert rows(read_report(tmp_path)) == [("snapkv", 0.2, False, 10), *baseline_rows(0.2)]
    num_requests = len(fake.prompt_requests)
    result = run_snapkv("--no-baselines")
    assert "Resuming: 10 of 10 results were saved earlier." in result.err
    assert read_report(tmp_path)["cells"] == without["cells"]
    fake.allowed_methods.remove("random")
    result = run_snapkv()
    assert "Resuming: 20 of 20 results were saved earlier." in result.err
    assert len(fake.prompt_requests) == num_requests
