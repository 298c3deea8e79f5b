"""The GPU benchmark command: time limits, interruption and continuation, in dry runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pytest_process
from benchmarks import json_process
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import ops, stages
from benchmarks.gpu.engine_process import EngineProcess

DRY = ["correctness", "kernels", "--dry-run", "--seed", "3", "--commit", "abc"]


def read_json(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def wait_until(condition, seconds=300):
    """Wait for a condition; the limit is long because machines may be slow."""
    for _ in range(10 * seconds):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail(f"condition not met within {seconds} s")


def alive(pid):
    stat = Path("/proc") / str(pid) / "stat"
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.slow
def test_an_interrupted_run_continues_with_its_unfinished_stages(tmp_path, capfd):
    """Kernels run in Triton's interpreter; outputs are checked, times are not."""
    path = os.pathsep.join([str(pytest_process.ROOT), str(pytest_process.ROOT / "kernels")])
    run = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), *DRY],
        cwd=pytest_process.ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    kernels = tmp_path / "kernels.json"
    wait_until(lambda: kernels.exists() and len(read_json(tmp_path, "kernels")["checks"]) > 0)
    run.send_signal(signal.SIGTERM)
    assert run.wait() == 1
    output = capfd.readouterr().out
    assert "FAIL   kernels: did not finish" in output
    assert "the run was interrupted" in output
    first = read_json(tmp_path, "summary")
    assert [stage["finished"] for stage in first["stages"]] == [True, False]
    assert "**Did not finish.**" in (tmp_path / "summary.md").read_text()

    assert command.main(["--out", str(tmp_path), *DRY]) == 0
    assert "correctness: already complete" in capfd.readouterr().out
    correctness, kernels = read_json(tmp_path, "summary")["stages"]
    assert correctness == first["stages"][0]
    for stage in (correctness, kernels):
        assert stage["finished"]
        assert (stage["dry"], stage["seed"], stage["commit"]) == (True, 3, "abc")
    assert {check["result"] for check in correctness["checks"]} == {"pass", "absent"}
    results = [check["result"] for check in kernels["checks"]]
    assert results.count("pass") == len(ops.OPS)
    assert results.count("dry") == len([op for op in ops.OPS if op.goal])
    rows = kernels["tables"]["ops as the engine launches them"]
    assert [row["op"] for row in rows] == [op.name for op in ops.OPS]
    assert [row["launches"] for row in rows] == [2, 2, 2, 2, *[3] * 6, 1, 1, 1, 1, 3, 1]
    assert "no figure below is a measurement" in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
def test_turboquant_takes_turns_with_packed_attention(tmp_path):
    """The kernels of both run in Triton's interpreter; FlashAttention's need CUDA."""
    arguments = ["packed-attention", "--dry-run", "--seed", "3", "--commit", "abc"]
    assert command.main(["--out", str(tmp_path), *arguments]) == 0
    (stage,) = read_json(tmp_path, "summary")["stages"]
    results = {check["name"].split(": ")[-1]: check["result"] for check in stage["checks"]}
    assert results["turboquant_4bit_nc, largest error"] == "pass"
    assert results["fp8"] == "absent"
    (row,) = stage["tables"]["differences"]
    assert (row["variant"], row["than"]) == ("k4v3", "turboquant_4bit_nc")


# -- runs of stages that end at once -----------------------------------------------------------

STAGE = """
import json, sys
from pathlib import Path
names = dict(zip(sys.argv[1::2], sys.argv[2::2]))
data = {"stage": names["--inside"], "dry": False, "commit": names["--commit"], "seed": 0}
data |= {"date": "", "command": "", "machine": {}, "checks": [], "tables": {}, "finished": True}
with (Path(names["--out"]) / "ran").open("a") as ran:
    print(names["--inside"], names["--commit"], file=ran)
(Path(names["--out"]) / (names["--inside"] + ".json")).write_text(json.dumps(data))
"""


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """Return a function that runs the command with `STAGE` and returns the stages that ran."""

    def stage_command(options, stage):
        return [sys.executable, "-c", STAGE, *options.arguments(stage)]

    monkeypatch.setattr(stages, "command", stage_command)

    def run(*args):
        (tmp_path / "ran").write_text("")
        command.main(["--out", str(tmp_path), *args])
        return (tmp_path / "ran").read_text().split("\n")[:-1]

    return run


def test_a_complete_stage_runs_again_only_for_another_commit(ran, tmp_path):
    names = list(stages.LIMITS)
    assert ran("--commit", "a") == [f"{name} a" for name in names]
    assert ran("--commit", "a") == []
    assert ran("idle", "kernels", "--commit", "b") == ["kernels b", "idle b"]
    (tmp_path / "tokens.json").unlink()
    assert ran("tokens", "idle", "--commit", "b") == ["tokens b"]


def test_complete_stages_run_again_on_request(ran):
    ran("--commit", "a")
    assert ran("idle", "--commit", "a") == []
    assert ran("idle", "--commit", "a", "--again") == ["idle a"]


def test_an_unknown_stage_is_an_error(ran, capsys):
    with pytest.raises(SystemExit):
        ran("serving")
    assert "unknown stages ['serving']; known are packed-attention" in capsys.readouterr().err


def test_an_unfinished_stage_runs_again(ran, tmp_path):
    ran("--commit", "a")
    unfinished = read_json(tmp_path, "kernels") | {"finished": False}
    (tmp_path / "kernels.json").write_text(json.dumps(unfinished))
    assert ran("--commit", "a") == ["kernels a"]


def test_no_stage_starts_without_time_left(ran, capsys):
    assert ran("--commit", "a", "--seconds", "1") == []
    assert "FAIL   server: no time was left for it" in capsys.readouterr().out


def test_summary_summarises_a_folder_without_running_stages(ran, tmp_path):
    ran("--commit", "a")
    (tmp_path / "summary.md").unlink()
    assert ran("--commit", "b", "--summary") == []
    assert "## batches" in (tmp_path / "summary.md").read_text()


def test_a_stopped_stage_is_killed_with_its_child_processes(tmp_path, monkeypatch):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(99)\n"
    )
    monkeypatch.setattr(stages, "command", lambda *_: [sys.executable, "-c", code])
    wait = subprocess.Popen.wait

    def waiting(process, timeout=None):
        """Time out as soon as the stage has a child process, however slow the machine is."""
        if timeout is None:
            return wait(process)
        wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", waiting)
    options = stages.RunOptions(tmp_path, stages.Origin("abc", False), 0)
    with (tmp_path / "log.txt").open("w") as log:
        assert stages.run_stage(options, "kernels", 5, log) == "stopped after 5 s"
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not alive(child))


def test_an_engine_that_does_not_shut_down_is_killed(monkeypatch, tmp_path):
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
    popen = subprocess.Popen

    def start(arguments, **options):
        return popen([sys.executable, "-c", stubborn], **options)

    monkeypatch.setattr(json_process.subprocess, "Popen", start)
    monkeypatch.setattr(json_process, "SHUTDOWN_SECONDS", 0.1)
    engine = EngineProcess("model", None)
    engine.close()
    assert engine.process.returncode == -signal.SIGKILL
    engine.close()
    with pytest.raises(RuntimeError, match="ended with status -9; see the log"):
        engine.read()


def test_a_long_log_keeps_only_its_end(tmp_path):
    (tmp_path / "log.txt").write_text("older " + "newest")
    command.keep_end(tmp_path / "log.txt", 6)
    assert (tmp_path / "log.txt").read_text() == "newest"
