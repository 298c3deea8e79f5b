"""The command as a process that is interrupted or killed, and started again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fake_vllm import write_prompts

# A job in the background starts with SIGINT ignored, and hands that on.
SCRIPT = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    " from vllm_kvcompress.cli import main; main()"
)


def start(fake, folder):
    return subprocess.Popen(
        [
            *(sys.executable, "-c", SCRIPT, "compare", "--url", fake.url),
            *("--prompts", "mine.jsonl", "--methods", "snapkv", "--budgets", "0.5,0.2", "--json"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
    )


def lines(folder):
    path = folder / "kvcompress-compare" / "journal.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_what_was_done_is_kept_and_gone_on_with(fake, tmp_path, sign):
    fake.hold_from = 20
    write_prompts(tmp_path / "mine.jsonl", range(30))
    first = start(fake, tmp_path)
    end = time.monotonic() + 300
    while len(lines(tmp_path)) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    first.send_signal(sign)
    out, err = first.communicate(timeout=300)
    fake.released.set()
    done = len(lines(tmp_path))
    assert 3 <= done < 60
    if sign == signal.SIGKILL:
        assert first.returncode == -sign
    else:
        assert first.returncode == 130
        assert f"interrupted; {done} of 60 are done and kept in kvcompress-compare" in err
        assert not json.loads(out)["complete"]
    assert "Traceback" not in err

    before = len(fake.prompts)
    second = start(fake, tmp_path)
    out, err = second.communicate(timeout=300)
    assert second.returncode == 1, err
    assert f"{done} of 60 are there already." in err
    found = json.loads(out)
    assert found["complete"]
    assert [cell["asked"] for cell in found["cells"]] == [30, 30]
    assert found["cells"][1]["exact"]["mean"] == 0.5
    # What is left, and the full cache once more for each prompt that was begun. One request
    # of the command that was killed may reach the server after its end.
    assert 60 - done <= len(fake.prompts) - before <= 60 - done + 30 + 1
