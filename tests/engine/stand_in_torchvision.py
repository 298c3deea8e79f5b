"""Qwen3.5's text model without torchvision, which vLLM imports with it and a text does not need.

There is no build of it for the CPU's torch on every machine. What is imported over the stand-in
stays imported, so it is used in a fork of this process alone.
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
    """Has a class of any name, as annotations and tables of interpolation modes want."""

    __path__ = ()
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {mode: at for at, mode in enumerate(_MODES)})


def in_a_fork(run: Callable[[], Any]) -> Any:
    """What `run` returns, in a process with torchvision or its stand-in."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_running, args=(run, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def _running(run: Callable[[], Any], end: Any) -> None:
    if find_spec("torchvision") is None:
        for name in _MODULES:
            module = _Anything(f"torchvision{name}")
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            sys.modules[module.__name__] = module
            if name:
                above, _, last = module.__name__.rpartition(".")
                setattr(sys.modules[above], last, module)
    end.send(run())
