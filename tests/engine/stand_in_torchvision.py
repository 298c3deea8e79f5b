"""Run Qwen3.5's text model without torchvision, which vLLM imports but text does not need.

torchvision has no build for the CPU build of torch on some machines. Modules imported with the stub
stay imported, so it is only used in a fork of this process.
"""

import importlib.machinery
import multiprocessing
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODULES = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2")
_MODULES += (".transforms.v2.functional",)
_MODES = ("BICUBIC", "BILINEAR", "NEAREST", "NEAREST_EXACT", "BOX", "HAMMING", "LANCZOS")


class _Anything(ModuleType):
    """A module with a class for any attribute, for annotations and interpolation modes."""

    __path__ = ()
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {mode: number for number, mode in enumerate(_MODES)})


def in_a_fork(run: Callable[[], Any]) -> Any:
    """Run `run` in a fork of this process with torchvision or its stub; return its result."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe()
    process = fork.Process(target=_running, args=(run, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def _running(run: Callable[[], Any], sender: Any) -> None:
    if find_spec("torchvision") is None:
        for name in _MODULES:
            module = _Anything(f"torchvision{name}")
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            sys.modules[module.__name__] = module
            if name:
                parent_name, _, child_name = module.__name__.rpartition(".")
                setattr(sys.modules[parent_name], child_name, module)
    sender.send(run())
