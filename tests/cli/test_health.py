"""``kvcompress health``: what a container's health check sees, and what it loads."""

import re
import subprocess
import sys
import threading

import pytest

from loopback import exported, server
from vllm_kvcompress.serving.exposition import Metrics


def pages(metrics: str, health: int = 200, metrics_status: int = 200):
    def answer(path: str, body: bytes) -> tuple[int, str]:
        return (health, "") if path == "/health" else (metrics_status, metrics)

    return answer


OFF = exported({}, {})


@pytest.mark.parametrize(
    ("answer", "flags", "status", "sentence"),
    [
        (pages(OFF), [], 0, "compression is off"),
        (pages(OFF), ["--expect-compression"], 1, "Compression is expected"),
        (pages(OFF, health=503), [], 1, "/health answered 503"),
        (pages(OFF, metrics_status=404), [], 1, "/metrics answered 404"),
        (pages(exported({"0": 0}, {"0": 0})), [], 0, "0 of 0 planned"),
        (pages(exported({"0": 4}, {"0": 0})), [], 0, "0 of 4 planned"),
        (pages(exported({"0": 5}, {"0": 0})), [], 1, "planned to compress 5 prompts"),
        (pages(exported({"0": 5}, {})), [], 1, "compressed none"),
        (pages(exported({"0": 5}, {"0": 0})), ["--after", "6"], 0, "0 of 5 planned"),
        (pages(exported({"0": 5}, {"0": 0})), ["--ignore-compression"], 0, "not asked"),
        (pages(exported({"0": 9}, {"0": 9})), ["--expect-compression"], 0, "cake compressed 9"),
        # one engine of two does nothing, and the sum would hide it
        (pages(exported({"0": 9, "1": 8}, {"0": 9, "1": 0})), [], 1, "Engine 1 planned to comp"),
    ],
)
def test_status_and_sentence(run, answer, flags, status, sentence):
    with server(answer) as url:
        done = run("health", "--url", url, *flags)
    assert sentence in done.stdout
    assert done.returncode == status
    assert done.stdout.count("\n") == 1


def test_nobody_answers(run):
    done = run("health", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert re.fullmatch(r"http://127\.0\.0\.1:9/health does not answer \(.*\); .*\.\n", done.stdout)


def test_a_server_that_hangs_is_unhealthy_in_time(run):
    given_up = threading.Event()

    def hanging(path: str, body: bytes) -> tuple[int, str]:
        given_up.wait(300)
        return 200, ""

    with server(hanging) as url:
        done = run("health", "--url", url, "--timeout", "0.5")
        given_up.set()
    assert done.returncode == 1
    assert "does not answer (timed out)" in done.stdout


def test_a_proxy_is_not_asked(run):
    with server(pages(OFF)) as url:
        done = run("health", "--url", url, environment={"http_proxy": "http://127.0.0.1:9"})
    assert done.returncode == 0


def test_a_wrong_address_is_wrong_usage(run):
    done = run("health", "--url", "localhost:8000/metrics")
    assert done.returncode == 2
    assert "--url must be a server's address without a path" in done.stderr


def test_it_loads_neither_torch_nor_vllm_nor_much_else():
    """A health check runs every few seconds: what it costs is what it imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "vllm_kvcompress.cli", "health", "--url",
         "http://127.0.0.1:9"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    lines = [line.split("|") for line in done.stderr.splitlines() if "import time:" in line]
    modules = {line[2].strip() for line in lines[1:]}
    assert "vllm_kvcompress.commands.health" in modules
    assert not {m for m in modules if re.match(r"(torch|vllm|numpy|rich|httpx)(\.|$)", m)}
    assert len(modules) < 400  # torch is two thousand more


def test_a_metrics_page_is_read():
    metrics = Metrics(exported({"0": 3, "1": 4}, {"0": 3}) + "# a comment 1\nplain 2e3\nnan NaN\n")
    assert metrics.info["model_name"] == 'a "b" } c'
    assert metrics.total("plain") == 2000
    assert metrics.by_engine("vllm:kv_compress_planned_requests_total") == {"0": 3, "1": 4}
    assert metrics.total("not there") == 0
