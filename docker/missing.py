"""Print the pins of a lock that this Python's environment lacks, with their hashes.

    python missing.py LOCK

What is there stays as it is, in whatever version: `verify.py` says where that does not fit.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def missing(text: str) -> str:
    """Those pins of a lock, as they stand there."""
    pins = re.findall(r"^[\w.-]+==(?:.*\\\n)*.*\n", text, re.MULTILINE)
    return "".join(pin for pin in pins if not _there(pin.partition("==")[0]))


def _there(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit(f"missing.py needs one lock; got {arguments}")
    sys.stdout.write(missing(Path(arguments[0]).read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
