"""The H200 benchmark's own arithmetic, and its dry run: it has to work the first time."""

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import again

BENCHMARKS = again.ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import h200
import h200_engine
import h200_kernels
import h200_ops
import h200_problem
import h200_report
import h200_tools
import h200_watch

EIGHT_B = h200_problem.Shape(requests=2, tokens=8192)


def test_floors_by_hand():
    """32 layers x 2 requests; 8 KV heads of 128 bf16; 819 tokens are kept: 51 pages."""
    rows = 64
    assert h200_problem.once(EIGHT_B) == rows * 8192 * 8 * 128 * 2 == 1 << 30
    assert h200_problem.moved(EIGHT_B) == 2 * rows * 51 * 65536
    assert h200_problem.ranked(EIGHT_B) == rows * 8 * 8192 * 4
    assert h200_problem.tabled(EIGHT_B) == rows * 51 * (4 + 4)
    seen = sum(range(8192 - 2048 + 1, 8192 + 1))  # keys that the last 2048 rows see
    assert h200_problem.attended(EIGHT_B) == rows * 32 * 128 * 2 * seen
    assert h200_problem.compared(EIGHT_B) == rows * 8 * 128 * 2 * 816 * (8192 - 816)


def test_every_op_has_a_floor_and_the_promised_goals():
    for op in h200_ops.OPS:
        assert (op.floor_bytes(EIGHT_B) > 0) != (op.floor_flops(EIGHT_B) > 0), op.name
    goals = {op.name.split()[0]: op.goal for op in h200_ops.OPS if op.goal}
    assert goals == {"window_scores": 0.8, "value_scores": 0.8, "compact": 0.8}


@pytest.mark.parametrize("token_major", [True, False])
def test_what_no_kernel_may_read_is_nan(token_major):
    shape = h200_problem.Shape(
        layers=1,
        requests=2,
        tokens=90,
        heads=2,
        kv_heads=1,
        dim=8,
        window=4,
        ragged=True,
        token_major=token_major,
    )
    p = h200_problem.Problem(shape, torch.device("cpu"), 0, poison=True)
    assert p.tokens == [90, 53]
    for row, tokens in enumerate(p.tokens):
        assert p.keys_of(row).shape == p.values_of(row).shape == (1, tokens, 8)
        assert not p.keys_of(row).isnan().any()
        assert not p.values_of(row).isnan().any()
    assert int((~p.pool.isnan()).sum()) == 2 * 8 * sum(p.tokens)
    assert not set(p.destination.flatten().tolist()) & set(p.pages.flatten().tolist())


@pytest.mark.parametrize(
    ("figure", "goal", "result"),
    [
        (0.8, (">=", 0.8), "pass"),
        (0.79, (">=", 0.8), "FAIL"),
        (1.02, ("<=", 1.02), "pass"),
        (float("nan"), ("<=", 1.02), "FAIL"),
        (float("nan"), (">=", 0.8), "FAIL"),
        (None, (">=", 0.8), "FAIL"),
        (0, ("==", 0), "pass"),
    ],
)
def test_verdicts(figure, goal, result):
    assert h200_report.verdict(figure, goal) == result


def test_an_error_is_a_share_of_the_tolerance():
    want = torch.tensor([1.0, 100.0, torch.nan], dtype=torch.float64)
    got = torch.tensor([1.0, 100.005, 7.0, 9.0])
    assert h200_kernels.error(got, want) == pytest.approx(0.5, rel=1e-2)
    assert h200_kernels.error(torch.full((3,), torch.nan), want) == float("inf")
    assert h200_kernels.error(torch.zeros(2), want) == float("inf")


def report(folder: Path, *, dry: bool = False) -> h200_report.Report:
    return h200_report.Report("speed", folder, dry, 0, "abc")


def conclusion(folder: Path) -> int:
    return h200.conclude(folder, ["speed"], [])


def test_a_missed_goal_fails_the_command(tmp_path, capsys):
    made = report(tmp_path)
    made.check("good", 0.9, (">=", 0.8), measured=True)
    made.finish()
    assert conclusion(tmp_path) == 0
    made.check("slow kernel", 0.3, (">=", 0.8), measured=True)
    made.row("figures", op="slow kernel", ms=1.23456789)
    assert conclusion(tmp_path) == 1
    assert "FAIL   speed: slow kernel = 0.3 (goal >= 0.8)" in capsys.readouterr().out
    written = (tmp_path / "summary.md").read_text()
    assert "| slow kernel | 0.3 | >= 0.8 | FAIL |" in written
    assert "| slow kernel | 1.2346 |" in written
    assert "Dry run" not in written


def test_a_dry_figure_is_not_judged_and_marked(tmp_path):
    made = report(tmp_path, dry=True)
    made.check("slow kernel", 0.3, (">=", 0.8), measured=True)
    made.finish()
    assert conclusion(tmp_path) == 0
    assert json.loads((tmp_path / "speed.json").read_text())["dry"] is True
    assert "no figure below is a measurement" in (tmp_path / "summary.md").read_text()
    made.check("wrong kernel", 2.0, ("<=", 1.0))
    assert conclusion(tmp_path) == 1


def test_a_stage_that_did_not_finish_fails_and_keeps_what_it_found(tmp_path):
    report(tmp_path).check("good", 0.9, (">=", 0.8))
    assert conclusion(tmp_path) == 1
    assert "| good | 0.9 |" in (tmp_path / "summary.md").read_text()


def test_a_missing_tool_is_no_pass(tmp_path, capsys):
    made = report(tmp_path)
    made.absent("memcheck", "compute-sanitizer is not installed")
    made.finish()
    assert conclusion(tmp_path) == 0
    assert "1 checks: 1 absent" in capsys.readouterr().out


def test_a_stage_is_stopped_with_all_that_it_started(tmp_path, monkeypatch):
    script = tmp_path / "stage.py"
    script.write_text(
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(99)\n"
    )
    monkeypatch.setattr(h200, "__file__", str(script))
    wait = subprocess.Popen.wait

    def waiting(process, timeout=None):
        """As if the time was up as soon as the stage has a child, however slow the machine is."""
        if timeout is None:
            return wait(process)
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
            time.sleep(0.05)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", waiting)
    args = h200.parse_args(["--out", str(tmp_path)])
    with (tmp_path / "log.txt").open("w") as log:
        assert h200.run_stage("speed", args, 5, log) == "stopped after 5 s"
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    for _ in range(3000):  # it is killed, and may take a moment to be gone
        if not child.exists() or child.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child runs on")


def test_vllms_own_table_of_graphs_is_understood():
    from vllm.compilation.cuda_graph import CUDAGraphLogging, CUDAGraphStat
    from vllm.config import CUDAGraphMode

    made = CUDAGraphLogging(CUDAGraphMode.FULL_AND_PIECEWISE, [1, 2, 8])
    for mode, times in ((CUDAGraphMode.FULL, 3), (CUDAGraphMode.NONE, 1)):
        for _ in range(times):
            made.observe(CUDAGraphStat(6, 8, 2, str(mode)))
    lines = made.generate_metric_table().splitlines()
    assert h200_watch.graph_modes(lines) == {"FULL": 3, "NONE": 1}


def test_a_sync_is_counted_where_it_was_asked_for():
    code = f"import warnings\nwarnings.warn({h200_watch.SYNC!r})\nwarnings.warn('another')"
    show = warnings.showwarning
    with h200_watch.counted_syncs(SimpleNamespace()) as seen:
        exec(compile(code, "/site/vllm_kvcompress/engine/x.py", "exec"), {})
        exec(compile(code, "/site/torch/_tensor.py", "exec"), {})
    assert warnings.showwarning is show
    ours, caller = seen
    assert ours == "vllm_kvcompress x.py:2 <module>"
    assert caller.startswith("elsewhere test_h200.py")


def test_ncus_metrics_and_rules_are_read():
    text = (
        "==PROF== Connected\n"
        '"ID","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type",'
        '"Rule Description"\n'
        '"0","Occupancy","Achieved Occupancy","%","55.1","","",""\n'
        '"0","Source Counters","Branches","","7","","",""\n'
        '"0","Occupancy","","","","Achieved","OPT","limited by registers"\n'
    )
    assert h200_tools.details(text) == [
        {
            "section": "Occupancy",
            "metric": "Achieved Occupancy",
            "value": "55.1",
            "unit": "%",
        },
        {
            "section": "Occupancy",
            "metric": "Achieved",
            "value": "limited by registers",
            "unit": "OPT",
        },
    ]


def test_what_sanitizers_say_is_counted():
    assert h200_tools.SUMMARY.search("========= ERROR SUMMARY: 3 errors")[1] == "3"
    hazards = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    assert h200_tools.SUMMARY.search(hazards)[1] == "0"


def test_texts_count_up_to_their_first_difference():
    assert h200_engine.equal_tokens([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 4 / 6
    assert h200_engine.equal_tokens([[1]], [[1]]) == 1.0


@pytest.mark.slow
def test_dry_run_of_the_kernels(tmp_path):
    """In Triton's interpreter; the stages with an engine take minutes: run them by hand."""
    run = ["--dry-run", "--out", str(tmp_path), "--seed", "3", "--commit", "abc"]
    assert h200.main([*run, "--stage", "correctness", "speed", "sanitizer", "ncu"]) == 0
    found = h200_report.stages(tmp_path, list(h200.LIMITS))
    assert [stage["stage"] for stage in found] == ["correctness", "speed", "sanitizer", "ncu"]
    for stage in found:
        assert stage["finished"]
        assert stage["dry"]
        assert stage["seed"] == 3
        assert stage["commit"] == "abc"
    correctness, speed, *tools = found
    assert len(correctness["checks"]) == 2 * len(h200_ops.OPS)
    assert {check["result"] for check in correctness["checks"]} == {"pass"}
    assert {check["result"] for check in speed["checks"]} == {"dry"}
    assert {check["result"] for stage in tools for check in stage["checks"]} == {"absent"}
    timed = [op.name for op in h200_ops.OPS if op.plain]
    rows = speed["tables"]["kernels, all layers and requests in one call"]
    assert [row["op"] for row in rows] == timed
    assert len(list(tmp_path.iterdir())) <= 8
