"""``kvcompress health``: its status, its sentence, and what it imports."""

import re
import subprocess
import sys
import threading

import pytest

from loopback import exported, recording, redirecting, server
from vllm_kvcompress.serving.exposition import Metrics


def pages(metrics: str, health: int = 200, metrics_status: int = 200):
    def respond(path: str, body: bytes) -> tuple[int, str]:
        return (health, "") if path == "/health" else (metrics_status, metrics)

    return respond


OFF = exported({}, {})


@pytest.mark.parametrize(
    ("respond", "flags", "status", "sentence"),
    [
        (pages(OFF), [], 0, "compression is off"),
        (pages(OFF), ["--expect-compression"], 1, "Compression is expected"),
        (pages(OFF, health=503), [], 1, "/health returned 503"),
        (pages(OFF, metrics_status=404), [], 1, "/metrics answered 404"),
        (pages(exported({"0": 0}, {"0": 0})), [], 0, "0 of 0 planned"),
        (pages(exported({"0": 4}, {"0": 0})), [], 0, "0 of 4 planned"),
        (pages(exported({"0": 5}, {"0": 0})), [], 1, "planned to compress 5 prompts"),
        (pages(exported({"0": 5}, {})), [], 1, "compressed none"),
        (pages(exported({"0": 5}, {"0": 0})), ["--after", "6"], 0, "0 of 5 planned"),
        (pages(exported({"0": 5}, {"0": 0})), ["--ignore-compression"], 0, "was not checked"),
        (pages(exported({"0": 9}, {"0": 9})), ["--expect-compression"], 0, "cake compressed 9"),
        # One of two engines compresses nothing, which the sum would hide.
        (pages(exported({"0": 9, "1": 8}, {"0": 9, "1": 0})), [], 1, "Engine 1 planned to comp"),
    ],
)
def test_health_prints_one_sentence_and_sets_the_status(
    run_in_process, respond, flags, status, sentence
):
    with server(respond) as url:
        result = run_in_process("health", "--url", url, *flags)
    assert sentence in result.out
    assert result.status == status
    assert result.out.count("\n") == 1


def test_an_unreachable_server_is_unhealthy(run_in_process):
    result = run_in_process("health", "--url", "http://127.0.0.1:9")
    assert result.status == 1
    assert re.fullmatch(r"http://127\.0\.0\.1:9/health does not answer \(.*\); .*\.\n", result.out)


def test_a_hanging_server_is_unhealthy_after_the_timeout(run_in_process):
    released = threading.Event()

    def hanging(path: str, body: bytes) -> tuple[int, str]:
        released.wait(300)
        return 200, ""

    with server(hanging) as url:
        result = run_in_process("health", "--url", url, "--timeout", "0.5")
        released.set()
    assert result.status == 1
    assert "does not answer (timed out)" in result.out


def test_proxy_settings_are_ignored(run_in_process, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server(pages(OFF)) as url:
        result = run_in_process("health", "--url", url)
    assert result.status == 0


def test_a_redirect_is_unhealthy_and_its_target_gets_no_request(run_in_process, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "key")
    requests = []
    with (
        server(recording(requests, pages(OFF))) as target,
        server(redirecting(target)) as url,
    ):
        result = run_in_process("health", "--url", url)
    assert result.status == 1
    assert f"/health answered 307: it redirects to '{target}/health'" in result.out
    assert "set --url to the final address" in result.out
    assert requests == []


def test_control_characters_of_the_server_are_not_printed(run_in_process):
    page = exported({"\x1b[2J": 9}, {}) + exported({"0": 9}, {"0": 9}).replace("cake", "\x9b2J")
    for metrics in (
        page,
        exported({"0": 9}, {"0": 9}).replace('method="cake"', 'method="\x1b[2J"'),
    ):
        with server(pages(metrics)) as url:
            result = run_in_process("health", "--url", url)
        assert "[2J" in result.out
        assert result.out.removesuffix("\n").isprintable()


def test_an_invalid_address_is_status_2(run_in_process):
    result = run_in_process("health", "--url", "localhost:8000/metrics")
    assert result.status == 2
    assert "--url must be a server's address without a path" in result.err


def test_health_imports_neither_torch_nor_vllm():
    """A health check runs every few seconds, and imports are most of its cost."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "vllm_kvcompress.cli", "health", "--url",
         "http://127.0.0.1:9"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    lines = [line.split("|") for line in result.stderr.splitlines() if "import time:" in line]
    modules = {line[2].strip() for line in lines[1:]}
    assert "vllm_kvcompress.commands.health" in modules
    assert not {m for m in modules if re.match(r"(torch|vllm|numpy|rich|httpx)(\.|$)", m)}
    assert len(modules) < 400  # torch alone would add about 2,000


def test_a_metrics_page_is_parsed():
    metrics = Metrics(exported({"0": 3, "1": 4}, {"0": 3}) + "# a comment 1\nplain 2e3\nnan NaN\n")
    assert metrics.info["model_name"] == 'a "b" } c'
    assert metrics.total("plain") == 2000
    assert metrics.by_engine("vllm:kv_compress_planned_requests_total") == {"0": 3, "1": 4}
    assert metrics.total("not there") == 0
