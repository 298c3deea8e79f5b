"""Real vLLM engines in this process, one at a time, on the model runner that the run chose."""

import pytest

from engines import prepare_model_runner

prepare_model_runner()


@pytest.fixture(scope="session")
def checkpoints_folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("checkpoints")


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if "engine" not in item.keywords and "tests/engine" in str(item.path):
            item.add_marker(pytest.mark.engine)
