"""Variants of the recommended preset with one part replaced, all without a look-ahead.

Needle tasks show no difference between variants with a look-ahead: most outputs name the needle
before the look-ahead ends, so they never read the compressed prompt.
"""

import json
from collections.abc import Mapping
from typing import Any

from vllm_kvcompress.methods.registry import RECOMMENDED

WITHOUT_LOOKAHEAD = f"{RECOMMENDED}, lookahead 0"
"""Name of the recommended preset without its look-ahead, as all other presets run."""

_RECOMMENDED: Mapping[str, Any] = {
    "compress": "custom",
    "allocator": "cake",
    "scorer": "snapkv",
    "scorer_params": {"aggregate": "max"},
    "selector": "chunks",
    "selector_params": {"size": 20},
    "window": 16,
}

_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "allocator uniform": {"allocator": "uniform"},
    "allocator pyramid": {"allocator": "pyramid"},
    "allocator dynamickv": {"allocator": "dynamickv"},
    "allocator global": {"allocator": "global"},
    "scorer caote": {"scorer": "caote"},
    "scorer cake": {"scorer": "cake", "scorer_params": {}},
    "scorer tova": {"scorer": "tova", "scorer_params": {}},
    "value norm": {"scorer_params": {"aggregate": "max", "value_norm": True}},
    "aggregate mean": {"scorer_params": {"aggregate": "mean"}},
    "aggregate defensive": {"scorer_params": {"aggregate": "defensive"}},
    "not pooled": {"scorer_params": {"aggregate": "max", "kernel": 1}},
    "no chunks": {"selector": "topk", "selector_params": {}},
    "chunks of 5": {"selector_params": {"size": 5}},
    "chunks of 10": {"selector_params": {"size": 10}},
    "chunks of 16": {"selector_params": {"size": 16}},
    "chunks of 32": {"selector_params": {"size": 32}},
    "chunks per head": {"selector_params": {"size": 20, "shared": False}},
    "window 8": {"window": 8},
    "window 32": {"window": 32},
    "window 64": {"window": 64},
}

VARIANTS: Mapping[str, str] = {
    WITHOUT_LOOKAHEAD: json.dumps(_RECOMMENDED),
    **{name: json.dumps({**_RECOMMENDED, **change}) for name, change in _CHANGES.items()},
}
"""Settings by name, as JSON for ``--kv-compress-config``."""
