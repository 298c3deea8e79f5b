"""Print the pins of a lock that this Python's environment lacks, with their hashes.

    python missing.py LOCK

Installed packages keep their versions; `verify.py` reports versions that do not fit.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def missing(text: str) -> str:
    """Return the lines of a lock for packages that are not installed."""
    pins = re.findall(r"^[\w.-]+==(?:.*\\\n)*.*\n", text, re.MULTILINE)
    return "".join(pin for pin in pins if not _is_installed(pin.partition("==")[0]))


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit(f"usage: missing.py LOCK, got {arguments}")
    sys.stdout.write(missing(Path(arguments[0]).read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
