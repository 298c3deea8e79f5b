"""Check the package structure where import-linter and ruff cannot."""

import tomllib
from pathlib import Path
from pkgutil import iter_modules

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
