"""Turn single changes of the plugin off in a running engine, to measure what they gain.

Two builds in two processes differ by more than 1 %: their memory lies at other addresses, and they
start at other times. A switch lets one process run both.
"""

from importlib import import_module
from typing import Any

SWITCHES: dict[str, tuple[str, str | None, str, Any]] = {
    "packing after sampling": (
        "vllm_kvcompress.engine.worker.worker",
        "CompressingWorker",
        "_packs_after_sampling",
        False,
    ),
    "all layers in one launch": ("vllm_kvcompress.planning.memory", None, "_MIN_SCORED_TOKENS", 0),
    "prompts packed together": (
        "vllm_kvcompress.engine.compression.packer",
        None,
        "_packs_alone",
        lambda job: not job.pack_request.reads_page_tables,
    ),
    "FlashAttention's log-sum-exp": (
        "vllm_kvcompress.engine.compression.compressor",
        "PromptCompressor",
        "keeps_log_sums",
        False,
    ),
}
"""By name: module, class (None for the module), attribute, and its value without the change."""

_replaced: dict[str, Any] = {}


def switch(name: str, *, on: bool) -> bool:
    """Turn a change on or off; return False if this commit has no such attribute."""
    module, owner_name, attribute, off_value = SWITCHES[name]
    owner: Any = import_module(module)
    owner = owner if owner_name is None else getattr(owner, owner_name)
    if attribute not in vars(owner):
        return False
    if on and name in _replaced:
        setattr(owner, attribute, _replaced.pop(name))
    elif not on and name not in _replaced:
        _replaced[name] = vars(owner)[attribute]
        setattr(owner, attribute, off_value)
    return True
