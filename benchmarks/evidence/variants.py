"""The recommended preset with one part exchanged at a time."""

import json
from collections.abc import Mapping
from typing import Any

RECOMMENDED = "cake-chunk"

_RECOMMENDED: Mapping[str, Any] = {
    "compress": "custom",
    "allocator": "cake",
    "scorer": "snapkv",
    "scorer_params": {"aggregate": "max"},
    "selector": "chunks",
    "selector_params": {"size": 10},
    "window": 32,
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
    "chunks of 16": {"selector_params": {"size": 16}},
    "chunks of 20": {"selector_params": {"size": 20}},
    "chunks per head": {"selector_params": {"size": 10, "shared": False}},
    "window 16": {"window": 16},
    "window 64": {"window": 64},
}

VARIANTS: Mapping[str, str] = {
    RECOMMENDED: json.dumps(_RECOMMENDED),
    **{name: json.dumps({**_RECOMMENDED, **change}) for name, change in _CHANGES.items()},
}
"""Name to settings, as ``--kv-compress-config`` takes them."""
