"""A place where we touch vLLM, and the check that this vLLM has it."""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

from vllm_kvcompress.engine.startup.import_failures import import_failure, is_gone
from vllm_kvcompress.errors import VllmHookError

TESTED = SpecifierSet(">=0.31,<0.34")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmHook:
    """One place where we touch vLLM.

    Args:
        name: module of this package that uses it.
        target: ``module:qualname`` in vLLM.
        kind: "registry" (vLLM's own hook), "subclass" (chosen by a flag), "wrap" (a method
            that is called through, with something added before or after) or "use" (only called
            or read).
        params: parameters of `target` that we pass or override by name.
        remove_when: observable event after which the entry can go.
        on: the platform that needs it, "cpu" or "cuda"; both when empty.
    """

    name: str
    target: str
    kind: str
    params: tuple[str, ...]
    remove_when: str
    on: str = ""

    def check(self, version: str) -> None:
        """Raise VllmHookError unless `target` exists and takes `params`. Touches nothing.

        A module that is there but cannot be imported gets an error that says what is missing.
        """
        module, _, qualname = self.target.partition(":")
        cure = f"install a vLLM in {TESTED}, or serve without --kv-compress"
        gone = f"vLLM {version} has no {self.target}"
        try:
            resolved: Any = importlib.import_module(module)
        except Exception as e:
            # Anything may go wrong while others' modules are imported.
            if is_gone(module, e):
                raise VllmHookError(gone, cure) from e
            raise import_failure(e, version, module) from e
        try:
            for part in qualname.split("."):
                resolved = getattr(resolved, part)
        except AttributeError as e:
            raise VllmHookError(gone, cure) from e
        parameters = inspect.signature(resolved).parameters if self.params else {}
        if lost := set(self.params) - parameters.keys():
            raise VllmHookError(f"vLLM {version}: {self.target} lost {sorted(lost)}", cure)


def vllm_hooks(
    name: str, kind: str, remove_when: str, *signatures: str, on: str = ""
) -> Iterator[VllmHook]:
    """What one of our modules needs for one reason, each as ``module:qualname(param, param)``."""
    for signature in signatures:
        target, _, params = signature.rstrip(")").partition("(")
        yield VllmHook(
            name=name,
            target=target,
            kind=kind,
            params=tuple(params.split(", ")) if params else (),
            remove_when=remove_when,
            on=on,
        )
