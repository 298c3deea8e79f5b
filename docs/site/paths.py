"""A hook of mkdocs: the site has the repository's own paths.

A link then means the same in a checkout, on a code host and on the site. Files of code come along,
so that mkdocs also checks the links to them.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

MADE = {"__pycache__", "build", "dist", "node_modules"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Every file of the repository in place of those of docs_dir; the theme's stay."""
    root = Path(config.config_file_path).parent
    theirs = [file for file in files if file.src_dir != config.docs_dir]
    ours = [
        File(path.as_posix(), str(root), config.site_dir, config.use_directory_urls)
        for path in sorted(_below(root))
    ]
    return Files([*ours, *theirs])


def _below(root: Path) -> Iterator[Path]:
    """What git tracks; where there is no git, what lies there."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        yield from (Path(name) for name in listed.stdout.splitlines() if (root / name).is_file())
        return
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _made(name)]
        for name in names:
            if not _made(name):
                yield (Path(folder) / name).relative_to(root)


def _made(name: str) -> bool:
    """Whether a tool made it, or it is of no use to who reads."""
    return name.startswith(".") or name in MADE or name.endswith((".egg-info", ".pyc"))
