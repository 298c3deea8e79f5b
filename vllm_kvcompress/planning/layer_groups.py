"""How vLLM groups a model's layers: full-attention layers and all other layers.

A block of vLLM's pool is as large as one group's pages, and every group of a request takes its own
blocks. Full-attention layers are compressed. Layers with a sliding window and layers with a state
instead of cached tokens (linear attention, state space) are left to vLLM.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FULL = frozenset({"full_attention", "attention"})
WINDOWED = "sliding_attention"
STATEFUL = frozenset({"linear_attention", "mamba"})
# layers of some models that cache nothing
WITHOUT_CACHE = frozenset({"mlp", "moe"})
_UNKNOWN = "unknown"

# model types with windowed layers, whether or not their configs list them
_MIXED_TYPES = ("gemma2", "gemma3", "gemma4", "gpt_oss", "cohere2", "olmo3", "exaone4", "llama4")
# windowed models that give the distance of full layers, and its default
_PATTERNS = {"gemma3": 6, "cohere2": 4, "gpt_oss": 2}
# the same for models whose other layers are stateful
_STATE_PATTERNS = {"qwen3_next": 4, "qwen3_5": 4}
# Nemotron-H's configs have one letter per layer
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """The layers of one model, by kind.

    Args:
        full: indices of the full-attention layers.
        windowed: number of layers with a sliding window.
        window: tokens in the sliding window; None without windowed layers.
        stateful: number of layers with a state. No model has both windowed and stateful layers.
        states: blocks of a request in each group of stateful layers: one, or two with the prefix
            cache, since the state at a block's end is kept while the next block is computed.
    """

    full: tuple[int, ...]
    windowed: int = 0
    window: int | None = None
    stateful: int = 0
    states: int = 1

    @property
    def num_uncompressed(self) -> int:
        """Return the number of layers that are not compressed."""
        return self.windowed + self.stateful

    @property
    def size(self) -> int:
        """Return the number of layers whose pages make up a block.

        It is the count of the rarer kind, or that of the other kind if it is less than 1.5 times as
        large (vLLM's ``_get_kv_cache_groups_uniform_page_size``).
        """
        if not self.num_uncompressed:
            return len(self.full)
        smaller, larger = sorted((len(self.full), self.num_uncompressed))
        return larger if larger < 1.5 * smaller else smaller

    @property
    def windowed_groups(self) -> int:
        """Return the number of groups of windowed layers, each with its own block table."""
        return -(-self.windowed // self.size) if self.windowed else 0

    @property
    def full_groups(self) -> int:
        """Return the number of groups of full-attention layers."""
        return -(-len(self.full) // self.size) if self.full else 0

    @property
    def stateful_groups(self) -> int:
        """Return the number of groups of stateful layers."""
        return -(-self.stateful // self.size) if self.stateful else 0

    def other_blocks(self, tokens: int, in_flight: int, block_size: int) -> int:
        """Return the maximum blocks of a request in the groups that are not compressed.

        Args:
            tokens, in_flight, block_size: as in `windowed_blocks`.
        """
        states = self.stateful_groups * self.states
        return states + self.windowed_blocks(tokens, in_flight, block_size)

    def windowed_blocks(self, tokens: int, in_flight: int, block_size: int) -> int:
        """Return the maximum blocks of a request in its windowed groups (``SlidingWindowSpec``).

        Args:
            tokens: tokens of the request at its end.
            in_flight: tokens that one step computes, 1 during decode.
            block_size: tokens in a block.
        """
        if self.window is None:
            return 0
        window_tokens = min(self.window - 1 + in_flight, tokens)
        # A window may start inside a block, so it can touch one more block.
        blocks = min(-(-window_tokens // block_size) + 1, -(-tokens // block_size))
        return self.windowed_groups * blocks


def layer_groups(
    types: Sequence[str], layers: int, window: int | None, *, states: int = 1
) -> LayerGroups:
    """Return the layer groups of a model; all layers are full if the config names no kinds.

    Args:
        types: one name per layer; empty if all layers are full.
        layers: number of layers.
        window: sliding window of the windowed layers.
        states: as in `LayerGroups`.
    """
    stateful = sum(kind in STATEFUL for kind in types)
    if stateful:
        full = tuple(index for index, kind in enumerate(types) if kind in FULL)
        return LayerGroups(full=full, stateful=stateful, states=states)
    if WINDOWED not in types or window is None:
        return LayerGroups(full=tuple(range(layers)))
    windowed = {index for index, kind in enumerate(types) if kind == WINDOWED}
    full = tuple(index for index in range(layers) if index not in windowed)
    return LayerGroups(full=full, windowed=layers - len(full), window=window)


def layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the attention types of the layers from config.json; empty if all have the same type.

    Args:
        text: the part of config.json that describes the language model.
    """
    letters = text.get("hybrid_override_pattern")
    if isinstance(letters, str):
        return tuple(_LETTERS.get(letter, _UNKNOWN) for letter in letters)
    config_types = text.get("layer_types") or text.get("layers_block_type") or ()
    named = tuple(str(name) for name in config_types)
    kind = str(text.get("model_type") or "")
    layers = text.get("num_hidden_layers")
    step = next((step for name, step in _STATE_PATTERNS.items() if kind.startswith(name)), None)
    if not named and step is not None and isinstance(layers, int):
        return _interleaved(text.get("full_attention_interval") or step, layers, "linear_attention")
    if named or not kind.startswith(_MIXED_TYPES):
        return named
    known = next((step for name, step in _PATTERNS.items() if kind.startswith(name)), None)
    step = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or known
    if known is None or not isinstance(step, int) or not isinstance(layers, int):
        return "full_attention", _UNKNOWN
    return _interleaved(step, layers, WINDOWED)


def _interleaved(step: int, layers: int, other: str) -> tuple[str, ...]:
    """Return the types of `layers` layers, of which every `step`-th has full attention."""
    names = "full_attention", other
    return tuple(names[bool((index + 1) % step)] for index in range(layers))
