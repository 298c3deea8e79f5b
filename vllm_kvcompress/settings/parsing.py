"""Parsers for budgets, bounds, method lists and aliases as users write them.

Each parser raises ConfigError for anything else. The message has the rule and the value.
"""

import math
import numbers
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ValidationError

from vllm_kvcompress.errors import ConfigError, shorten
from vllm_kvcompress.methods.base import choose
from vllm_kvcompress.methods.preset import Merge, Params
from vllm_kvcompress.methods.registry import CUSTOM, PRESETS, RECOMMENDED
from vllm_kvcompress.settings.declared import Parsed
from vllm_kvcompress.settings.packed_dtype import PackedDtype, parse_packed_dtype
from vllm_kvcompress.settings.text import has_plain_digits, refuse_other_digits

Bounds = tuple[float, float] | tuple[int, int]
_MAX_DIGITS = 40
"""Characters of a number in text, spaces included."""
_MERGES: Mapping[str, Merge] = {"true": True, "false": False, "values": "values"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """Another name of the model, with its method, budget and format of kept tokens.

    Args:
        name: value of `model` in a request.
        method: "off", or the name of a preset.
        budget: ratio or tokens per layer, see `parse_budget`; None for "off".
        packed_dtype: format of kept tokens; None for the engine's.
    """

    name: str
    method: str
    budget: float | int | None = None
    packed_dtype: PackedDtype | None = None

    def __str__(self) -> str:
        return f"{self.name}={self.meaning}"

    @property
    def meaning(self) -> str:
        """Return ``METHOD:BUDGET``, ``METHOD:BUDGET:FORMAT`` or ``off``."""
        parts = (self.method, self.budget, self.packed_dtype)
        return ":".join(str(part) for part in parts if part is not None)


def plain(value: Any) -> Any:
    """Return `value`, with another library's number as a Python number and a list as a tuple."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, numbers.Number) and hasattr(value, "item"):
        return value.item()
    return value


def parse_budget(value: Any) -> float | int:
    """Parse a budget: a ratio in (0, 1], or a whole number of tokens per layer >= 1."""
    message = (
        "budget must be a ratio in (0, 1] such as 0.1, or a whole number of tokens per layer such"
        f" as 1024; got {shorten(value)}"
    )
    budget: Any = plain(value) if isinstance(value, numbers.Number) else value
    if isinstance(value, str):
        if len(value) > _MAX_DIGITS or not has_plain_digits(value):
            raise ConfigError(message)
        try:
            budget = int(value)
        except ValueError:
            try:
                budget = float(value)
            except ValueError:
                raise ConfigError(message) from None
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ConfigError(message)
    if isinstance(budget, int):
        if budget < 1:
            raise ConfigError(message)
        return budget
    # Written this way round because NaN must fail too.
    if not 0 < budget <= 1:
        raise ConfigError(message)
    return budget


def parse_budget_and_format(text: str) -> tuple[float | int, PackedDtype | None]:
    """Parse ``BUDGET`` or ``BUDGET:FORMAT`` into a budget and a format of kept tokens."""
    budget, colon, packed_dtype = (part.strip() for part in text.partition(":"))
    return parse_budget(budget), parse_packed_dtype(packed_dtype) if colon else None


def parse_methods(value: Any) -> tuple[str, ...]:
    """Parse the methods that requests may choose: "all", a list, or comma-separated names."""
    if value == "all":
        return ("off", *PRESETS)
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or (isinstance(value, str) and not value.strip()):
        raise ConfigError(
            "allow_override must be all, or methods separated by commas such as off,snapkv;"
            f" got {shorten(value)}"
        )
    names = tuple(dict.fromkeys("off" if part is False else str(part).strip() for part in parts))
    for name in names:
        _refuse_unknown_method("allow_override", name, "off")
    return names


def _refuse_unknown_method(role: str, name: str, *others: str) -> None:
    """Raise ConfigError unless `name` is a preset or one of `others`."""
    if name not in others and name not in PRESETS:
        choose(role, dict.fromkeys((*others, *PRESETS)), name)


def whole_tokens(value: Any) -> Any:
    """Return `value` unless it is a bool, which pydantic would convert silently, or a fraction."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ConfigError(f"must be a whole number of tokens, got {shorten(value)}")
    return refuse_other_digits(value)


def tokens_or_none(value: Any) -> Any:
    """Return None for "none", which manifests write for an unset flag; else as `whole_tokens`."""
    return None if value == "none" else whole_tokens(value)


def number(value: Any) -> Any:
    """Return `value` unless it is a bool, which pydantic would convert silently."""
    if isinstance(value, bool):
        raise ConfigError(f"must be a number, got {shorten(value)}")
    return refuse_other_digits(value)


def parse_park(value: Any) -> float | None:
    """Parse `park`: GiB above 0, or None, which manifests write as "none"."""
    if value is None or value == "none":
        return None
    gibibytes: Any = refuse_other_digits(value)
    if not isinstance(value, bool):
        with suppress(TypeError, ValueError):
            gibibytes = float(gibibytes)
            # Written this way round because NaN must fail too.
            if 0 < gibibytes < math.inf:
                return float(gibibytes)
    raise ConfigError(
        "park must be a number of GiB above 0, or none; set --kv-park to the host memory for"
        f" preempted requests, such as 16, or remove it, got {shorten(value)}"
    )


def parse_merge(value: Any) -> Merge | None:
    """Parse `merge`: a bool or its text, "values", or None."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value in _MERGES:
        return _MERGES[value]
    raise ConfigError(
        'merge must be true, "values" to merge only values and leave keys unchanged, or false;'
        f" got {shorten(value)}"
    )


def parse_params(value: Any) -> Any:
    """Return the parameters of a part in the order of their names."""
    if not isinstance(value, Mapping):
        return value
    items = ((str(key), plain(item)) for key, item in value.items())
    return tuple(sorted(items, key=lambda item: item[0]))


def parse_compress(value: Any) -> str:
    """Parse the name of a method, or off."""
    # YAML parses a bare off as False.
    name = "off" if value is False else str(value)
    _refuse_unknown_method("compress", name, "off", CUSTOM)
    return name


def parse_bounds(value: Any) -> tuple[Bounds, ...]:
    """Parse budget bounds: ``0.05:0.5,256:4096``, or a list of pairs."""
    message = (
        "budget_bounds must be MIN:MAX, both ratios such as 0.05:0.5 or both whole numbers of"
        f" tokens such as 256:4096, or one of each kind with a comma between; got {shorten(value)}"
    )
    pairs = [part.split(":") for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(pairs, list | tuple):
        raise ConfigError(message)
    bounds: list[Bounds] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ConfigError(message)
        try:
            low, high = parse_budget(pair[0]), parse_budget(pair[1])
        except ConfigError:
            raise ConfigError(message) from None
        same_kind = type(low) is type(high)
        if not same_kind or low > high or type(low) in [type(low) for low, _ in bounds]:
            raise ConfigError(message)
        bounds.append((low, high))
    return tuple(bounds)


def parse_aliases(value: Any) -> tuple[Alias, ...]:
    """Parse aliases: ``NAME=METHOD:BUDGET[:FORMAT]``, a list of such texts, or an object."""
    if isinstance(value, Mapping):
        pairs = [(name, meaning) for name, meaning in value.items()]
    else:
        texts = [value] if isinstance(value, str | Alias) else value
        if not isinstance(texts, list | tuple):
            raise _alias_error(value)
        pairs = []
        # Split at the last "=": a name may contain "=" and ":", a method and a budget cannot.
        for text in texts:
            name, equals, meaning = str(text).rpartition("=")
            if not isinstance(text, str | Alias) or not equals:
                raise _alias_error(text)
            pairs.append((name, meaning))
    aliases: dict[str, Alias] = {}
    for name, meaning in pairs:
        alias = _alias(name, meaning)
        if alias.name in aliases:
            raise ConfigError(f"alias {alias.name!r} is given twice; remove one, or rename it")
        aliases[alias.name] = alias
    return tuple(aliases.values())


def _alias(name: Any, meaning: Any) -> Alias:
    """Return the alias `name` with the parsed `meaning`."""
    # YAML reads a bare off as False.
    if meaning is False:
        meaning = "off"
    if not isinstance(name, str) or not name.strip() or not isinstance(meaning, str):
        raise _alias_error(f"{name}={meaning}")
    name = name.strip()
    method, colon, kept = (part.strip() for part in meaning.partition(":"))
    _refuse_unknown_method(f"alias {name!r}: method", method, "off")
    if method == "off":
        if colon:
            raise ConfigError(
                f"alias {name!r}: off takes no budget, got {shorten(meaning)}; write off"
            )
        return Alias(name=name, method=method)
    if not colon:
        raise _alias_error(f"{name}={meaning}")
    try:
        budget, packed_dtype = parse_budget_and_format(kept)
        return Alias(name=name, method=method, budget=budget, packed_dtype=packed_dtype)
    except ConfigError as e:
        raise ConfigError(f"alias {name!r}: {e}") from None


def _alias_error(value: Any) -> ConfigError:
    return ConfigError(
        "alias must be NAME=METHOD:BUDGET such as llama@kv0.2=cake:0.2, optionally followed by"
        " :k4v3 or :auto, or NAME=off for a name whose requests stay uncompressed; got"
        f" {shorten(str(value))}"
    )


Tokens = Annotated[int, Parsed(whole_tokens)]
TokensOrUnset = Annotated[int | None, Parsed(whole_tokens)]
TokensOrNone = Annotated[int | None, Parsed(tokens_or_none)]
"""As `TokensOrUnset`; users may also write "none"."""
Park = Annotated[float | None, Parsed(parse_park)]
MethodName = Annotated[str, Parsed(parse_compress)]
Budget = Annotated[float | int, Parsed(parse_budget)]
MethodNames = Annotated[tuple[str, ...], Parsed(parse_methods)]
BoundsOfKinds = Annotated[tuple[Bounds, ...], Parsed(parse_bounds)]
Aliases = Annotated[tuple[Alias, ...], Parsed(parse_aliases)]
PartParams = Annotated[Params, Parsed(parse_params)]
MergeOrUnset = Annotated[Merge | None, Parsed(parse_merge)]


def one_sentence(error: ValidationError, keys: Container[str]) -> str:
    """Return pydantic's first error as one sentence with the key and the value received.

    Args:
        keys: all keys of the settings.
    """
    first = error.errors()[0]
    # pydantic's "loc" is (key, type...), or (group, key, type...) for a setting in a group.
    key = next((str(part) for part in reversed(first["loc"][:2]) if part in keys), "")
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return text if not key or key in text else f"{key} {text}"
    message = text[:1].lower() + text[1:]
    return f"{key}: {message}, got {shorten(first.get('input'))}"


def with_default_method(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, with the recommended method if they name none."""
    named = settings.keys() & {"compress", "allocator", "scorer"}
    return settings if named else {"compress": RECOMMENDED, **settings}
