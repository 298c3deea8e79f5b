"""Checks of the installation: versions, whether vLLM loads the plugin, and the hooks."""

import importlib.metadata
import os
import platform
from collections.abc import Sequence

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_kvcompress.doctor.checks import Check
from vllm_kvcompress.engine.startup.vllm_hooks import TESTED, VLLM_HOOKS, VllmHook
from vllm_kvcompress.errors import ConfigError, VllmHookError
from vllm_kvcompress.methods.entry_points import package_summary
from vllm_kvcompress.methods.registry import load_added_methods


def versions() -> Check:
    """Return a check that lists installed versions and tests whether this vLLM is supported."""
    installed = [
        f"vllm-kvcompress {_version('vllm-kvcompress')}",
        f"vLLM {vllm.__version__}",
        f"torch {torch.__version__}",
        f"Triton {_version('triton')}",
        f"Python {platform.python_version()}",
    ]
    ok = TESTED.contains(vllm.__version__, prereleases=True)
    detail = ", ".join(installed)
    if not ok:
        detail += f": this vLLM is untested with --kv-compress; install a vLLM in {TESTED}"
    return Check(name="versions", ok=ok, detail=detail)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def plugin() -> Check:
    """Return a check that vLLM finds and loads the plugin."""
    try:
        load_general_plugins()
    except Exception as e:
        return Check(name="plugin", ok=False, detail=f"vLLM found it, but it failed: {sentence(e)}")
    if "--kv-compress" in parser().format_help():
        return Check(name="plugin", ok=True, detail="loaded by vLLM through its entry point")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None:
        reason = f"VLLM_PLUGINS={allowed!r} does not list it; add kvcompress"
    else:
        reason = "its entry point is not installed; install the package in this environment"
    return Check(name="plugin", ok=False, detail=f"vLLM does not load it: {reason}")


def added_methods() -> Check | None:
    """Return a check of the methods that other packages add; None if there are none."""
    if not (packages := package_summary()):
        return None
    try:
        load_added_methods()
    except ConfigError as e:
        return Check(name="methods", ok=False, detail=str(e))
    return Check(name="methods", ok=True, detail=packages)


def check_vllm_hooks(hooks: Sequence[VllmHook] = VLLM_HOOKS) -> Check:
    """Return a check that this vLLM has every hook that compression needs on this platform."""
    platform_name = "cuda" if current_platform.is_cuda() else "cpu"
    needed = [hook for hook in hooks if hook.on in ("", platform_name)]
    errors = []
    for hook in needed:
        try:
            hook.check(vllm.__version__)
        except VllmHookError as e:
            errors.append(e)
    if errors:
        # One missing package may break many hooks, so drop repeated sentences.
        sentences = dict.fromkeys([*(e.problem for e in errors), *(e.fix for e in errors)])
        return Check(name="hooks", ok=False, detail="; ".join(sentences))
    return Check(name="hooks", ok=True, detail=f"all {len(needed)} for {platform_name} found")


def parser() -> FlexibleArgumentParser:
    """Return vLLM's parser of its engine flags, including flags that plugins add."""
    engine_parser = FlexibleArgumentParser(prog="kvcompress doctor")
    EngineArgs.add_cli_args(engine_parser)
    return engine_parser


def sentence(error: BaseException) -> str:
    """Return an error's text on one line, cut to 400 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:400] + " ..."
