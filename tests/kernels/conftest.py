"""Run the kernel tests on a GPU, in Triton's interpreter or on the CPU.

* With a GPU, tests marked `gpu` build their tensors on the CPU. The fixtures copy them to the GPU
  with the same strides and overlaps, call the op, and copy its outputs back. ``-m gpu`` runs
  only these tests, and skips them without a GPU.
* With ``TRITON_INTERPRET=1``, the Triton kernels run in Triton's interpreter on the CPU tensors.
* Otherwise the ops run their CPU code. A test marked `gpu` then fails if it calls an op that the
  fixtures would not have moved to a GPU.

Memory that a Triton kernel's op allocates is filled with NaN, or with the largest integer.
"""

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import kvcompress_kernels
from cases import INTERPRETED, KERNELS_RUN, ON_GPU
from kvcompress_kernels import contract

NO_GPU = "needs a CUDA device, and PyTorch sees none"

if INTERPRETED:
    import faster_interpreter
    import interpreter

    interpreter.install_fixes()
    faster_interpreter.install_caches()


@cache
def ops() -> set[Callable[..., Any]]:
    """Return the public ops: the public functions that an op's package defines."""
    packages = (m.name for m in iter_modules(kvcompress_kernels.__path__) if m.ispkg)
    modules = [import_module(f"kvcompress_kernels.{name}") for name in packages]
    return {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


@cache
def imported_ops(num_modules: int) -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Return all ops in modules of this folder: the module, the name in it, and the op.

    Args:
        num_modules: number of imported modules, so that the search is repeated after an import.
    """
    public, folder = ops(), str(Path(__file__).parent)
    here = [
        module
        for module in list(sys.modules.values())
        if str(vars(module).get("__file__")).startswith(folder)
    ]
    return [
        (module, name, x)
        for module in here
        for name, x in vars(module).items()
        if inspect.isfunction(x) and x in public
    ]


class Copies:
    """Copies of CPU tensors on another device. Tensors that share a storage share its copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, x: Any) -> Any:
        """Return a CPU tensor's copy on the device, and any other argument unchanged."""
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


def run_on_device(op: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Wrap `op` to run on copies of its CPU tensors on `device`, and copy all writes back."""

    @wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        copies = Copies(device)
        device_args, device_kwargs = tree_map(copies.of, (args, kwargs))
        result = op(*device_args, **device_kwargs)
        copies.write_back()
        if not copies._copies:  # The test's tensors are on the device already.
            return result
        return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, result)

    return run


def with_poisoned_memory(op: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `op` so that PyTorch fills the memory it allocates, as in deterministic mode."""

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
    """Return the device on which the ops of tests marked `gpu` run."""
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(scope="session")
def gpu(device: torch.device) -> torch.device:
    """Return the GPU, or skip the test without one."""
    if device.type != "cuda":
        pytest.skip(NO_GPU)
    return device


@pytest.fixture(scope="session")
def triton_runs() -> None:
    """Skip the test unless public ops run their Triton kernels."""
    if not KERNELS_RUN:
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")


@pytest.fixture(scope="session")
def device_runner() -> Callable[..., Any]:
    """Return `run_on_device`, for its own test."""
    return run_on_device


@pytest.fixture(autouse=True)
def _always_run_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(contract, "runs_triton", lambda tensor: True)


@pytest.fixture
def wrap_ops(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Return a function that wraps every op in all imported modules of this folder.

    A test may call helpers of another test module, whose ops must run on the same device.
    """

    def wrap_in_all_modules(wrapper: Callable[..., Any]) -> None:
        for module, name, op in imported_ops(len(sys.modules)):
            if vars(module)[name] is op:
                monkeypatch.setattr(module, name, wrapper(op))

    return wrap_in_all_modules


@pytest.fixture(autouse=True)
def _run_ops_on_device(
    request: pytest.FixtureRequest,
    device: torch.device,
    wrap_ops: Callable[[Callable[..., Any]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if request.node.get_closest_marker("gpu") is None:
        return
    running: list[str] = []

    def wrapper(op: Callable[..., Any]) -> Callable[..., Any]:
        on_device = run_on_device(op, device) if ON_GPU else op
        on_device = with_poisoned_memory(on_device) if KERNELS_RUN else on_device

        @wraps(op)
        def run(*args: Any, **kwargs: Any) -> Any:
            running.append(op.__name__)
            try:
                return on_device(*args, **kwargs)
            finally:
                running.pop()

        return run

    def runs_triton(tensor: torch.Tensor) -> bool:
        caller = sys._getframe(1).f_globals["__name__"]
        is_op = caller.count(".") == 1  # not a helper, which takes the device as an argument
        assert running or tensor.is_cuda or not is_op, (
            f"with a GPU, this test would run the CPU code of {caller}: the test got the function"
            " before the fixture could wrap it, for example as a default argument"
        )
        return INTERPRETED or tensor.is_cuda

    wrap_ops(wrapper)
    monkeypatch.setattr(contract, "runs_triton", runs_triton)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if not ON_GPU and re.search(r"(?<!not )\bgpu\b", item.config.getoption("markexpr") or ""):
        pytest.skip(NO_GPU)
    if KERNELS_RUN and item.get_closest_marker("cpu"):
        pytest.skip("tests the tiles or temporaries of the CPU code")
