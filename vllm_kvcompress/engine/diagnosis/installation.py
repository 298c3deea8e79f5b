"""What is installed here: versions, the plugin in vLLM's eyes, and the hooks."""

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
from vllm_kvcompress.engine.startup.vllm_hook import TESTED, VllmHook
from vllm_kvcompress.engine.startup.vllm_hooks import VLLM_HOOKS
from vllm_kvcompress.errors import VllmHookError


def versions() -> Check:
    """What is installed, and whether this vLLM is one that is accepted."""
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
    """Whether vLLM itself finds and loads the plugin."""
    try:
        load_general_plugins()
    except Exception as e:
        return Check(name="plugin", ok=False, detail=f"it was found and failed: {sentence(e)}")
    if "--kv-compress" in parser().format_help():
        return Check(name="plugin", ok=True, detail="loaded by vLLM through its entry point")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None:
        why = f"VLLM_PLUGINS={allowed!r} leaves it out; add kvcompress to it"
    else:
        why = "its entry point is not installed; run pip install on it in this environment"
    return Check(name="plugin", ok=False, detail=f"vLLM does not load it: {why}")


def check_vllm_hooks(hooks: Sequence[VllmHook] = VLLM_HOOKS) -> Check:
    """Whether this vLLM has every place that compression needs on this platform, and what to do."""
    here = "cuda" if current_platform.is_cuda() else "cpu"
    needed = [hook for hook in hooks if hook.on in ("", here)]
    errors = []
    for hook in needed:
        try:
            hook.check(vllm.__version__)
        except VllmHookError as e:
            errors.append(e)
    if errors:
        # one missing package is behind many hooks
        sentences = dict.fromkeys([*(e.problem for e in errors), *(e.cure for e in errors)])
        return Check(name="hooks", ok=False, detail="; ".join(sentences))
    return Check(name="hooks", ok=True, detail=f"all {len(needed)} for {here} are there")


def parser() -> FlexibleArgumentParser:
    """vLLM's own parser of its engine flags, with whatever plugins added."""
    engine_parser = FlexibleArgumentParser(prog="kvcompress doctor")
    EngineArgs.add_cli_args(engine_parser)
    return engine_parser


def sentence(error: BaseException) -> str:
    """The first lines of an error's text, as one."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:400] + " ..."
