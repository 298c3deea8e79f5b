"""Check the package structure where import-linter and ruff cannot."""

import ast
import re
import tomllib
from pathlib import Path
from pkgutil import iter_modules

import pytest

import vllm_kvcompress

ROOT = Path(__file__).parents[1]


def test_only_the_engine_package_may_import_vllm():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in contracts["contracts"] if c.get("forbidden_modules") == ["vllm"])
    names = [module.name for module in iter_modules(vllm_kvcompress.__path__)]
    modules = {f"vllm_kvcompress.{name}" for name in names}
    assert {*contract["source_modules"]} == modules - {"vllm_kvcompress.engine"} | {
        "kvcompress_kernels"
    }


def parameters(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names that the docstring of a function or class may list under Args."""
    if isinstance(node, ast.ClassDef):
        fields = {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        inits = [item for item in node.body if getattr(item, "name", None) == "__init__"]
        return fields.union(*map(parameters, inits))
    given = node.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {argument.arg for argument in named if argument}


@pytest.mark.parametrize("folder", ["vllm_kvcompress", "kernels", "benchmarks", "tests"])
def test_docstrings_list_only_existing_arguments(folder):
    documented = 0
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            section = (ast.get_docstring(node) or "").partition("\nArgs:\n")[2]
            section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
            entries = re.findall(r"^ {4}([\w*][\w*, ]*)(?: \([^)]*\))?:", section, re.MULTILINE)
            names = {name.strip(" *") for entry in entries for name in entry.split(",")}
            assert names <= parameters(node), f"{path}: {node.name}"
            documented += len(names)
    assert documented
