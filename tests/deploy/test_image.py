"""The CPU image, built by its own steps and started by its own entrypoint, without Docker.

See `image_root`: a read-only root file system, a user without rights, and process number 1. Of
modules that the suite's own environment has too, pip takes the bytecode from there.
"""

import concurrent.futures
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dockerfiles import stages
from fake_vllm import FakeVllm, write_prompts
from image_root import ImageRoot, first_process
from loopback import server
from manifests import ROOT
from vllm_kvcompress.serving.process import free_port
from vllm_kvcompress.serving.text import english

# the installation alone is 3.4 GB
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

FILE = ROOT / "docker" / "Dockerfile.cpu"
INSTALL, IMAGE = stages(FILE)
SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
FLAGS = [
    *("--enforce-eager", "--max-model-len", "4096", "--served-model-name", "demo"),
    *("--dtype", "float32"),  # the faster one where a CPU has no instructions for bfloat16
    *("--num-gpu-blocks-override", "65"),
    *("--kv-compress", "snapkv", "--kv-budget", "0.2", "--shutdown-timeout", "300"),
]


def test_what_follows_runs_the_steps_of_the_dockerfile():
    """The fixture `image` does, in this order."""
    assert INSTALL.run == ["/src/docker/install-cpu.sh /opt/kvcompress"]
    steps = "/steps/install-packages.sh && /steps/make-user.sh && rm -rf /var/lib/apt/lists/*"
    assert IMAGE.run == [steps]
    assert IMAGE.copy == [
        ["/opt/kvcompress", "/opt/kvcompress"],
        ["docker/entrypoint.sh", "/opt/entrypoint.sh"],
    ]


def run(
    image: ImageRoot, command: list[str], log: Path, user: str = IMAGE.rest["USER"]
) -> tuple[int, str]:
    """Status and output of another command in the image, as `docker exec` runs it."""
    started = image.start(command, IMAGE.env | {"HF_HUB_OFFLINE": "1"}, user, [], log)
    return started.wait(600), log.read_text()


def test_nothing_outside_the_volumes_can_be_written(image, tmp_path):
    script = (
        "id -u; for d in / /etc /opt /opt/kvcompress /usr /models /scratch /tmp /dev/shm; do"
        " touch $d/probe 2>/dev/null && rm $d/probe && echo writes $d; done;"
        " grep CapBnd /proc/self/status"
    )
    _, said = run(image, ["/bin/sh", "-c", script], tmp_path / "log")
    # /models is read-only here: the model is there, and HF_HUB_OFFLINE says so
    assert said.split("\n")[:-2] == ["10001", "writes /scratch", "writes /tmp", "writes /dev/shm"]
    assert said.split()[-1] == "0000000000000000"


def test_any_user_of_group_0_may_run_it(image, tmp_path):
    """OpenShift's way: a number that no file of the image knows, and group 0."""
    user = "1000680000:0"
    status, said = run(
        image, [*IMAGE.command("ENTRYPOINT"), "kvcompress", "--help"], tmp_path / "entry", user
    )
    assert status == 0, said  # every folder that it wants can be written
    # torch asks for the user's name and writes its caches and kernels
    script = "import torch; print(torch.compile(lambda x: x + 1)(torch.zeros(3)).sum().item())"
    status, said = run(image, ["python", "-c", script], tmp_path / "compiled", user)
    assert status == 0, said
    assert said.split()[-1] == "3.0"
    for path in (image.path / "scratch").iterdir():  # another user starts next
        shutil.rmtree(path)


def test_compare_runs_in_it_and_draws(image, tmp_path):
    """As the runbook has it: prompts and report in /scratch, the root file system read-only."""
    scratch = image.path / "scratch"
    write_prompts(scratch / "mine.jsonl", range(4))
    with server(FakeVllm()) as url:
        command = ["kvcompress", "compare", "--url", url, "--prompts", "/scratch/mine.jsonl"]
        flags = ["--out", "/scratch/compare", "--methods", "snapkv", "--budgets", "0.2"]
        status, said = run(image, [*command, *flags], tmp_path / "log")
    assert status == 1, said
    assert "It takes 149." in said
    assert (scratch / "compare" / "report.png").read_bytes().startswith(b"\x89PNG")
    for path in scratch.iterdir():  # another process starts next
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_start_answer_health_drain_and_end(image, tmp_path):
    port, log = free_port(), tmp_path / "server.log"
    health = [part.replace("8000", str(port)) for part in IMAGE.command("HEALTHCHECK")]
    argv = [*IMAGE.command("ENTRYPOINT"), "/models/demo", "--port", str(port), *FLAGS]
    started = image.start(argv, IMAGE.env | SETTINGS, IMAGE.rest["USER"], [], log)
    try:
        status, said = run(image, health, tmp_path / "early")
        assert status == 1, said  # not up yet
        _healthy(port, started, log)
        _answer(port, 8)
        assert _metric(port, "vllm:kv_compress_requests_total") == 1
        assert _metric(port, "vllm:kv_compress_freed_blocks_total") > 5
        status, said = run(image, health, tmp_path / "health")
        assert status == 0, said

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(_answer, port, 1000)  # far from its end when it is seen to run
            while not _metric(port, "vllm:num_requests_running"):
                assert not running.done()
                time.sleep(0.05)
            os.kill(first_process(started), signal.SIGTERM)
            # it was running when the signal came, and is answered in full
            assert running.result()["usage"]["completion_tokens"] == 1000
        assert started.wait(300) == 0
        assert "draining in-flight requests count=1" in log.read_text()
        status, said = run(image, health, tmp_path / "late")
        assert status == 1, said
        written = {path.name for path in (image.path / "scratch").iterdir()}
        assert {"vllm", "triton", "inductor"} <= written  # where the image says, and owned by it
        owners = {path.stat().st_uid for path in (image.path / "scratch").iterdir()}
        assert owners == {10001}
    finally:
        started.kill()  # and with it, all in its process namespace
        started.wait(300)


def _healthy(port: int, started: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 1200
    while time.monotonic() < end and started.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    pytest.fail(f"the image's server is not healthy:\n{log.read_text()[-3000:]}")


def _answer(port: int, tokens: int) -> dict:
    answer = httpx.post(
        f"http://127.0.0.1:{port}/v1/completions",
        json={
            "model": "demo",
            "prompt": english()[:6000],
            "max_tokens": tokens,
            "ignore_eos": True,
        },
        timeout=300,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def _metric(port: int, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=300).text
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples if s.name == name]
    assert samples, name
    return sum(sample.value for sample in samples)
