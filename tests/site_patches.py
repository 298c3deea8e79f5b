"""Build ``sitecustomize.py`` files that patch or hide modules in every process of a command."""

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

# The module is not imported yet, so an import hook runs the patch after the module's own code.
_ON_IMPORT = """
import importlib.abc, importlib.util, sys
assert {module!r} not in sys.modules, "imported before the patch"
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


def patch_on_import(module: str, breaking: str) -> str:
    """Return site code that runs the statement `breaking` right after `module` is imported."""
    return _ON_IMPORT.format(module=module, breaking=breaking)


def without_packages(*packages: str) -> str:
    """Return site code that makes these packages appear not to be installed."""
    return _WITHOUT.format(packages=packages)


WITHOUT_VLLM = without_packages("vllm", "transformers")


def write_site(folder: Path, site: str) -> None:
    """Write `site` as ``sitecustomize.py``, after the code that every test process runs.

    A process runs it if `folder` comes first in its PYTHONPATH.
    """
    (folder / NAME).write_text(_EVERY_PROCESS.read_text() + site)
