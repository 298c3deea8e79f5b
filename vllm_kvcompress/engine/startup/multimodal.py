"""Refusals for multimodal models that were tested with images only in some configurations."""

from vllm.config import VllmConfig

from vllm_kvcompress.settings.config import CompressionConfig


def multimodal_refusal(config: VllmConfig, settings: CompressionConfig) -> str | None:
    """Return why prompts with images cannot be compressed in this configuration; None if they can.

    Models that were never tested with images need no refusal here: the API server refuses each
    request with an image.
    """
    # Imported here: only the process that receives requests needs this module.
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
            "images sent as embeddings are not tested; remove --enable-mm-embeds, or serve"
            " this model without --kv-compress"
        )
    if pruning_rate := model.multimodal_config.video_pruning_rate:
        return (
            "a model that prunes video tokens processes images differently, which is not tested;"
            f" remove --video-pruning-rate, got {pruning_rate}"
        )
    return None
