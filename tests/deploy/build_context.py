"""The build context: the files that .dockerignore does not exclude."""

import shutil
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def copy_context(target: Path) -> Path:
    """Copy the build context to the existing folder `target`, and return it."""
    lines = (_ROOT / ".dockerignore").read_text().splitlines()
    excluded = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (_ROOT / name).is_dir():
            ignored = shutil.ignore_patterns(*excluded)
            shutil.copytree(_ROOT / name, target / name, ignore=ignored)
        else:
            shutil.copy(_ROOT / name, target / name)
    return target
