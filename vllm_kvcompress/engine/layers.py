"""Which layers of a model are compressed, as its configuration says before anything is built."""

from vllm.config import VllmConfig

from vllm_kvcompress.layer_groups import LayerGroups, layer_groups, layer_types


def groups_of(config: VllmConfig) -> LayerGroups:
    """The groups of this model's layers; a worker compares them with the layers that it built."""
    model = config.model_config
    text = model.hf_text_config
    return layer_groups(
        layer_types(text.to_dict()),
        int(model.get_total_num_hidden_layers()),
        model.get_sliding_window(),
    )


def windowed_blocks(config: VllmConfig) -> int:
    """Blocks that the windowed layers of one request take at most."""
    return groups_of(config).windowed_blocks(
        int(config.model_config.max_model_len),
        int(config.max_in_flight_tokens),
        int(config.cache_config.block_size),
    )
