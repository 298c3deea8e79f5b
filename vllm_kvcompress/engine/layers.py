"""Which layers of a model are compressed, as its configuration says before anything is built."""

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices

from vllm_kvcompress.planning.layer_groups import LayerGroups, layer_groups, layer_types


def groups_of(config: VllmConfig) -> LayerGroups:
    """The groups of this model's layers; a worker compares them with the layers that it built."""
    model = config.model_config
    text = model.hf_text_config
    return layer_groups(
        layer_types(text.to_dict()),
        int(model.get_total_num_hidden_layers()),
        model.get_sliding_window(),
        states=states_kept(config),
    )


def states_kept(config: VllmConfig) -> int:
    """Blocks that each group of layers with states takes of a request.

    With the prefix cache vLLM keeps the state at a block's end while the next one is computed.
    """
    return 2 if getattr(config.cache_config, "mamba_cache_mode", "none") == "align" else 1


def stages_of(config: VllmConfig) -> tuple[tuple[int, ...], ...]:
    """Per pipeline stage, the layers on it that are compressed, by their number in the model."""
    total = int(config.model_config.get_total_num_hidden_layers())
    count, full = int(config.parallel_config.pipeline_parallel_size), groups_of(config).full
    bounds = [get_pp_indices(total, stage, count) for stage in range(count)]
    return tuple(tuple(layer for layer in full if start <= layer < end) for start, end in bounds)


def layers_together(config: VllmConfig) -> int:
    """L: compressed layers that share a budget and a page pool, as many on every stage."""
    return len(stages_of(config)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLayers:
    """What the layers that are not compressed take of one request, at most.

    Args:
        groups: of the model's layers.
        longest: tokens of the longest request.
        in_flight: tokens that are computed at once.
        block_size: tokens in a block.
    """

    groups: LayerGroups
    longest: int
    in_flight: int
    block_size: int

    def blocks(self, tokens: int | None = None) -> int:
        """Blocks of a request of so many tokens, or of the longest one."""
        return self.groups.other_blocks(
            self.longest if tokens is None else tokens, self.in_flight, self.block_size
        )


def other_layers_of(config: VllmConfig) -> OtherLayers:
    """Those of this model."""
    return OtherLayers(
        groups=groups_of(config),
        longest=int(config.model_config.max_model_len),
        in_flight=int(config.max_in_flight_tokens),
        block_size=int(config.cache_config.block_size),
    )
