"""``kvcompress compare`` as a process that is interrupted or killed, and then resumed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fake_vllm import write_prompts

# A background job starts with SIGINT ignored, and its child processes inherit that.
SCRIPT = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    " from vllm_kvcompress.cli import main; main()"
)


def start(fake, folder):
    flags = "--prompts mine.jsonl --methods snapkv --budgets 0.5,0.2 --json"
    command = [sys.executable, "-c", SCRIPT, "compare", "--url", fake.url, *flags.split()]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, **pipes, cwd=folder, env={**os.environ, "COLUMNS": "200"})


def journal_lines(folder):
    path = folder / "kvcompress-compare" / "journal.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_is_resumed(fake, tmp_path, signal_number):
    fake.hold_from = 20
    write_prompts(tmp_path / "mine.jsonl", range(30))
    first_run = start(fake, tmp_path)
    end = time.monotonic() + 300
    while len(journal_lines(tmp_path)) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    first_run.send_signal(signal_number)
    out, err = first_run.communicate(timeout=300)
    fake.released.set()
    done = len(journal_lines(tmp_path))
    assert 3 <= done < 60
    if signal_number == signal.SIGKILL:
        assert first_run.returncode == -signal_number
    else:
        assert first_run.returncode == 130
        assert f"interrupted; {done} of 60 results are saved in kvcompress-compare" in err
        assert not json.loads(out)["complete"]
    assert "Traceback" not in err

    before = len(fake.prompt_requests)
    second_run = start(fake, tmp_path)
    out, err = second_run.communicate(timeout=300)
    assert second_run.returncode == 1, err
    assert f"Resuming: {done} of 60 results were saved earlier." in err
    report = json.loads(out)
    assert report["complete"]
    assert [cell["asked"] for cell in report["cells"]] == [30, 30]
    assert report["cells"][1]["exact"]["mean"] == 0.5
    # The remaining results, and one full-cache request per unfinished prompt. One request of the
    # killed command may reach the server after its end.
    assert 60 - done <= len(fake.prompt_requests) - before <= 60 - done + 30 + 1
