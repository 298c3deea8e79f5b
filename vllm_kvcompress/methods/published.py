"""Parameters that papers publish per model, selected by model name. Users can override them.

CAKE's temperatures are in ``model2tau.json`` of the authors' repository (antgroup/cakekv), for
budgets of exactly 128 and 1024 tokens per layer. For any other model or budget the authors' code
uses 1 and 1, and so do we. DynamicKV states r_max = 10 for all models (its scripts use 5 for
Qwen2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Published parameters of one model.

    Args:
        names: lower-case substrings that must all occur in the model's name.
        cake: budget in tokens per layer -> (tau1, tau2).
        r_max: DynamicKV's r_max.
    """

    names: tuple[str, ...]
    cake: Mapping[int, tuple[float, float]]
    r_max: float | None = None


# The first entry whose `names` all occur in the model's name applies.
MODELS = (
    Published(names=("llama-3.1-8b",), cake={128: (1.6, 0.6), 1024: (1.6, 0.4)}),
    Published(names=("llama-3-8b",), cake={}, r_max=10.0),
    Published(names=("llama-2-7b", "chat"), cake={128: (0.9, 2.3), 1024: (1.9, 1.8)}),
    Published(names=("llama-2-13b", "chat"), cake={128: (1.8, 2.0), 1024: (0.5, 0.4)}),
    Published(names=("mistral-7b", "v0.3"), cake={128: (1.0, 0.8), 1024: (0.8, 0.5)}),
    Published(names=("mistral-7b", "v0.2"), cake={}, r_max=10.0),
    Published(names=("qwen2.5-7b",), cake={128: (0.4, 0.6), 1024: (1.5, 0.6)}),
    Published(names=("qwen2-7b",), cake={}, r_max=10.0),
    Published(names=("internlm2_5-7b",), cake={}, r_max=10.0),
)


def published(allocator: str, model: str | None, budget: float | int) -> dict[str, Any]:
    """Return published parameters of `allocator` for a model and budget; empty if there are none.

    Args:
        model: name or path, such as ``meta-llama/Llama-3.1-8B-Instruct``.
        budget: tokens per layer (int), or a ratio (float), for which nothing is published.
    """
    name = (model or "").lower().replace("meta-llama-", "llama-")
    entry = next((m for m in MODELS if all(part in name for part in m.names)), None)
    if entry is None:
        return {}
    if allocator == "cake" and isinstance(budget, int) and budget in entry.cake:
        tau1, tau2 = entry.cake[budget]
        return {"tau1": tau1, "tau2": tau2}
    if allocator == "dynamickv" and entry.r_max is not None:
        return {"r_max": entry.r_max}
    return {}
