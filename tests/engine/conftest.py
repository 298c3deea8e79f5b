"""Real vLLM engines in this process, one at a time, on the model runner that the run chose."""

import json
from collections import Counter
from pathlib import Path

import pytest

from engines import inspect_models_here, leave_async_scheduling, prepare_model_runner

prepare_model_runner()
inspect_models_here()


@pytest.fixture(scope="session")
def checkpoints_folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def edited(checkpoints_folder, tmp_path):
    """A checkpoint folder whose config.json was changed."""
    from checkpoints import make  # loads Triton, which V2 wants prepared

    def edit(**changes) -> str:
        original = Path(make("llama-gqa", checkpoints_folder), "config.json")
        config = json.loads(original.read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        return str(tmp_path)

    return edit


@pytest.fixture
def keep_async_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Async scheduling on a CPU, for one test."""
    leave_async_scheduling(monkeypatch)


@pytest.fixture
def watched(monkeypatch):
    """Engines whose tallies are kept for the test."""
    from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats

    taken = []
    take = CompressionStats.take
    monkeypatch.setattr(
        CompressionStats, "take", lambda self: (taken.append(take(self)), taken[-1])[1]
    )

    def counts(key):
        total = Counter()
        for report in taken:
            found = (report or {}).get(key, {})
            total.update(found if isinstance(found, dict) else {"": found})
        return {name: count for name, count in total.items() if count}

    return counts


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if "engine" not in item.keywords and "tests/engine" in str(item.path):
            item.add_marker(pytest.mark.engine)
