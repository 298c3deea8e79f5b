"""Python that runs before anything else in every process of a command, and breaks what it finds."""

from pathlib import Path

NAME = "sitecustomize.py"
_EVERY_PROCESS = Path(__file__).parent / "every_process" / NAME

_WITHOUT = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def finding(name, *args, **kwargs):
    gone = name.split(".")[0] in {packages!r}
    return None if gone else find(name, *args, **kwargs)
PathFinder.find_spec = staticmethod(finding)
"""

# The module is not there yet: this waits until it was executed.
_ON_IMPORT = """
import importlib.abc, importlib.util, sys
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def executing(module):
            execute(module)
            {breaking}
        spec.loader.exec_module = executing
        return spec
sys.meta_path.insert(0, Broken())
"""


def broken(module: str, breaking: str) -> str:
    """A site in which one statement about `module` was executed once it was imported."""
    return _ON_IMPORT.format(module=module, breaking=breaking)


def without(*packages: str) -> str:
    """A site in which these packages are not installed."""
    return _WITHOUT.format(packages=packages)


WITHOUT_VLLM = without("vllm", "transformers")


def write_site(folder: Path, site: str) -> None:
    """Processes that have the folder first in PYTHONPATH run `site`, after every process's own."""
    (folder / NAME).write_text(_EVERY_PROCESS.read_text() + site)
