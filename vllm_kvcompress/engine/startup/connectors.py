"""KV connectors: the one that compression works with, and why all others are refused.

A decode server pulls the keys and values of a prompt that another server has computed. They are
whole when they come, in ordinary blocks, and are packed once the answer's first tokens judge them.
"""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig

from vllm_kvcompress.engine.layers import groups_of
from vllm_kvcompress.settings.config import CompressionConfig

# both are names of vLLM's for one class
PULLING = ("NixlConnector", "NixlPullConnector")
_CONSUMER = "kv_consumer"
_FLAG = "--kv-transfer-config"


def _other(config: VllmConfig, settings: CompressionConfig) -> str | None:
    transfer = config.kv_transfer_config
    name = transfer.kv_connector
    cure = f"set kv_connector to {PULLING[0]!r} in {_FLAG}"
    if transfer.kv_connector_module_path:
        return (
            f"connectors of other packages are not tested; {cure} and remove"
            f" kv_connector_module_path, got {transfer.kv_connector_module_path!r}"
        )
    if name in PULLING:
        return None
    if name == "NixlPushConnector":
        return (
            "what a prefill server pushes is placed while a prompt waits, which is not tested;"
            f" {cure} on both servers, got {name!r}"
        )
    return (
        "a connector that saves or offloads blocks finds them by the place or the hash of their"
        f" tokens, and a compressed block does not hold those; remove {_FLAG} (or"
        f" --kv-offloading-size), or {cure}, got {name!r}"
    )


def _role(config: VllmConfig, settings: CompressionConfig) -> str | None:
    role = config.kv_transfer_config.kv_role
    if role == _CONSUMER:
        return None
    return (
        "a server that hands prompts on sends their blocks by position, and a compressed prompt"
        f" has given them back: compress on the decode server alone; set kv_role {_CONSUMER!r} in"
        f" {_FLAG}, or serve without --kv-compress, got {role!r}"
    )


def _options(config: VllmConfig, settings: CompressionConfig) -> str | None:
    transfer = config.kv_transfer_config
    if transfer.get_from_extra_config("bidirectional_kv_xfer", False):
        return (
            "a prefill server that reads blocks back would read those of compressed prompts;"
            f" remove bidirectional_kv_xfer from kv_connector_extra_config in {_FLAG}"
        )
    if transfer.enable_permute_local_kv:
        return (
            "blocks that are permuted once they were pulled are not tested; remove"
            f" enable_permute_local_kv from {_FLAG}"
        )
    device = config.device_config.device_type
    if transfer.kv_buffer_device not in (None, device):
        return (
            "blocks that are copied through a buffer on another device are not tested; set"
            f" kv_buffer_device {device!r} in {_FLAG}, got {transfer.kv_buffer_device!r}"
        )
    return None


def _lookahead(config: VllmConfig, settings: CompressionConfig) -> str | None:
    at_once = [each.compress for each in settings.variants if not each.resolved_lookahead]
    if not at_once:
        return None
    return (
        "a decode server computes only the last tokens of a prompt, so no window of it can judge"
        " it when it comes; its answer can: pass --kv-lookahead with 1 or more tokens, and leave"
        f" methods that have none out of --kv-allow-override and --kv-alias, got {at_once} with"
        " a look-ahead of 0"
    )


def _pieces(config: VllmConfig, settings: CompressionConfig) -> str | None:
    if settings.max_whole is None:
        return None
    return (
        "a prompt that is pulled comes whole, and --kv-max-whole lets none stand whole that is"
        f" longer; remove --kv-max-whole, got {settings.max_whole}"
    )


def _untested(config: VllmConfig, settings: CompressionConfig) -> str | None:
    parallel = config.parallel_config
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            flag = "--" + name.replace("_", "-")
            return f"prompts that several ranks pull are not tested; set {flag} 1, got {size}"
    if groups_of(config).others or config.model_config.is_hybrid:
        return (
            "prompts of models with other layers than full attention are not tested behind a"
            f" connector; remove {_FLAG}, or serve this model without --kv-compress"
        )
    if config.model_config.is_multimodal_model:
        return (
            "models that take images are not tested behind a connector; remove"
            f" {_FLAG}, or serve this model without --kv-compress"
        )
    if config.speculative_config is not None:
        return "drafts behind a prompt that is pulled are not tested; remove --speculative-config"
    return None


REFUSALS: tuple[Callable[[Any, CompressionConfig], str | None], ...] = (
    _other,
    _role,
    _options,
    _lookahead,
    _pieces,
    _untested,
)


def why_not_connected(config: VllmConfig, settings: CompressionConfig) -> str | None:
    """Say why compression cannot work with this configuration's KV connector.

    Returns:
        None when it can, or when there is none.
    """
    if config.kv_transfer_config is None:
        return None
    reasons = (refusal(config, settings) for refusal in REFUSALS)
    return next((reason for reason in reasons if reason is not None), None)
