"""Settings for the whole suite; they must precede the first import of Triton, vLLM or Ray."""

import os
import random
import runpy
import secrets
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# vLLM's own drafter runs through numba, whose OpenMP layer sets the number of threads that torch
# has in this process from then on, whatever OMP_NUM_THREADS says. Two threads that spin while they
# wait for each other make later files many times slower where another worker has the other core.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
# What is freed stays with the process. To give it back and to fault it in again, as glibc does from
# 128 KiB on, is a twentieth of what an engine with small tensors takes.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(4 << 30))
os.environ.setdefault("MALLOC_TOP_PAD_", str(64 << 20))
# Else each of the many processes that tests start would compile our modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# whoever reaches a Ray's ports may run what he likes
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

EVERY_PROCESS = Path(__file__).parent / "every_process"
runpy.run_path(str(EVERY_PROCESS / "sitecustomize.py"))
paths = [str(EVERY_PROCESS), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

import pytest
import torch

import tools
from parameter_ids import readable

ROOT = Path(__file__).parents[1]
DEMO_MODEL = ROOT / ".cache" / "smollm2-135m-instruct"


# The files that take longest, so that they start first and neither worker is idle at the end.
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
    rank = {tests / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    return readable(argname, val)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slowest-files", type=int, default=0, metavar="N", help="show the N slowest files"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds by file: set-up, tests and tear-down together."""
    spent: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                spent[report.nodeid.partition("::")[0]] += report.duration
    count = terminalreporter.config.getoption("--slowest-files")
    if count and spent:
        terminalreporter.section(f"slowest {count} files")
        for file, seconds in spent.most_common(count):
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")


@pytest.fixture(scope="session")
def tool() -> Callable[[str, str], str]:
    """Find a command: its path, from its name and the package that has it."""
    return tools.find


@pytest.fixture(scope="session")
def states_are_served() -> None:
    """Skip where this vLLM is refused for models whose layers keep a state."""
    from engines import serves_states

    if not serves_states():
        pytest.skip("this vLLM is refused by name for models whose layers keep a state")


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The real 135M Llama; ``make model`` makes it."""
    if not (DEMO_MODEL / "model.safetensors").exists():
        pytest.fail(f"no demo model in {DEMO_MODEL.name}; run `make model` first")
    return str(DEMO_MODEL)
