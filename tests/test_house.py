"""The tree explains the design: what import-linter and ruff cannot hold of it."""

import tomllib
from pathlib import Path
from pkgutil import iter_modules

import vllm_kvcompress

ROOT = Path(__file__).parents[1]


def test_every_module_but_the_engine_is_kept_from_vllm():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (kept,) = (c for c in contracts["contracts"] if c.get("forbidden_modules") == ["vllm"])
    modules = {f"vllm_kvcompress.{found.name}" for found in iter_modules(vllm_kvcompress.__path__)}
    assert {*kept["source_modules"]} == modules - {"vllm_kvcompress.engine"} | {
        "kvcompress_kernels"
    }
