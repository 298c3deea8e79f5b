"""All methods and their parts by name.

The built-in ones are the files of `published` and the parts that they share. Other packages add
theirs by entry point.
"""

import re
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from vllm_kvcompress.errors import ConfigError, shorten
from vllm_kvcompress.methods.base import Allocator, Scorer, Selector, build, choose, closest
from vllm_kvcompress.methods.entry_points import KINDS, MethodEntry, described, method_entries
from vllm_kvcompress.methods.parts.allocators import Uniform
from vllm_kvcompress.methods.parts.topk import TopK
from vllm_kvcompress.methods.preset import Preset, misused_part, refuse_values
from vllm_kvcompress.methods.published import (
    cake,
    cake_chunk,
    caote,
    chunkkv,
    d2o,
    defensivekv,
    dynamickv,
    h2o,
    keydiff,
    lagkv,
    pyramidkv,
    random,
    snapkv,
    streamingllm,
    tova,
)
from vllm_kvcompress.methods.trial import check_part

T = TypeVar("T")

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
"""A name that fits into ``NAME=METHOD:BUDGET`` and into a list with commas."""
_RESERVED = frozenset({"off", "all", "custom", "none"})
"""Names that mean something else where users write a method."""


class MethodTable(UserDict[str, T]):
    """The parts of one kind, or the presets, by name.

    It starts with the built-in names. Any other name, and a list of all names, loads the methods of
    other packages first (`load_added_methods`).
    """

    def __contains__(self, name: object) -> bool:
        if name not in self.data:
            load_added_methods()
        return name in self.data

    def __missing__(self, name: str) -> T:
        load_added_methods()
        return self.data[name]

    def __iter__(self) -> Iterator[str]:
        load_added_methods()
        return iter(self.data)

    def __len__(self) -> int:
        load_added_methods()
        return len(self.data)


ALLOCATORS: MethodTable[type[Allocator]] = MethodTable(
    {
        "uniform": Uniform,
        "pyramid": pyramidkv.Pyramid,
        "cake": cake.Cake,
        "dynamickv": dynamickv.DynamicKV,
        "global": defensivekv.Global,
        "d2o": d2o.D2O,
    }
)
"""How much each layer keeps."""

SCORERS: MethodTable[type[Scorer]] = MethodTable(
    {
        "streamingllm": streamingllm.StreamingLLM,
        "h2o": h2o.H2O,
        "tova": tova.Tova,
        "snapkv": snapkv.SnapKV,
        "cake": cake.CakeIndicator,
        "runs": cake_chunk.Runs,
        "caote": caote.Caote,
        "fastcaote": caote.FastCaote,
        "keydiff": keydiff.KeyDiff,
        "lagkv": lagkv.LagKV,
        "random": random.Random,
    }
)
"""Which tokens matter."""

SELECTORS: MethodTable[type[Selector]] = MethodTable(
    {
        "topk": TopK,
        "chunks": chunkkv.Chunks,
        "heavy_recent": d2o.HeavyRecent,
    }
)
"""How scores become positions."""

PRESETS: MethodTable[Preset] = MethodTable(
    {
        "snapkv": snapkv.PRESET,
        "pyramidkv": pyramidkv.PRESET,
        "h2o": h2o.PRESET,
        "tova": tova.PRESET,
        "streamingllm": streamingllm.PRESET,
        "cake": cake.PRESET,
        "dynamickv": dynamickv.PRESET,
        "d2o": d2o.PRESET,
        "chunkkv": chunkkv.PRESET,
        "caote": caote.PRESET,
        "fastcaote": caote.FAST_PRESET,
        "defensivekv": defensivekv.PRESET,
        "layer-defensivekv": defensivekv.LAYER_PRESET,
        "keydiff": keydiff.PRESET,
        "lagkv": lagkv.PRESET,
        "cake-chunk": cake_chunk.PRESET,
        "random": random.PRESET,
    }
)

TABLES: Mapping[str, MethodTable[Any]] = {
    "allocator": ALLOCATORS,
    "scorer": SCORERS,
    "selector": SELECTORS,
    "preset": PRESETS,
}
BUILT_IN: Mapping[str, tuple[str, ...]] = {kind: (*table.data,) for kind, table in TABLES.items()}
"""The built-in names of each kind."""

PUBLISHED = {"cake": cake.published, "dynamickv": dynamickv.published}
"""Allocators with parameters that papers publish per model. Users can override them."""

RECOMMENDED = "cake-chunk"
"""The method in the manifests and the default of `kvcompress plan`, there at the default budget
and in 16 bits (docs/measurements.md)."""
RECOMMENDED_BUDGETS: Mapping[str, float] = {"safe": 1.0, "balanced": 0.6, "small": 0.4}
"""Budgets of `RECOMMENDED` in k4v3, for CPUs only, because no GPU has run k4v3."""
RECOMMENDED_MEMORY: Mapping[str, float] = {"safe": 0.28, "balanced": 0.18, "small": 0.14}
"""Measured share of its 16-bit KV memory that a prompt takes at each of `RECOMMENDED_BUDGETS`
of up to 1,500 tokens (docs/measurements.md)."""
CUSTOM = "custom"
METHODS = ("off", *BUILT_IN["preset"], CUSTOM)
"""The built-in values of ``--kv-compress``."""
CAOTES = frozenset({"caote", "fastcaote"})


def fallback_window(allocator: str, scorer: str, base: str) -> int:
    """Return the window of a scorer outside its preset.

    CAOTE takes the window of its base scorer, and allocator CAKE its own.
    """
    if allocator == "cake":
        return PRESETS["cake"].window
    if (allocator, scorer) == ("dynamickv", "snapkv"):
        return PRESETS["dynamickv"].window
    name = base if scorer in CAOTES else scorer
    return PRESETS[name].window if name in PRESETS else 32


def published(allocator: str, model: str | None, budget: float | int) -> Mapping[str, float]:
    """Return the published parameters of an allocator for a model and budget; empty if none."""
    return PUBLISHED[allocator](model, budget) if allocator in PUBLISHED else {}


# A package's module may look up names while it is loaded, and then finds the built-in ones only.
_lock, _started = threading.RLock(), threading.Event()


def load_added_methods() -> None:
    """Add the methods of other packages to the tables, once per process.

    Every process loads all of them, so that all know the same names. Nothing is added if any entry
    is wrong.

    Raises:
        ConfigError: an entry is wrong. The message names the package, the entry, the rule and the
            fix.
    """
    with _lock:
        if _started.is_set():
            return
        _started.set()
        try:
            for kind, objects in _checked(_raise).items():
                TABLES[kind].data.update(objects)
        except BaseException:
            _started.clear()
            raise


def checked_entries() -> tuple[dict[str, dict[str, Any]], dict[MethodEntry, ConfigError]]:
    """Return the objects of other packages by kind and name, and the errors of their wrong entries.

    An object with an error is left out.
    """
    errors: dict[MethodEntry, ConfigError] = {}
    with _lock:
        was_started = _started.is_set()
        _started.set()
        try:
            return _checked(errors.__setitem__), errors
        finally:
            if not was_started:
                _started.clear()


def _raise(entry: MethodEntry, error: ConfigError) -> None:
    raise error


def _checked(
    on_error: Callable[[MethodEntry, ConfigError], None],
) -> dict[str, dict[str, Any]]:
    """Return the objects of other packages by kind and name, without the wrong ones."""
    objects: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    # presets last, because they name the parts
    for entry in sorted(method_entries(), key=lambda each: each.kind == "preset"):
        try:
            _check_name(entry)
            value = entry.load()
            try:
                if entry.kind == "preset":
                    _check_preset(value, objects)
                else:
                    check_part(entry.kind, entry.name, value)
            except ConfigError as e:
                raise entry.error(str(e)) from None
            except Exception as e:  # another package's code may raise anything
                raise entry.error(f"a check of it fails with {described(e)}; correct it") from e
            objects[entry.kind][entry.name] = value
        except ConfigError as e:
            on_error(entry, e)
    return objects


def _check_name(entry: MethodEntry) -> None:
    """Raise ConfigError unless the entry is ``KIND.NAME`` and the name belongs to its package."""
    name = entry.name
    if entry.kind not in KINDS:
        raise entry.error(
            f"an entry must be called KIND.NAME with a KIND of {list(KINDS)}, got"
            f" {entry.point.name!r}{closest(entry.kind, KINDS)}; rename it"
        )
    if name in _RESERVED or not _NAME.fullmatch(name):
        raise entry.error(
            "a name must consist of lower-case letters, digits, '-' and '_', start with a letter,"
            f" and be none of {sorted(_RESERVED)}, got {name!r}; rename it"
        )
    if built_in := [kind for kind in KINDS if name in BUILT_IN[kind]]:
        raise entry.error(
            f"the {built_in[0]} {name!r} is built in, and a package cannot replace it or use its"
            " name; rename the entry"
        )
    same_name = [each for each in method_entries() if each.name == name and each != entry]
    for other in same_name:
        if other.package != entry.package or other.kind == entry.kind:
            raise entry.error(
                f"a name must belong to one package and to one entry of a kind, but"
                f" {other.package} {other.version} registers {other.point.name!r} as well; rename"
                " one"
            )


def _check_preset(preset: Any, added: Mapping[str, Mapping[str, Any]]) -> None:
    """Check a preset of another package: its values, its parts, and that they fit each other.

    Args:
        added: the parts of other packages by kind and name.

    Raises:
        ConfigError: the message has the rule and the fix.
    """
    if not isinstance(preset, Preset):
        raise ConfigError(
            f"a preset must be a Preset of {Preset.__module__}, got {shorten(preset)}; build one"
        )
    parts = {}
    for kind in ("allocator", "scorer", "selector"):
        table = {**TABLES[kind].data, **added[kind]}
        choose(kind, table, getattr(preset, kind))
        params = getattr(preset, f"{kind}_params", ())
        parts[kind] = build(kind, table, getattr(preset, kind), {}, params)
    if preset.output_scorer:
        choose("output_scorer", {**SCORERS.data, **added["scorer"]}, preset.output_scorer)
    if misused := misused_part(preset, **parts):
        raise ConfigError("; ".join(misused))
    refuse_values(preset, parts["allocator"].reads | parts["scorer"].reads)
