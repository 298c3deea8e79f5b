"""``python -m vllm_kvcompress.engine.doctor``: what `kvcompress doctor` runs as a child process.

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
from typing import Any

from vllm_kvcompress.checks import Check, Failed, Tell, require
from vllm_kvcompress.engine.import_failures import import_failure, installed_vllm
from vllm_kvcompress.errors import KVCompressError, SeamError


def examine(spec: dict[str, Any], tell: Tell) -> dict[str, Any] | None:
    """Make every check that `spec` asks for; the kept map as JSON if it asks for that.

    Args:
        spec: `arguments` of vLLM's command line, with ``--model`` unless nothing is to be started;
            `text` for the prompt, its length in `tokens` (None: long enough, and `at_least` that;
            ``exact``: the text as it is, else cut or repeated, and `question` behind it), and
            `buckets` of the map, or None.
    """
    try:
        _import_vllm()
    except SeamError as e:
        tell(Check(name="versions", ok=False, detail=str(e)))
        return None
    try:
        # not before: it imports vLLM
        from vllm_kvcompress.engine.installation import check_seams, plugin, versions

        for check in (versions, plugin, check_seams):
            require(tell, check())
        if "--model" not in spec["arguments"]:
            return None
        # not before: it imports what the seams are about
        from vllm_kvcompress.engine.trial import try_model

        return try_model(spec, tell)
    except Failed:
        return None


def _import_vllm() -> None:
    """Raise SeamError, with what is missing, where vLLM itself cannot be imported."""
    module = "vllm.engine.arg_utils"
    try:
        importlib.import_module(module)
    except Exception as e:  # anything may go wrong while others are imported
        raise import_failure(module, e, installed_vllm()) from e


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
