"""Refusals for KV connectors: compression works only on a decode server that pulls prompts.

A decode server pulls the keys and values of a prompt that a prefill server has computed. They
arrive uncompressed in ordinary blocks, and are compressed after the look-ahead.
"""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig

from vllm_kvcompress.engine.layers import groups_of
from vllm_kvcompress.settings.config import CompressionConfig

# Two names in vLLM for the same class.
PULLING = ("NixlConnector", "NixlPullConnector")
_CONSUMER = "kv_consumer"
_FLAG = "--kv-transfer-config"


def _connector(config: VllmConfig, settings: CompressionConfig) -> str | None:
    transfer = config.kv_transfer_config
    name = transfer.kv_connector
    fix = f"set kv_connector to {PULLING[0]!r} in {_FLAG}"
    if transfer.kv_connector_module_path:
        return (
            f"connectors of other packages are not tested; {fix} and remove"
            f" kv_connector_module_path, got {transfer.kv_connector_module_path!r}"
        )
    if name in PULLING:
        return None
    if name == "NixlPushConnector":
        return (
            "a connector that pushes blocks into waiting prompts is not tested;"
            f" {fix} on both servers, got {name!r}"
        )
    return (
        "a connector that saves or offloads blocks finds tokens by their position or hash, which"
        f" compressed blocks do not have; remove {_FLAG} (or --kv-offloading-size), or {fix}, got"
        f" {name!r}"
    )


def _role(config: VllmConfig, settings: CompressionConfig) -> str | None:
    role = config.kv_transfer_config.kv_role
    if role == _CONSUMER:
        return None
    return (
        "a prefill server sends the blocks of a prompt by position, and compression frees those"
        f" blocks, so only the decode server can compress; set kv_role {_CONSUMER!r} in"
        f" {_FLAG}, or serve without --kv-compress, got {role!r}"
    )


def _options(config: VllmConfig, settings: CompressionConfig) -> str | None:
    transfer = config.kv_transfer_config
    if transfer.get_from_extra_config("bidirectional_kv_xfer", False):
        return (
            "with bidirectional_kv_xfer the prefill server would read the blocks of compressed"
            f" prompts; remove bidirectional_kv_xfer from kv_connector_extra_config in {_FLAG}"
        )
    if transfer.enable_permute_local_kv:
        return (
            "blocks that the connector permutes after pulling are not tested; remove"
            f" enable_permute_local_kv from {_FLAG}"
        )
    device = config.device_config.device_type
    if transfer.kv_buffer_device not in (None, device):
        return (
            "a transfer buffer on another device is not tested; set"
            f" kv_buffer_device {device!r} in {_FLAG}, got {transfer.kv_buffer_device!r}"
        )
    return None


def _lookahead(config: VllmConfig, settings: CompressionConfig) -> str | None:
    methods = [each.compress for each in settings.variants if not each.resolved_lookahead]
    if not methods:
        return None
    return (
        "a decode server computes only the last tokens of a prompt, so it has no observation window"
        " and must score with output tokens: pass --kv-lookahead with 1 or more tokens, and leave"
        f" methods that have none out of --kv-allow-override and --kv-alias, got {methods} with"
        " a look-ahead of 0"
    )


def _pieces(config: VllmConfig, settings: CompressionConfig) -> str | None:
    if settings.pieces.max_whole is None:
        return None
    return (
        "a pulled prompt arrives at once, so it cannot be compressed piece by piece; remove"
        f" --kv-max-whole, got {settings.pieces.max_whole}"
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
    if groups_of(config).num_uncompressed or config.model_config.is_hybrid:
        return (
            "models with other layers than full attention are not tested with a KV connector;"
            f" remove {_FLAG}, or serve this model without --kv-compress"
        )
    if config.model_config.is_multimodal_model:
        return (
            "models that take images are not tested with a KV connector; remove"
            f" {_FLAG}, or serve this model without --kv-compress"
        )
    if config.speculative_config is not None:
        return "drafts are not tested with a KV connector; remove --speculative-config"
    return None


REFUSALS: tuple[Callable[[Any, CompressionConfig], str | None], ...] = (
    _connector,
    _role,
    _options,
    _lookahead,
    _pieces,
    _untested,
)


def connector_refusal(config: VllmConfig, settings: CompressionConfig) -> str | None:
    """Return why compression cannot work with this configuration's KV connector.

    None if it can, or if there is no connector.
    """
    if config.kv_transfer_config is None:
        return None
    reasons = (refusal(config, settings) for refusal in REFUSALS)
    return next((reason for reason in reasons if reason is not None), None)
