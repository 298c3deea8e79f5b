"""Which layers of a model are compressed, derived from vLLM's configuration alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices

from vllm_kvcompress.planning.layer_groups import LayerGroups, layer_groups, layer_types
from vllm_kvcompress.refusals.tested import DRAFT_MODELS


def groups_of(config: VllmConfig) -> LayerGroups:
    """Return this model's layer groups. A worker checks them against the layers that it built."""
    model = config.model_config
    text = model.hf_text_config
    return layer_groups(
        layer_types(text.to_dict()),
        int(model.get_total_num_hidden_layers()),
        model.get_sliding_window(),
        states=state_blocks_per_group(config),
    )


def state_blocks_per_group(config: VllmConfig) -> int:
    """Return the blocks that a request holds in each group of state-space layers.

    With the prefix cache, vLLM keeps the state at the end of a block while it computes the next
    block, so a request holds two.
    """
    return 2 if getattr(config.cache_config, "mamba_cache_mode", "none") == "align" else 1


def layer_index(name: str) -> int:
    """Return the model-wide index of a layer, the first number in its name."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def draft_layers_of(config: VllmConfig) -> int:
    """Return D, the number of layers of a draft model with a KV cache of their own; 0 without.

    They follow the target's layers in number, and vLLM keeps them in the same blocks.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method not in DRAFT_MODELS:
        return 0
    draft = speculative.draft_model_config.hf_config
    modules = getattr(draft, "n_predict", None) if speculative.method == "mtp" else None
    return int(modules or draft.num_hidden_layers)


def draft_slots_of(config: VllmConfig) -> tuple[int, int]:
    """Return the maximum draft tokens in flight, and the slots of a draft model behind them.

    The outputs of the steps in flight may reject all of their drafts.
    """
    speculative = config.speculative_config
    if speculative is None:
        return 0, 0
    tokens = int(speculative.num_speculative_tokens)
    steps_in_flight = 2 if config.scheduler_config.async_scheduling else 1
    return steps_in_flight * tokens, tokens if draft_layers_of(config) else 0


def draft_names(config: VllmConfig, names: Iterable[str]) -> list[str]:
    """Return the names of a draft model's layers, in the order of their indices."""
    if not draft_layers_of(config):
        return []
    target_layers = int(config.model_config.get_total_num_hidden_layers())
    return sorted((name for name in names if layer_index(name) >= target_layers), key=layer_index)


def stages_of(config: VllmConfig) -> tuple[tuple[int, ...], ...]:
    """Return, for each pipeline stage, the model-wide indices of its compressed layers."""
    total = int(config.model_config.get_total_num_hidden_layers())
    count, full = int(config.parallel_config.pipeline_parallel_size), groups_of(config).full
    bounds = [get_pp_indices(total, stage, count) for stage in range(count)]
    return tuple(tuple(layer for layer in full if start <= layer < end) for start, end in bounds)


def layers_per_stage(config: VllmConfig) -> int:
    """Return L, the number of compressed layers per stage. They share a budget and a page pool."""
    return len(stages_of(config)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLayers:
    """Upper bound on the blocks that one request holds in the layers that are not compressed.

    Args:
        groups: the model's layer groups.
        max_model_len: maximum tokens of a request.
        max_in_flight_tokens: maximum tokens computed at the same time, over all steps in flight.
        block_size: tokens in a block.
    """

    groups: LayerGroups
    max_model_len: int
    max_in_flight_tokens: int
    block_size: int

    def blocks(self, tokens: int | None = None) -> int:
        """Return the maximum blocks of a request of `tokens` tokens (default: `max_model_len`)."""
        return self.groups.other_blocks(
            self.max_model_len if tokens is None else tokens,
            self.max_in_flight_tokens,
            self.block_size,
        )


def other_layers_of(config: VllmConfig) -> OtherLayers:
    """Return the `OtherLayers` of this model."""
    return OtherLayers(
        groups=groups_of(config),
        max_model_len=int(config.model_config.max_model_len),
        max_in_flight_tokens=int(config.max_in_flight_tokens),
        block_size=int(config.cache_config.block_size),
    )
