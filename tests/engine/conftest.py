"""Real vLLM engines in this process, one at a time, on the model runner that the run chose."""

import pytest

from engines import inspect_models_here, prepare_model_runner

prepare_model_runner()
inspect_models_here()


@pytest.fixture(scope="session")
def checkpoints_folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def keep_async_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM switches async scheduling off on a CPU, which does not need it: leave it as asked."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keeping(config) -> None:
        asked = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = asked

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keeping))


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if "engine" not in item.keywords and "tests/engine" in str(item.path):
            item.add_marker(pytest.mark.engine)
