"""Real vLLM engines in this process, one at a time, on the model runner that the run chose."""

import pytest

from engines import inspect_models_here, leave_async_scheduling, prepare_model_runner

prepare_model_runner()
inspect_models_here()


@pytest.fixture(scope="session")
def checkpoints_folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def keep_async_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Async scheduling on a CPU, for one test."""
    leave_async_scheduling(monkeypatch)


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if "engine" not in item.keywords and "tests/engine" in str(item.path):
            item.add_marker(pytest.mark.engine)
