"""Readable test ids: ``H6-Hkv2-T75-D8-float16`` where pytest alone prints ``6-2-75-8-dtype2``.

Sizes use the letters of the ops' docstrings; other numbers follow their parameter's name.
"""

from collections.abc import Mapping
from typing import Any

import torch

LETTERS = {
    "heads": "H",
    "kv_heads": "Hkv",
    "tokens": "T",
    "dim": "D",
    "value_dim": "Dv",
    "block": "bs",
    "layers": "L",
    "w": "w",
}
_LONGEST = 60


def readable(name: str, value: Any) -> str | None:
    """Return one parameter's part of a test id, or None if pytest's own id is good enough.

    Args:
        name: the parameter's name.
        value: its value in this test.
    """
    if name in LETTERS and not isinstance(value, bool) and isinstance(value, int | str):
        return f"{LETTERS[name]}{value}"
    if isinstance(value, bool):
        return name if value else f"not_{name}"
    if value is None or (isinstance(value, Mapping | list | tuple) and not value):
        return f"no_{name}"
    if isinstance(value, torch.dtype):
        return _short(value) if name in ("dtype", "float8") else f"{name}={_short(value)}"
    if isinstance(value, int | float | list | tuple):
        return f"{name}={_short(value)}"[:_LONGEST]
    if isinstance(value, torch.Tensor | Mapping):
        return _short(value)[:_LONGEST]
    return None


def _short(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor):
        return f"{_short(value.dtype)}[{_short(list(value.shape))}]"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_short(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(_short, value))
    if isinstance(value, str):
        return value if value.isprintable() else repr(value)
    if value is None or isinstance(value, int | float):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)
