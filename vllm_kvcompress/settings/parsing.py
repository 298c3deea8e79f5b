"""Budgets, bounds and lists of methods, as users write them."""

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import choose
from vllm_kvcompress.methods.presets import PRESETS, Merge
from vllm_kvcompress.settings.text import has_plain_digits, refuse_other_digits

Bounds = tuple[float, float] | tuple[int, int]
_MERGES: Mapping[str, Merge] = {"true": True, "false": False, "values": "values"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A name under which the model also answers, and what that stands for.

    Args:
        name: what clients write as `model`.
        method: "off", or the name of a preset.
        budget: ratio or tokens, see `parse_budget`; None for "off", which has none.
    """

    name: str
    method: str
    budget: float | int | None = None

    def __str__(self) -> str:
        return f"{self.name}={self.meaning}"

    @property
    def meaning(self) -> str:
        """Write ``METHOD:BUDGET``, or ``off``."""
        return self.method if self.budget is None else f"{self.method}:{self.budget}"


def plain(value: Any) -> Any:
    """Turn numbers of other libraries into Python's, and lists into tuples."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, numbers.Number) and hasattr(value, "item"):
        return value.item()
    return value


def parse_budget(value: Any) -> float | int:
    """Read a ratio in (0, 1] or a whole number of tokens >= 1 from a number or its text.

    Raises:
        ConfigError: anything else.
    """
    rule = (
        "budget must be a ratio in (0, 1] such as 0.1, or a whole number of tokens per layer such"
        f" as 1024; got {value!r}"
    )
    found: Any = plain(value)
    if isinstance(value, str):
        if not has_plain_digits(value):
            raise ConfigError(rule)
        try:
            found = int(value)
        except ValueError:
            try:
                found = float(value)
            except ValueError:
                raise ConfigError(rule) from None
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ConfigError(rule)
    if isinstance(found, int):
        if found < 1:
            raise ConfigError(rule)
        return found
    # Written so that NaN fails too.
    if not 0 < found <= 1:
        raise ConfigError(rule)
    return found


def parse_methods(value: Any) -> tuple[str, ...]:
    """Read the methods that requests may ask for: "all", a list, or names separated by commas.

    Raises:
        ConfigError: a name is unknown, or no method at all is named.
    """
    if value == "all":
        return ("off", *PRESETS)
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or (isinstance(value, str) and not value.strip()):
        raise ConfigError(
            "allow_override must be all, or methods separated by commas such as off,snapkv;"
            f" got {value!r}"
        )
    names = tuple(dict.fromkeys("off" if part is False else str(part).strip() for part in parts))
    for name in names:
        choose("allow_override", dict.fromkeys(("off", *PRESETS)), name)
    return names


def whole_tokens(value: Any) -> Any:
    """Let whole numbers and their texts pass, for pydantic to read.

    Raises:
        ConfigError: a bool, which pydantic would take for a number, or a fraction.
    """
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ConfigError(f"must be a whole number of tokens, got {value!r}")
    return refuse_other_digits(value)


def number(value: Any) -> Any:
    """Let numbers and their texts pass, for pydantic to read.

    Raises:
        ConfigError: a bool, which pydantic would take for a number, or other digits than 0 to 9.
    """
    if isinstance(value, bool):
        raise ConfigError(f"must be a number, got {value!r}")
    return refuse_other_digits(value)


def parse_merge(value: Any) -> Merge | None:
    """Read whether evicted tokens are folded: a bool or its text, "values", or None.

    Raises:
        ConfigError: anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value in _MERGES:
        return _MERGES[value]
    raise ConfigError(
        'merge must be true, "values" to fold only values and leave keys as they are, or false;'
        f" got {value!r}"
    )


def parse_bounds(value: Any) -> tuple[Bounds, ...]:
    """Read bounds of ratios, of tokens or of both: ``0.05:0.5,256:4096``, or pairs in a list.

    Raises:
        ConfigError: a pair is not two budgets of one kind in order, or a kind is given twice.
    """
    rule = (
        "budget_bounds must be MIN:MAX, both ratios such as 0.05:0.5 or both whole numbers of"
        f" tokens such as 256:4096, or one of each kind with a comma between; got {value!r}"
    )
    pairs = [part.split(":") for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(pairs, list | tuple):
        raise ConfigError(rule)
    bounds: list[Bounds] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConfigError(rule)
        try:
            low, high = parse_budget(pair[0]), parse_budget(pair[1])
        except ConfigError:
            raise ConfigError(rule) from None
        alike = type(low) is type(high)
        if not alike or low > high or type(low) in [type(low) for low, _ in bounds]:
            raise ConfigError(rule)
        bounds.append((low, high))
    return tuple(bounds)


def parse_aliases(value: Any) -> tuple[Alias, ...]:
    """Read further names of the model: ``NAME=METHOD:BUDGET``, a list of these, or an object.

    Raises:
        ConfigError: an alias is written otherwise, means nothing, or is given twice.
    """
    if isinstance(value, Mapping):
        pairs = [(name, meaning) for name, meaning in value.items()]
    else:
        texts = [value] if isinstance(value, str | Alias) else value
        if not isinstance(texts, list | tuple):
            raise _no_alias(value)
        pairs = []
        # The last = divides, since a name may hold = and :, a method and a budget cannot.
        for text in texts:
            name, equals, meaning = str(text).rpartition("=")
            if not isinstance(text, str | Alias) or not equals:
                raise _no_alias(text)
            pairs.append((name, meaning))
    aliases: dict[str, Alias] = {}
    for name, meaning in pairs:
        alias = _alias(name, meaning)
        if alias.name in aliases:
            raise ConfigError(f"alias {alias.name!r} is given twice; remove one, or rename it")
        aliases[alias.name] = alias
    return tuple(aliases.values())


def _alias(name: Any, meaning: Any) -> Alias:
    # YAML reads a bare off as False.
    if meaning is False:
        meaning = "off"
    if not isinstance(name, str) or not name.strip() or not isinstance(meaning, str):
        raise _no_alias(f"{name}={meaning}")
    name = name.strip()
    method, colon, budget = (part.strip() for part in meaning.partition(":"))
    choose(f"alias {name!r}: method", dict.fromkeys(("off", *PRESETS)), method)
    if method == "off":
        if colon:
            raise ConfigError(f"alias {name!r}: off takes no budget, got {meaning!r}; write off")
        return Alias(name=name, method=method)
    if not colon:
        raise _no_alias(f"{name}={meaning}")
    try:
        return Alias(name=name, method=method, budget=parse_budget(budget))
    except ConfigError as e:
        raise ConfigError(f"alias {name!r}: {e}") from None


def _no_alias(value: Any) -> ConfigError:
    return ConfigError(
        "alias must be NAME=METHOD:BUDGET such as llama@kv0.2=cake:0.2, or NAME=off to compress"
        f" nothing under that name; got {str(value)!r}"
    )


def one_sentence(error: ValidationError) -> str:
    """The first thing that is wrong, with its key and what was given."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"][:1])
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return text if not key or key in text else f"{key} {text}"
    message = text[:1].lower() + text[1:]
    return f"{key}: {message}, got {first.get('input')!r}"
