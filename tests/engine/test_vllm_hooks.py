"""The table of vLLM hooks, checked on the installed vLLM (docs/traps.md, trap 22)."""

import ast
import importlib
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

import pytest
import vllm
from packaging.requirements import Requirement

import vllm_kvcompress.engine as engine_package
from checkpoints import make
from vllm_kvcompress.engine.doctor.installation import check_vllm_hooks
from vllm_kvcompress.engine.startup import import_failures
from vllm_kvcompress.engine.startup.vllm_hooks import TESTED, VLLM_HOOKS, VllmHook, check_all
from vllm_kvcompress.errors import VllmHookError


@pytest.mark.parametrize("hook", VLLM_HOOKS, ids=lambda hook: f"{hook.name}-{hook.target}")
def test_every_hook_exists_in_this_vllm(hook):
    hook.check(vllm.__version__)


def test_every_hook_names_our_module():
    for hook in VLLM_HOOKS:
        importlib.import_module(f"vllm_kvcompress.engine.{hook.name}")


# `engine/doctor` runs before the hooks are checked, or on an engine that has started
UNLISTED = {
    "vllm:SamplingParams",
    "vllm.plugins:load_general_plugins",
    "vllm.utils.argparse_utils:FlexibleArgumentParser",
    "vllm.v1.engine.llm_engine:LLMEngine",
}


def imported_from_vllm():
    """Return every vLLM name that a file of engine/ imports, as ``module:name``."""
    for file in Path(engine_package.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "vllm":
                yield from (f"{node.module}:{name.name}" for name in node.names)


def test_every_use_of_vllm_is_in_the_table():
    targets = (hook.target.partition(":") for hook in VLLM_HOOKS)
    listed = {f"{module}:{name.split('.')[0]}" for module, _, name in targets}
    touched = set(imported_from_vllm())
    assert len(touched) > 60
    missing = {name for name in touched - listed if not is_module(name)}
    assert missing == UNLISTED


def is_module(name):
    """Return whether a vLLM name is a module, whose functions are listed one by one."""
    module = name.replace(":", ".")
    return any(hook.target.startswith(f"{module}:") for hook in VLLM_HOOKS)


@pytest.mark.parametrize(
    ("target", "params", "message"),
    [
        ("vllm.no_such_module:Thing", (), "has no vllm.no_such_module:Thing"),
        ("vllm.v1.request:NoSuchThing", (), "has no vllm.v1.request:NoSuchThing"),
        ("vllm.v1.request:Request.no_such_method", (), "has no .*Request.no_such_method"),
        (
            "vllm.engine.arg_utils:EngineArgs.from_cli_args",
            ("args", "moved_away"),
            r"EngineArgs.from_cli_args lost \['moved_away'\]",
        ),
    ],
)
def test_trap_22_a_missing_hook_is_named_with_the_fix(target, params, message):
    hook = VllmHook(name="x", target=target, params=params)
    with pytest.raises(VllmHookError, match=message) as refusal:
        hook.check("0.32.0")
    assert "install a vLLM in" in str(refusal.value)
    assert "without --kv-compress" in str(refusal.value)


@pytest.mark.parametrize(
    ("imports", "message"),
    [
        (
            "import no_such_package.part",
            "vLLM 0.33.0 needs the Python package no_such_package, which is not installed;"
            " run `pip check`, and install what it reports",
        ),
        (  # no environment of the tests has it, and vLLM asks for it
            "import torchcodec",
            "vLLM 0.33.0 needs the Python package torchcodec, which is not installed;"
            " run `pip install 'torchcodec>=0.14'`",
        ),
        (
            "import pydantic.no_such_part",
            f"vLLM 0.33.0 imports pydantic.no_such_part, which the installed pydantic"
            f" {version('pydantic')} does not have; run `pip install --force-reinstall --no-deps"
            f" 'pydantic=={version('pydantic')}'`",
        ),
        (
            "import vllm.no_such_part",
            "vLLM 0.33.0 lacks its own module vllm.no_such_part; reinstall vLLM 0.33.0, which is"
            " incomplete",
        ),
        (
            "from json import no_such_name",
            "vLLM 0.33.0 cannot import importing.hook here (ImportError: cannot import name"
            " 'no_such_name' from 'json'",
        ),
        (
            "try: import no_such_package\n"
            "except ImportError as e: raise ImportError('lazy') from e",
            "vLLM 0.33.0 needs the Python package no_such_package, which is not installed",
        ),
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "(RuntimeError: operator torchvision::nms does not exist); run `pip check`",
        ),
    ],
    ids=["missing", "its version", "half there", "not whole", "name", "lazy", "other"],
)
def test_import_errors_name_the_missing_package(imports, message, tmp_path, monkeypatch):
    """If a package that vLLM needs is missing, another vLLM version would not help."""
    (tmp_path / "importing").mkdir()
    (tmp_path / "importing" / "hook.py").write_text(imports + "\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "importing.hook", raising=False)
    monkeypatch.delitem(sys.modules, "importing", raising=False)
    hook = VllmHook(name="x", target="importing.hook:Thing")
    with pytest.raises(VllmHookError) as refusal:
        hook.check("0.33.0")
    assert message in str(refusal.value)
    assert "install a vLLM in" not in str(refusal.value)
    # `kvcompress doctor` reports it once for all hooks in that module
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    assert check_vllm_hooks([hook, hook]).detail == str(refusal.value)


@pytest.mark.parametrize(
    ("requirement", "command"),
    [
        ("pydantic>=2,<999", f"--force-reinstall --no-deps 'pydantic=={version('pydantic')}'"),
        ("pydantic[email]", f"--force-reinstall --no-deps 'pydantic=={version('pydantic')}'"),
        ("pydantic>=999", "'pydantic>=999'"),
        ("pydantic[timezone,email]>=999", "'pydantic[email,timezone]>=999'"),
    ],
)
def test_the_fix_changes_the_installation(requirement, command, monkeypatch):
    """pip does nothing if the version fits, and a dropped extra stays missing."""
    monkeypatch.setattr(import_failures, "requires", lambda build: [requirement])
    error = ModuleNotFoundError(name="pydantic.no_such_part")
    message = str(import_failures.import_failure(error, "0.33.0"))
    assert message.endswith(f"run `pip install {command}`")


def test_check_all_stops_at_the_first_missing_hook(monkeypatch):
    from vllm_kvcompress.engine.startup import vllm_hooks

    lost = VllmHook(name="x", target="vllm:no_such")
    monkeypatch.setattr(vllm_hooks, "VLLM_HOOKS", (*VLLM_HOOKS, lost))
    with pytest.raises(VllmHookError, match="vllm:no_such"):
        check_all(vllm.__version__)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.0+cpu", "0.33.1", "0.32.1rc1"])
def test_supported_versions(version):
    assert TESTED.contains(version, prereleases=True)


def test_the_package_metadata_allows_the_accepted_versions():
    extras = [Requirement(text) for text in requires("vllm-kvcompress")]
    (vllm_of_cuda,) = (one for one in extras if one.name == "vllm")
    assert vllm_of_cuda.specifier == TESTED


REGISTERED_TWICE = """
import vllm_kvcompress
vllm_kvcompress.register(); vllm_kvcompress.register()
from vllm.engine.arg_utils import EngineArgs
wrapped, depth = EngineArgs.create_engine_config, 0
while hasattr(wrapped, "__wrapped__"):
    wrapped, depth = wrapped.__wrapped__, depth + 1
assert depth == 1, depth
ours = {name for name in sys.modules if name.startswith("vllm_kvcompress.engine.")}
loaded = {name.rpartition(".")[2] for name in ours}
built = {"cache_spec", "kv_cache", "scheduler", "worker", "attention", "compressor"}
assert not loaded & built, loaded
import vllm_kvcompress.engine.scheduling.kv_cache as own
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST as known
assert {FullAttentionSpec, MambaSpec, SlidingWindowSpec, own.CompressedSpec} <= set(known)
assert known[own.CompressedSpec].manager_class is own.CompressedManager
"""
WITHOUT_FRONTEND_HOOKS = """
sys.modules["vllm.entrypoints.openai.responses.serving"] = None
import vllm_kvcompress
vllm_kvcompress.register()
from vllm.engine.arg_utils import EngineArgs
from vllm_kvcompress.errors import VllmHookError
options = dict(model=sys.argv[1], skip_tokenizer_init=True, max_model_len=512)
config = EngineArgs(**options).create_engine_config()
assert config.scheduler_config.scheduler_cls is None
try:
    EngineArgs(**options, additional_config={"kvcompress": {"compress": "cake"}})\
        .create_engine_config()
except VllmHookError as e:
    assert "has no vllm.entrypoints.openai.responses.serving" in str(e), e
else:
    raise AssertionError("it starts")
"""
WITHOUT_OFFLOADING = """
connectors = "vllm.distributed.kv_transfer.kv_connector.v1."
for name in ("offloading_connector", "simple_cpu_offload_connector", "offloading"):
    sys.modules[connectors + name] = None
import vllm_kvcompress
vllm_kvcompress.register()
import vllm_kvcompress.engine.scheduling.scheduler, vllm_kvcompress.engine.worker.cpu
"""
# Runs each script in a fork of a process that has imported vLLM, without our plugin.
FORKED = """
import os, sys
import vllm.v1.engine.async_llm, vllm.v1.engine.core, vllm.v1.worker.cpu_worker
assert not any(name.startswith("vllm_kvcompress") for name in sys.modules)
for script in sys.argv[2:]:
    if not os.fork():
        exec(script)
        sys.exit()
    assert os.wait()[1] == 0, script
"""


def test_the_plugin_in_processes_that_have_not_loaded_it(tmp_path):
    """It registers twice, without vLLM's frontend hooks, and without its offloading connectors."""
    scripts = (REGISTERED_TWICE, WITHOUT_FRONTEND_HOOKS, WITHOUT_OFFLOADING)
    command = [sys.executable, "-c", FORKED, make("llama-gqa", tmp_path), *scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
