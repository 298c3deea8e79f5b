"""The GPU benchmark's run: stages with limits, interrupted and gone on with, in a dry run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import again
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import ops, stages
from benchmarks.gpu.engine_process import EngineProcess

DRY = ["--dry-run", "--seed", "3", "--commit", "abc", "--stages", "correctness", "kernels"]


def written(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def until(true, seconds=300):
    """Wait, however slow the machine is."""
    for _ in range(10 * seconds):
        if true():
            return
        time.sleep(0.1)
    pytest.fail(f"not so within {seconds} s")


def alive(pid):
    stat = Path("/proc") / str(pid) / "stat"
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_what_it_lacks(tmp_path, capfd):
    """The kernels run in Triton's interpreter; what they give is judged, times are not."""
    path = os.pathsep.join([str(again.ROOT), str(again.ROOT / "kernels")])
    run = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), *DRY],
        cwd=again.ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    kernels = tmp_path / "kernels.json"
    until(lambda: kernels.exists() and len(written(tmp_path, "kernels")["checks"]) > 0)
    run.send_signal(signal.SIGTERM)
    assert run.wait() == 1
    told = capfd.readouterr().out
    assert "FAIL   kernels: did not finish" in told
    assert "the run was interrupted" in told
    first = written(tmp_path, "summary")
    assert [stage["finished"] for stage in first["stages"]] == [True, False]
    assert "**Did not finish.**" in (tmp_path / "summary.md").read_text()

    assert command.main(["--out", str(tmp_path), *DRY]) == 0
    assert "correctness: complete already" in capfd.readouterr().out
    correctness, kernels = written(tmp_path, "summary")["stages"]
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
    assert [row["launches"] for row in rows] == [2, 2, 2, 2, *[3] * 6, 1, 1, 1, 3, 1]
    assert "no figure below is a measurement" in (tmp_path / "summary.md").read_text()


# -- runs of stages that do nothing but end ----------------------------------------------------

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
    """Run the command with such stages; the stages that were run."""

    def line(order, stage):
        return [sys.executable, "-c", STAGE, *order.arguments(stage)]

    monkeypatch.setattr(stages, "command", line)

    def run(*args):
        (tmp_path / "ran").write_text("")
        command.main(["--out", str(tmp_path), *args])
        return (tmp_path / "ran").read_text().split("\n")[:-1]

    return run


def test_a_complete_stage_is_run_again_for_another_commit_alone(ran, tmp_path):
    names = list(stages.LIMITS)
    assert ran("--commit", "a") == [f"{name} a" for name in names]
    assert ran("--commit", "a") == []
    assert ran("--commit", "b", "--stages", "serving", "kernels") == ["kernels b", "serving b"]
    (tmp_path / "tokens.json").unlink()
    assert ran("--commit", "b") == ["correctness b", "tokens b"]


def test_a_stage_that_was_cut_off_is_run_again(ran, tmp_path):
    ran("--commit", "a")
    cut = written(tmp_path, "kernels") | {"finished": False}
    (tmp_path / "kernels.json").write_text(json.dumps(cut))
    assert ran("--commit", "a") == ["kernels a"]


def test_no_stage_starts_without_time(ran, capsys):
    assert ran("--commit", "a", "--seconds", "1") == []
    assert "FAIL   serving: no time was left for it" in capsys.readouterr().out


def test_a_folder_is_summed_up_without_a_run(ran, tmp_path):
    ran("--commit", "a")
    (tmp_path / "summary.md").unlink()
    assert ran("--commit", "b", "--summary") == []
    assert "## serving" in (tmp_path / "summary.md").read_text()


def test_a_stage_is_stopped_with_all_that_it_started(tmp_path, monkeypatch):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(99)\n"
    )
    monkeypatch.setattr(stages, "command", lambda *_: [sys.executable, "-c", code])
    wait = subprocess.Popen.wait

    def waiting(process, timeout=None):
        """As if the time was up as soon as the stage has a child, however slow the machine is."""
        if timeout is None:
            return wait(process)
        until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", waiting)
    order = stages.Order(tmp_path, stages.Origin("abc", False), 0)
    with (tmp_path / "log.txt").open("w") as log:
        assert stages.run_stage(order, "kernels", 5, log) == "stopped after 5 s"
    child = int((tmp_path / "child").read_text())
    until(lambda: not alive(child))


def test_an_engine_that_does_not_end_is_killed(monkeypatch, tmp_path):
    from benchmarks.gpu import engine_process

    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
    popen = subprocess.Popen

    def start(line, **how):
        return popen([sys.executable, "-c", stubborn], **how)

    monkeypatch.setattr(engine_process.subprocess, "Popen", start)
    monkeypatch.setattr(engine_process, "PATIENCE", 0.1)
    engine = EngineProcess("model", None)
    engine.close()
    assert engine.process.returncode == -signal.SIGKILL
    engine.close()
    with pytest.raises(RuntimeError, match="ended with -9; see the log"):
        engine.ready()


def test_the_log_keeps_its_end(tmp_path):
    (tmp_path / "log.txt").write_text("long ago" + "lately")
    command.keep_end(tmp_path / "log.txt", 6)
    assert (tmp_path / "log.txt").read_text() == "lately"
