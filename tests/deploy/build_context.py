"""What .dockerignore lets through to a build."""

import shutil
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def copy_context(target: Path) -> Path:
    """Copy the build context to `target`, a folder that is there."""
    lines = (_ROOT / ".dockerignore").read_text().splitlines()
    dropped = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (_ROOT / name).is_dir():
            ignored = shutil.ignore_patterns(*dropped)
            shutil.copytree(_ROOT / name, target / name, ignore=ignored)
        else:
            shutil.copy(_ROOT / name, target / name)
    return target
