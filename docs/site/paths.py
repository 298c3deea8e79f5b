"""mkdocs hook: serve every file of the repository under its own path.

The same links then work in a checkout, on a code host and on the site. Source files are included,
so mkdocs also checks links to them.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

BUILD_FOLDERS = {"__pycache__", "build", "dist", "node_modules"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Return the repository's files instead of those in docs_dir, and the theme's files."""
    root = Path(config.config_file_path).parent
    theme_files = [file for file in files if file.src_dir != config.docs_dir]
    repository_files = [
        File(path.as_posix(), str(root), config.site_dir, config.use_directory_urls)
        for path in sorted(_repository_paths(root))
    ]
    return Files([*repository_files, *theme_files])


def _repository_paths(root: Path) -> Iterator[Path]:
    """Yield tracked paths relative to `root`; without git, all paths that are not generated."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        yield from (Path(name) for name in listed.stdout.splitlines() if (root / name).is_file())
        return
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _is_generated(name)]
        for name in names:
            if not _is_generated(name):
                yield (Path(folder) / name).relative_to(root)


def _is_generated(name: str) -> bool:
    """Return True for files and folders that tools generate, and for hidden ones."""
    return name.startswith(".") or name in BUILD_FOLDERS or name.endswith((".egg-info", ".pyc"))
