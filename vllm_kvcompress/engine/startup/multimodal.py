"""Why models that take images, on which images were tested, are not served in some other way."""

from vllm.config import VllmConfig

from vllm_kvcompress.settings.config import CompressionConfig


def why_not_processed(config: VllmConfig, settings: CompressionConfig) -> str | None:
    """Say why images cannot be compressed where this configuration brings or prunes them.

    Returns:
        None when they are processed as in our tests, or when a request with one is refused anyway.
    """
    # Imported here: it is of the process that takes requests.
    from vllm_kvcompress.engine.frontend.modalities import TESTED

    model = config.model_config
    if model.architecture not in TESTED or model.multimodal_config is None:
        return None
    if getattr(config, "ec_transfer_config", None) is not None:
        return (
            "images that another server encodes are not tested; remove --ec-transfer-config, or"
            " serve this model without --kv-compress"
        )
    if model.multimodal_config.enable_mm_embeds:
        return (
            "images that come as embeddings are not tested; remove --enable-mm-embeds, or serve"
            " this model without --kv-compress"
        )
    if pruned := model.multimodal_config.video_pruning_rate:
        return (
            "where a model prunes the tokens of videos, images take another way through it, which"
            f" is not tested; remove --video-pruning-rate, got {pruned}"
        )
    return None
