"""What `kvcompress doctor` runs as a child process, by ``python -m``.

It reads one JSON object on stdin and writes one JSON object a line to the file descriptor named on
its command line: ``{"check": {...}}`` as each check is made, and ``{"kept": {...}}`` at the end if
asked for. The first check that fails is the last, until the prompt was run: then all are told. A
wrong flag ends it with status 2 and a sentence on stderr.
"""

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from vllm_kvcompress.doctor.checks import Check, Failed, Tell, require
from vllm_kvcompress.engine.startup.import_failures import import_failure, installed_vllm
from vllm_kvcompress.errors import KVCompressError, VllmHookError


def examine(spec: dict[str, Any], tell: Tell) -> dict[str, Any] | None:
    """Make every check that `spec` asks for; the kept map as JSON if it asks for that.

    Args:
        spec: `arguments` of vLLM's command line, with ``--model`` unless nothing is to be started;
            `text` for the prompt, its length in `tokens` (None: long enough, and `at_least` that;
            ``exact``: the text as it is, else cut or repeated, and `question` behind it), or in its
            place a `chat`, with `messages` and perhaps `tools`; and `buckets` of the map, or None.
    """
    try:
        require(tell, _checked("versions", _versions))
        # Not before this: it imports vLLM.
        from vllm_kvcompress.engine.diagnosis.installation import check_vllm_hooks, plugin

        require(tell, _checked("plugin", plugin))
        require(tell, _checked("hooks", check_vllm_hooks))
        if "--model" not in spec["arguments"]:
            return None
        # Not before this: it imports what the hooks are about.
        from vllm_kvcompress.engine.diagnosis.trial import try_model

        return try_model(spec, tell)
    except Failed:
        return None


def _versions() -> Check:
    module = "vllm.engine.arg_utils"
    try:
        importlib.import_module(module)
    except Exception as e:
        # Anything may go wrong while others' modules are imported.
        raise import_failure(e, installed_vllm(), module) from e
    from vllm_kvcompress.engine.diagnosis.installation import versions

    return versions()


def _checked(name: str, check: Callable[[], Check]) -> Check:
    """A check's result; not ok where it could not be made for what vLLM could not import."""
    try:
        return check()
    except VllmHookError as e:
        return Check(name=name, ok=False, detail=str(e))
    except ImportError as e:
        # vLLM imports much of itself only when it is asked for its flags.
        return Check(name=name, ok=False, detail=str(import_failure(e, installed_vllm())))


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w") as out:

        def tell(check: Check) -> None:
            out.write(json.dumps({"check": dataclasses.asdict(check)}) + "\n")
            out.flush()

        try:
            kept = examine(json.load(sys.stdin), tell)
        except KVCompressError as e:
            sys.stderr.write(f"kvcompress doctor: error: {e}\n")
            raise SystemExit(2) from None
        if kept is not None:
            out.write(json.dumps({"kept": kept}) + "\n")


if __name__ == "__main__":
    main()
