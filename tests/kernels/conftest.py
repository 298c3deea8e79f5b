"""Where these tests run the ops.

* On a GPU where there is one: tests marked `gpu` build their tensors on the CPU, the op gets copies
  of them on the GPU, with the same strides and overlaps, and what it wrote or returned comes back.
  ``-m gpu`` runs these tests alone; without a GPU it skips them with one sentence.
* With ``TRITON_INTERPRET=1`` in Triton's interpreter, on the CPU tensors themselves.
* Otherwise the CPU forms run.

Where kernels run, memory that they get fresh is filled with NaN, or the largest integer, before.
"""

import inspect
import os
import re
import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import kvcompress_kernels
from kvcompress_kernels import contract

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
KERNELS_RUN = INTERPRETED or ON_GPU
NO_GPU = "needs a CUDA device, and PyTorch sees none"

if INTERPRETED:
    import faster_interpreter
    import interpreter

    interpreter.mend()
    faster_interpreter.remember()


def ops() -> set[Callable[..., Any]]:
    """The public ops: functions that an op's package defines."""
    packages = (m.name for m in iter_modules(kvcompress_kernels.__path__) if m.ispkg)
    modules = [import_module(f"kvcompress_kernels.{name}") for name in packages]
    return {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


class Copies:
    """A test's CPU tensors on another device: tensors of one storage share a copy of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, x: Any) -> Any:
        """`x` there; what is no CPU tensor is left as it is."""
        if not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            return x
        original = x.untyped_storage()
        if original.nbytes() == 0:
            return x.to(self._device)
        if original.data_ptr() not in self._copies:
            copy = torch.UntypedStorage(original.nbytes(), device=self._device)
            self._copies[original.data_ptr()] = original, copy.copy_(original)
        _, copy = self._copies[original.data_ptr()]
        view = torch.empty(0, dtype=x.dtype, device=self._device)
        return view.set_(copy, x.storage_offset(), x.size(), x.stride())

    def write_back(self) -> None:
        for original, copy in self._copies.values():
            original.copy_(copy)


def carried(op: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`op` on copies of its CPU tensors on `device`; all that it wrote is seen in the tensors."""

    @wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        copies = Copies(device)
        there = tree_map(copies.of, (args, kwargs))
        result = op(*there[0], **there[1])
        copies.write_back()
        if not copies._copies:  # the test's own tensors are there already
            return result
        return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, result)

    return run


def in_poisoned_memory(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op`, whose fresh memory is filled: PyTorch does so while it is to be deterministic."""

    @wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*deterministic")
                return op(*args, **kwargs)
        finally:
            torch.use_deterministic_algorithms(False)

    return run


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the ops of tests marked `gpu` run."""
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(scope="session")
def gpu(device: torch.device) -> torch.device:
    """For tests of what no CPU has."""
    if device.type != "cuda":
        pytest.skip(NO_GPU)
    return device


@pytest.fixture(scope="session")
def triton_runs() -> None:
    """For tests of what the kernels alone do, through the public op."""
    if not KERNELS_RUN:
        pytest.skip("Triton takes no CPU tensors")


@pytest.fixture(scope="session")
def carry() -> Callable[..., Any]:
    """`carried`, for the test of it."""
    return carried


@pytest.fixture(autouse=True)
def _triton_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(contract, "triton_takes", lambda tensor: True)


@pytest.fixture(autouse=True)
def _ops_run_there(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not KERNELS_RUN or request.node.get_closest_marker("gpu") is None:
        return
    public = ops()
    for name, x in list(vars(request.module).items()):
        if inspect.isfunction(x) and x in public:
            there = carried(x, device) if ON_GPU else x
            monkeypatch.setattr(request.module, name, in_poisoned_memory(there))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if not ON_GPU and re.search(r"(?<!not )\bgpu\b", item.config.getoption("markexpr") or ""):
        pytest.skip(NO_GPU)
    if KERNELS_RUN and item.get_closest_marker("cpu"):
        pytest.skip("about the CPU form's own tiles or temporaries")
