"""Update the hashes of all pinned packages in the locks: `make locks`.

    python requirements/lock.py UV LOCK...

Versions do not change: edit a pin in the lock, then run this. It writes the hashes that PyPI lists
for the version on all platforms. torch's CPU build is not on PyPI: its hashes stay as long as its
version stays. For a new version, add the output of `pip hash` for PyTorch's wheels by hand.
"""

import re
import subprocess
import sys
from pathlib import Path

_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==(\S+)", re.MULTILINE)
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


def pins(text: str) -> dict[str, tuple[str, list[str]]]:
    """Return version and hashes by normalised package name."""
    found: dict[str, tuple[str, list[str]]] = {}
    starts = list(_PIN.finditer(text))
    for start, end in zip(starts, [*[s.start() for s in starts[1:]], len(text)], strict=True):
        name = re.sub(r"[-_.]+", "-", start[1]).lower()
        found[name] = (start[2], _HASH.findall(text[start.end() : end]))
    return found


def locked(uv: str, text: str) -> str:
    """Return a lock with the same pins, normalised names and current hashes.

    Raises:
        SystemExit: uv failed, or a package has no hash.
    """
    before = pins(text)
    options = ["--no-deps", "--no-annotate", "--no-header", "--generate-hashes", "--quiet"]
    # PyPI has no local versions such as 2.11.0+cpu. Their hashes are in the lock already.
    requirements = [
        f"{name}=={version}" for name, (version, _) in before.items() if "+" not in version
    ]
    done = subprocess.run(
        [uv, "pip", "compile", *options, "--python-version", "3.11", "-"],
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"lock.py: uv failed: {done.stderr.strip()}")
    after = {**before, **pins(done.stdout)}
    lines = [line for line in text.splitlines() if line.startswith("#")]
    for name, (version, hashes) in sorted(after.items()):
        if not hashes:
            raise SystemExit(
                f"lock.py: {name}=={version} has no hash on PyPI: add its --hash lines by hand,"
                " with `pip hash FILE`"
            )
        lines.append(" \\\n    ".join([f"{name}=={version}", *(f"--hash={h}" for h in hashes)]))
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if len(arguments) < 2:
        raise SystemExit(f"usage: lock.py UV LOCK..., got {arguments}")
    uv, *paths = arguments
    for path in map(Path, paths):
        path.write_text(locked(uv, path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
