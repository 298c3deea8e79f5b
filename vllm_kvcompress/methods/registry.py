"""All methods and their parts by name: the files of `published`, and the parts that they share."""

from collections.abc import Mapping

from vllm_kvcompress.methods.base import Allocator, Scorer, Selector
from vllm_kvcompress.methods.parts.allocators import Uniform
from vllm_kvcompress.methods.parts.topk import TopK
from vllm_kvcompress.methods.preset import Preset
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

ALLOCATORS: Mapping[str, type[Allocator]] = {
    "uniform": Uniform,
    "pyramid": pyramidkv.Pyramid,
    "cake": cake.Cake,
    "dynamickv": dynamickv.DynamicKV,
    "global": defensivekv.Global,
    "d2o": d2o.D2O,
}
"""How much each layer keeps."""

SCORERS: Mapping[str, type[Scorer]] = {
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
"""Which tokens matter."""

SELECTORS: Mapping[str, type[Selector]] = {
    "topk": TopK,
    "chunks": chunkkv.Chunks,
    "heavy_recent": d2o.HeavyRecent,
}
"""How scores become positions."""

PRESETS: Mapping[str, Preset] = {
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

PUBLISHED = {"cake": cake.published, "dynamickv": dynamickv.published}
"""Allocators with parameters that papers publish per model. Users can override them."""

RECOMMENDED = "cake-chunk"
"""The method in the manifests and the default of `kvcompress plan`, there at the default budget
and in 16 bits (docs/measurements.md)."""
RECOMMENDED_BUDGETS: Mapping[str, float] = {"safe": 1.0, "balanced": 0.6, "small": 0.4}
"""Budgets of `RECOMMENDED` in k4v3, for CPUs only, because no GPU has run k4v3."""
RECOMMENDED_MEMORY: Mapping[str, float] = {"safe": 0.26, "balanced": 0.16, "small": 0.11}
"""Measured share of its 16-bit KV memory that a prompt takes at each of `RECOMMENDED_BUDGETS`
(docs/measurements.md)."""
CUSTOM = "custom"
METHODS = ("off", *PRESETS, CUSTOM)
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
