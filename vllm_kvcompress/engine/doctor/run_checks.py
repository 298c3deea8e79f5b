"""The child process of `kvcompress doctor`, started with ``python -m``.

It reads one JSON object from stdin and writes one JSON object per line to the file descriptor given
on its command line: ``{"check": {...}}`` for each check, then ``{"kept": {...}}`` if requested. It
stops at the first failed check, except that all checks after the prompt has run are reported. A
wrong flag ends it with status 2 and a message on stderr.
"""

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from vllm_kvcompress.doctor.checks import Check, CheckCallback, Failed, require
from vllm_kvcompress.engine.startup.import_failures import import_failure, installed_vllm
from vllm_kvcompress.errors import KVCompressError, VllmHookError


def examine(spec: dict[str, Any], on_check: CheckCallback) -> dict[str, Any] | None:
    """Run the checks that `spec` requests and return the kept map as JSON, if requested.

    Args:
        spec: a JSON object with these keys:

            * ``arguments``: vLLM's command-line flags; an engine is started only if they include
              ``--model``.
            * ``text``: text of the prompt.
            * ``tokens``: length of the prompt, or None for the shortest that is compressed.
            * ``at_least``: lower bound on that length.
            * ``exact``: whether to use the text as it is, instead of cutting or repeating it.
            * ``question``: appended to the text unless ``exact``.
            * ``chat``: an object with ``messages`` and optionally ``tools`` that replaces the text,
              or None.
            * ``buckets``: number of position ranges in the kept map, or None for no map.
        on_check: called with each check as soon as it is made.
    """
    try:
        require(on_check, _checked("versions", _versions))
        # Imported late because it imports vLLM, which the check above covers.
        from vllm_kvcompress.engine.doctor.installation import (
            added_methods,
            check_vllm_hooks,
            plugin,
        )

        require(on_check, _checked("plugin", plugin))
        if (check := added_methods()) is not None:
            require(on_check, check)
        require(on_check, _checked("hooks", check_vllm_hooks))
        if "--model" not in spec["arguments"]:
            return None
        # Imported late because it imports the vLLM classes that the hooks check.
        from vllm_kvcompress.engine.doctor.trial_engine import try_model

        return try_model(spec, on_check)
    except Failed:
        return None


def _versions() -> Check:
    module = "vllm.engine.arg_utils"
    try:
        importlib.import_module(module)
    except Exception as e:
        # Importing third-party modules may raise anything.
        raise import_failure(e, installed_vllm(), module) from e
    from vllm_kvcompress.engine.doctor.installation import versions

    return versions()


def _checked(name: str, check: Callable[[], Check]) -> Check:
    """Return the check's result, or a failed check if vLLM lacks something that it imports."""
    try:
        return check()
    except VllmHookError as e:
        return Check(name=name, ok=False, detail=str(e))
    except ImportError as e:
        # vLLM imports many of its modules lazily, when its flags are listed.
        return Check(name=name, ok=False, detail=str(import_failure(e, installed_vllm())))


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w") as out:

        def on_check(check: Check) -> None:
            out.write(json.dumps({"check": dataclasses.asdict(check)}) + "\n")
            out.flush()

        try:
            kept = examine(json.load(sys.stdin), on_check)
        except KVCompressError as e:
            sys.stderr.write(f"kvcompress doctor: error: {e}\n")
            raise SystemExit(2) from None
        if kept is not None:
            out.write(json.dumps({"kept": kept}) + "\n")


if __name__ == "__main__":
    main()
