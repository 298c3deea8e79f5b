"""The CPU image, built with its own steps and started with its own entrypoint, without Docker.

As in a container (`image_root`): a read-only root file system, an unprivileged user, and the
entrypoint as process 1. The locked packages are links to those of the test environment, which
`make setup` installs from the same locks with their hashes.
"""

import concurrent.futures
import os
import shlex
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

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

FILE = ROOT / "docker" / "Dockerfile.cpu"
INSTALL, IMAGE = stages(FILE)
SETTINGS = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
# float32 is faster on CPUs without bfloat16 instructions
FLAGS = shlex.split("""
    --enforce-eager --max-model-len 4096 --served-model-name demo --dtype float32
    --num-gpu-blocks-override 65 --kv-compress snapkv --kv-budget 0.2 --shutdown-timeout 300
""")


def test_the_dockerfile_has_the_steps_of_the_image_fixture():
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
    """Run another command in the image, as `docker exec` does; return status and output."""
    started = image.start(command, IMAGE.env | {"HF_HUB_OFFLINE": "1"}, user, log)
    return started.wait(600), log.read_text()


def test_only_the_volumes_are_writable(image, tmp_path):
    script = (
        "id -u; for d in / /etc /opt /opt/kvcompress /usr /models /scratch /tmp /dev/shm; do"
        " touch $d/probe 2>/dev/null && rm $d/probe && echo writes $d; done;"
        " grep CapBnd /proc/self/status"
    )
    _, output = run(image, ["/bin/sh", "-c", script], tmp_path / "log")
    # /models is read-only: HF_HUB_OFFLINE is set and the model exists.
    assert output.split("\n")[:-2] == ["10001", "writes /scratch", "writes /tmp", "writes /dev/shm"]
    assert output.split()[-1] == "0000000000000000"


def test_the_image_runs_with_any_uid_in_group_0(image, tmp_path):
    """OpenShift uses a uid that is not in the image's files, with group 0."""
    user = "1000680000:0"
    status, output = run(
        image, [*IMAGE.command("ENTRYPOINT"), "kvcompress", "--help"], tmp_path / "entry", user
    )
    assert status == 0, output  # all its folders are writable
    # torch looks up the user's name and writes caches and kernels. The options skip a test program
    # and a precompiled header.
    script = (
        "import torch; options = {'cpp.vec_isa_ok': True, 'cpp_cache_precompile_headers': False};"
        "print(torch.compile(lambda x: x + 1, options=options)(torch.zeros(3)).sum().item())"
    )
    status, output = run(image, ["python", "-c", script], tmp_path / "compiled", user)
    assert status == 0, output
    assert output.split()[-1] == "3.0"
    for path in (image.path / "scratch").iterdir():  # the next test uses another user
        shutil.rmtree(path)


def test_compare_runs_in_the_image_and_draws(image, tmp_path):
    """As in the runbook: prompts and report in /scratch, with a read-only root file system."""
    scratch = image.path / "scratch"
    write_prompts(scratch / "mine.jsonl", range(4))
    with server(FakeVllm()) as url:
        command = ["kvcompress", "compare", "--url", url, "--prompts", "/scratch/mine.jsonl"]
        flags = ["--out", "/scratch/compare", "--methods", "snapkv", "--budgets", "0.2"]
        status, output = run(image, [*command, *flags], tmp_path / "log")
    assert status == 1, output
    assert "At least 149 are needed." in output
    assert (scratch / "compare" / "report.png").read_bytes().startswith(b"\x89PNG")
    for path in scratch.iterdir():  # leave an empty folder for the next test
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_the_image_starts_answers_drains_and_ends(image, tmp_path):
    port, log = free_port(), tmp_path / "server.log"
    health = [part.replace("8000", str(port)) for part in IMAGE.command("HEALTHCHECK")]
    argv = [*IMAGE.command("ENTRYPOINT"), "/models/demo", "--port", str(port), *FLAGS]
    started = image.start(argv, IMAGE.env | SETTINGS, IMAGE.rest["USER"], log)
    try:
        status, output = run(image, health, tmp_path / "early")
        assert status == 1, output  # the server is not up yet
        _healthy(port, started, log)
        _complete(port, 8)
        assert _metric(port, "vllm:kv_compress_requests_total") == 1
        assert _metric(port, "vllm:kv_compress_freed_blocks_total") > 5
        status, output = run(image, health, tmp_path / "health")
        assert status == 0, output

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(_complete, port, 500)  # long enough to still run below
            while not _metric(port, "vllm:num_requests_running"):
                assert not running.done()
                time.sleep(0.05)
            os.kill(first_process(started), signal.SIGTERM)
            # The request was running when the signal came, and completes.
            assert running.result()["usage"]["completion_tokens"] == 500
        assert started.wait(300) == 0
        assert "draining in-flight requests count=1" in log.read_text()
        status, output = run(image, health, tmp_path / "late")
        assert status == 1, output
        written = {path.name for path in (image.path / "scratch").iterdir()}
        assert {"vllm", "triton", "inductor"} <= written  # the folders of the image's ENV
        owners = {path.stat().st_uid for path in (image.path / "scratch").iterdir()}
        assert owners == {10001}
    finally:
        started.kill()  # also kills all processes in its namespace
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
    pytest.fail(f"the server in the image is not healthy:\n{log.read_text()[-3000:]}")


def _complete(port: int, tokens: int) -> dict:
    response = httpx.post(
        f"http://127.0.0.1:{port}/v1/completions",
        json={
            "model": "demo",
            "prompt": english()[:6000],
            "max_tokens": tokens,
            "ignore_eos": True,
        },
        timeout=300,
    )
    assert response.status_code == 200, response.text
    return response.json()


def _metric(port: int, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=300).text
    samples = [s for f in text_string_to_metric_families(text) for s in f.samples if s.name == name]
    assert samples, name
    return sum(sample.value for sample in samples)
