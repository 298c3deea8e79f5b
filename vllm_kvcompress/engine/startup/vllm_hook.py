"""A vLLM name that this package uses, and the check that the installed vLLM has it."""

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
    """One vLLM name that this package wraps, subclasses, registers with or calls.

    Args:
        name: module of this package that uses it.
        target: ``module:qualname`` in vLLM.
        kind: "registry" (vLLM's own extension point), "subclass" (selected by a setting), "wrap"
            (a method called with something added before or after) or "use" (called or read).
        params: parameters of `target` that we pass or override by name.
        remove_when: event after which the entry can be removed.
        on: platform that needs it, "cpu" or "cuda"; both if empty.
    """

    name: str
    target: str
    kind: str
    params: tuple[str, ...]
    remove_when: str
    on: str = ""

    def check(self, version: str) -> None:
        """Raise VllmHookError unless `target` exists and has `params`. Changes nothing.

        If the module exists but cannot be imported, the error names what is missing.
        """
        module, _, qualname = self.target.partition(":")
        fix = f"install a vLLM in {TESTED}, or serve without --kv-compress"
        not_found = f"vLLM {version} has no {self.target}"
        try:
            resolved: Any = importlib.import_module(module)
        except Exception as e:
            # Importing another package's module can raise anything.
            if is_gone(module, e):
                raise VllmHookError(not_found, fix) from e
            raise import_failure(e, version, module) from e
        try:
            for part in qualname.split("."):
                resolved = getattr(resolved, part)
        except AttributeError as e:
            raise VllmHookError(not_found, fix) from e
        parameters = inspect.signature(resolved).parameters if self.params else {}
        if missing := set(self.params) - parameters.keys():
            raise VllmHookError(f"vLLM {version}: {self.target} lost {sorted(missing)}", fix)


def vllm_hooks(
    name: str, kind: str, remove_when: str, *signatures: str, on: str = ""
) -> Iterator[VllmHook]:
    """Return the hooks of one of our modules, each from ``module:qualname(param, param)``."""
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
