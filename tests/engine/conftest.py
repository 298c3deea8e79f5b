"""Fixtures of tests that run vLLM engines in this process, one at a time.

``VLLM_USE_V2_MODEL_RUNNER`` chooses the model runner of all tests in the process.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from engines import allow_async_scheduling, inspect_models_here, prepare_model_runner

prepare_model_runner()
inspect_models_here()


@pytest.fixture(scope="session")
def checkpoints_folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def llama(checkpoints_folder) -> str:
    """Return the checkpoint that most tests use: four layers and grouped queries."""
    from checkpoints import make  # loads Triton, which V2 must prepare first

    return make("llama-gqa", checkpoints_folder)


@pytest.fixture(scope="session")
def model(llama) -> str:
    """Return the checkpoint of a file's tests; some files override it."""
    return llama


@pytest.fixture
def edited(llama, tmp_path):
    """Return a function that writes a changed config.json and returns its folder."""

    def edit(**changes) -> str:
        config = json.loads(Path(llama, "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return str(tmp_path)

    return edit


@pytest.fixture
def async_scheduling_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow async scheduling on a CPU for one test."""
    allow_async_scheduling(monkeypatch)


@pytest.fixture
def watched(monkeypatch):
    """Return a function ``counts(key)`` that sums the compression statistics of this test."""
    from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats

    reports = []
    take = CompressionStats.take
    monkeypatch.setattr(
        CompressionStats, "take", lambda self: (reports.append(take(self)), reports[-1])[1]
    )

    def counts(key):
        total = Counter()
        for report in reports:
            counts_of_report = (report or {}).get(key, {})
            total.update(
                counts_of_report if isinstance(counts_of_report, dict) else {"": counts_of_report}
            )
        return {name: count for name, count in total.items() if count}

    return counts


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if "engine" not in item.keywords and "tests/engine" in str(item.path):
            item.add_marker(pytest.mark.engine)
