"""Which layers of a model are compressed, as its configuration says before anything is built."""

from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices

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


def stages_of(config: VllmConfig) -> tuple[tuple[int, ...], ...]:
    """Per pipeline stage, the layers on it that are compressed, by their number in the model."""
    total = int(config.model_config.get_total_num_hidden_layers())
    count, full = int(config.parallel_config.pipeline_parallel_size), groups_of(config).full
    bounds = [get_pp_indices(total, stage, count) for stage in range(count)]
    return tuple(tuple(layer for layer in full if start <= layer < end) for start, end in bounds)


def layers_together(config: VllmConfig) -> int:
    """L: compressed layers that share a budget and a page pool, as many on every stage."""
    return len(stages_of(config)[0])


def windowed_blocks(config: VllmConfig) -> int:
    """Blocks that the windowed layers of one request take at most."""
    return groups_of(config).windowed_blocks(
        int(config.model_config.max_model_len),
        int(config.max_in_flight_tokens),
        int(config.cache_config.block_size),
    )
