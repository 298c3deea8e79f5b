"""How vLLM groups a model's layers: those with full attention, and those that see less.

A block of its pool is as large as one group's pages, and every group of a request takes blocks of
its own. The layers with full attention are compressed. Those with a sliding window, and those that
keep a state in place of tokens (linear attention, state space), stay vLLM's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FULL = frozenset({"full_attention", "attention"})
WINDOWED = "sliding_attention"
STATEFUL = frozenset({"linear_attention", "mamba"})
# layers of some models that keep nothing of a token
WITHOUT_CACHE = frozenset({"mlp", "moe"})
_UNKNOWN = "unknown"

# model types whose layers have windows, named or not
_MIXED_TYPES = ("gemma2", "gemma3", "gemma4", "gpt_oss", "cohere2", "olmo3", "exaone4", "llama4")
# those that say so by the distance of the full ones, and what it is if they do not
_PATTERNS = {"gemma3": 6, "cohere2": 4, "gpt_oss": 2}
# the same of models whose other layers keep a state
_STATE_PATTERNS = {"qwen3_next": 4, "qwen3_5": 4}
# how Nemotron-H's configs spell a layer in one letter
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """The layers of one model.

    Args:
        full: indices of the layers with full attention.
        windowed: how many layers see a window.
        window: tokens that those see; None where there are none.
        stateful: how many layers keep a state. No model with windows has any.
        states: blocks that each group of those takes of a request: one, or with the prefix cache
            two, since the state at a block's end is kept while the next one is computed.
    """

    full: tuple[int, ...]
    windowed: int = 0
    window: int | None = None
    stateful: int = 0
    states: int = 1

    @property
    def others(self) -> int:
        """Layers that are not compressed."""
        return self.windowed + self.stateful

    @property
    def size(self) -> int:
        """Layers whose pages make up a block (``_get_kv_cache_groups_uniform_page_size``).

        As many as there are of the rarer kind, or of the other if it has less than half more.
        """
        if not self.others:
            return len(self.full)
        few, many = sorted((len(self.full), self.others))
        return many if many < 1.5 * few else few

    @property
    def windowed_groups(self) -> int:
        """Groups of windowed layers, each with a table of its own."""
        return -(-self.windowed // self.size) if self.windowed else 0

    @property
    def full_groups(self) -> int:
        """Groups of layers with full attention."""
        return -(-len(self.full) // self.size) if self.full else 0

    @property
    def stateful_groups(self) -> int:
        """Groups of layers that keep a state."""
        return -(-self.stateful // self.size) if self.stateful else 0

    def other_blocks(self, tokens: int, in_flight: int, block_size: int) -> int:
        """Blocks that the groups which are not compressed take of a request at most.

        Args:
            tokens, in_flight, block_size: as in `windowed_blocks`.
        """
        states = self.stateful_groups * self.states
        return states + self.windowed_blocks(tokens, in_flight, block_size)

    def windowed_blocks(self, tokens: int, in_flight: int, block_size: int) -> int:
        """Blocks that a request's windowed groups take at most (``SlidingWindowSpec``).

        Args:
            tokens: that it has, in the end.
            in_flight: tokens that are computed at once, 1 while it decodes.
        """
        if self.window is None:
            return 0
        seen = min(self.window - 1 + in_flight, tokens)
        # a window need not begin where a block does
        blocks = min(-(-seen // block_size) + 1, -(-tokens // block_size))
        return self.windowed_groups * blocks


def layer_groups(
    types: Sequence[str], layers: int, window: int | None, *, states: int = 1
) -> LayerGroups:
    """Count the layers of each kind; all have full attention where a config names no kinds.

    Args:
        types: one name per layer; empty where all are full.
        layers: how many there are.
        window: of those that have one.
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
    """The names of the layers' attention, by config.json; empty where all are of one kind.

    Args:
        text: its part about the language model.
    """
    letters = text.get("hybrid_override_pattern")
    if isinstance(letters, str):
        return tuple(_LETTERS.get(letter, _UNKNOWN) for letter in letters)
    listed = text.get("layer_types") or text.get("layers_block_type") or ()
    named = tuple(str(name) for name in listed)
    kind = str(text.get("model_type") or "")
    layers = text.get("num_hidden_layers")
    step = next((step for name, step in _STATE_PATTERNS.items() if kind.startswith(name)), None)
    if not named and step is not None and isinstance(layers, int):
        return _every(text.get("full_attention_interval") or step, layers, "linear_attention")
    if named or not kind.startswith(_MIXED_TYPES):
        return named
    known = next((step for name, step in _PATTERNS.items() if kind.startswith(name)), None)
    step = text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or known
    if known is None or not isinstance(step, int) or not isinstance(layers, int):
        return "full_attention", _UNKNOWN
    return _every(step, layers, WINDOWED)


def _every(step: int, layers: int, other: str) -> tuple[str, ...]:
    """Names of so many layers, of which every `step`-th has full attention."""
    names = "full_attention", other
    return tuple(names[bool((index + 1) % step)] for index in range(layers))
