"""With TRITON_INTERPRET=1 these tests run the Triton kernels instead, on the same CPU tensors."""

import os

import pytest

from kvcompress_kernels import contract

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    import interpreter

    interpreter.mend()


@pytest.fixture(autouse=True)
def _triton_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(contract, "triton_takes", lambda tensor: True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a reference's own tiles and temporaries say nothing of the kernels."""
    skip = pytest.mark.skip(reason="about the reference")
    for item in items:
        if INTERPRETED and item.get_closest_marker("reference"):
            item.add_marker(skip)
