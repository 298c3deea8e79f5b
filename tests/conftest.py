"""Settings for the test suite; they must be made before Triton, vLLM or Ray is imported."""

import functools
import os
import random
import runpy
import secrets
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The tensors of tests are small. With a thread for each core, PyTorch's threads spin while they
# wait for each other, and a file takes three times as much CPU time on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# vLLM's n-gram drafter uses numba, whose OpenMP layer overrides OMP_NUM_THREADS for torch in this
# process. Two threads that spin while waiting for each other make later files many times slower
# when another pytest worker uses the second core.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
# Keep freed memory in the process. By default glibc returns allocations of 128 KiB and more to the
# kernel, and the page faults take about 5 % of the run time of an engine with small tensors.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(4 << 30))
os.environ.setdefault("MALLOC_TOP_PAD_", str(64 << 20))
# Without bytecode files, each process that a test starts would compile our modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Anyone who can reach Ray's ports can execute code, so require a token.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

EVERY_PROCESS = Path(__file__).parent / "every_process"
runpy.run_path(str(EVERY_PROCESS / "sitecustomize.py"))
paths = [str(EVERY_PROCESS), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
# For every request, `httpx.get` and `httpx.post` would read all certificates, which takes 23 ms.
# The servers of tests use no TLS.
ssl.create_default_context = functools.cache(ssl.create_default_context)

import pytest
import torch

import tools

ROOT = Path(__file__).parents[1]
DEMO_MODEL = ROOT / ".cache" / "smollm2-135m-instruct"


# The slowest files start first, so that no worker is idle at the end.
LONGEST = (
    "engine/test_model_runner_v2",
    "kernels/test_in_interpreter",
    "e2e/test_tensor_parallel",
    "e2e/test_pipeline_parallel",
    "deploy/test_image",
    "engine/test_soak",
    "engine/test_hybrids",
    "e2e/test_server",
    "e2e/test_faults",
    "e2e/test_disaggregated",
    "e2e/test_overrides",
    "engine/test_quantised",
    "e2e/test_pulling_engines",
    "e2e/test_data_parallel",
    "cli/test_doctor",
    "deploy/test_prometheus",
    "e2e/test_serve_methods",
    "benchmarks/test_gpu_run",
    "kernels/test_report",
    "cli/test_running_server",
    "engine/test_features",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    rank = {tests / f"{name}.py": index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name numbers and dtypes in test ids: ``dim=80-dtype=float16``, not ``80-dtype0``."""
    if val is None or isinstance(val, bool | int | float | torch.dtype):
        return f"{argname}={str(val).removeprefix('torch.')}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slowest-files", type=int, default=0, metavar="N", help="show the N slowest files"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the slowest files with their seconds of setup, tests and teardown."""
    seconds_by_file: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                seconds_by_file[report.nodeid.partition("::")[0]] += report.duration
    count = terminalreporter.config.getoption("--slowest-files")
    if count and seconds_by_file:
        terminalreporter.section(f"slowest {count} files")
        for file, seconds in seconds_by_file.most_common(count):
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")


@pytest.fixture(scope="session")
def tool() -> Callable[[str, str], str]:
    """Return `tools.find`, which takes a command's name and its package and returns its path."""
    return tools.find


@pytest.fixture(scope="session")
def states_are_served() -> None:
    """Skip the test if this vLLM version is not accepted for models with state-space layers."""
    from engines import serves_states

    if not serves_states():
        pytest.skip("this vLLM version is not accepted for models with state-space layers")


@pytest.fixture(autouse=True, scope="module")
def _all_cores() -> Iterator[None]:
    """Undo the pinning by vLLM's NIXL connector, which would put all pytest workers on one core."""
    cores = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo_model() -> str:
    """Return the folder of the trained 135M Llama model that ``make model`` downloads."""
    if not (DEMO_MODEL / "model.safetensors").exists():
        pytest.fail(f"no demo model in {DEMO_MODEL.name}; run `make model` first")
    return str(DEMO_MODEL)
