"""DefensiveKV and Layer-DefensiveKV (Feng et al. 2025, arXiv:2510.13334): the worst case.

Both are scorer `snapkv` with the paper's aggregate (`parts.aggregates`) and value norms. The layer
budgets are allocator `global` (`parts.highest`), docs/methods.md 2.6. The paper's heads share a
layer's budget as in AdaKV, and its norm of a value is taken behind the output projection; here the
heads keep equally many tokens, and the norm is the cached value's.
"""

from vllm_kvcompress.methods.preset import Params, Preset

_WORST_CASE: Params = (("aggregate", "defensive"), ("value_norm", True))

PRESET = Preset(allocator="uniform", scorer="snapkv", window=32, scorer_params=_WORST_CASE)
LAYER_PRESET = Preset(allocator="global", scorer="snapkv", window=32, scorer_params=_WORST_CASE)
