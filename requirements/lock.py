"""Write the hashes of every pinned file into the locks: `make locks`.

    python requirements/lock.py UV LOCK...

A lock's versions stay as they are: change a pin in the lock, then run this. The hashes are those
that PyPI lists for that version, of every platform. torch's CPU build is not on PyPI: its hashes
are kept as long as its version is. Write a new version's by hand: `pip hash` of PyTorch's wheels.
"""

import re
import subprocess
import sys
from pathlib import Path

_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)", re.MULTILINE)
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


def pins(text: str) -> dict[str, tuple[str, list[str]]]:
    """Name, as an index has it, to version and hashes."""
    found: dict[str, tuple[str, list[str]]] = {}
    starts = list(_PIN.finditer(text))
    for start, end in zip(starts, [*[s.start() for s in starts[1:]], len(text)], strict=True):
        name = re.sub(r"[-_.]+", "-", start[1]).lower()
        found[name] = (start[2], _HASH.findall(text[start.end() : end]))
    return found


def locked(uv: str, text: str) -> str:
    """`text` with its pins as they are, their names as an index has them, and hashes of today.

    Raises:
        SystemExit: uv failed, or a pin has no hash.
    """
    before = pins(text)
    options = ["--no-deps", "--no-annotate", "--no-header", "--generate-hashes", "--quiet"]
    # PyPI has no local versions: their hashes are in the lock already
    asked = [f"{name}=={version}" for name, (version, _) in before.items() if "+" not in version]
    done = subprocess.run(
        [uv, "pip", "compile", *options, "--python-version", "3.11", "-"],
        input="\n".join(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"lock.py: uv could not lock: {done.stderr.strip()}")
    after = {**before, **pins(done.stdout)}
    lines = [line for line in text.splitlines() if line.startswith("#")]
    for name, (version, hashes) in sorted(after.items()):
        if not hashes:
            raise SystemExit(
                f"lock.py: {name}=={version} must have a hash, and PyPI lists none;"
                " write its --hash lines by hand, from `pip hash FILE`"
            )
        lines.append(" \\\n    ".join([f"{name}=={version}", *(f"--hash={h}" for h in hashes)]))
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if len(arguments) < 2:
        raise SystemExit(f"lock.py needs the command uv and the locks to write; got {arguments}")
    uv, *paths = arguments
    for path in map(Path, paths):
        path.write_text(locked(uv, path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
