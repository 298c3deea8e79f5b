"""Limits that the operator sets on requests: methods, budgets, formats of kept tokens, aliases."""

from collections.abc import Iterable
from typing import NamedTuple

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.packed_dtype import PACKED_DTYPES, PackedDtype
from vllm_kvcompress.settings.request_keys import ALIAS, COMPRESS


def refuse_taken_names(
    settings: CompressionConfig, served: Iterable[str], adapters: Iterable[str]
) -> None:
    """Refuse an alias that is already a name of the model or of a LoRA module.

    Args:
        settings: settings of the engine, with its aliases.
        served: names under which vLLM serves the model.
        adapters: names of LoRA modules.

    Raises:
        ConfigError: an alias is in `served` or `adapters`.
    """
    taken = dict.fromkeys(adapters, "a LoRA module") | dict.fromkeys(served, "the model")
    for alias in settings.alias:
        if alias.name in taken:
            raise ConfigError(
                f"alias {alias.name!r} is already the name of {taken[alias.name]}; choose another"
                " for the alias"
            )


class Kept(NamedTuple):
    """A budget and a format of kept tokens."""

    budget: float | int
    packed_dtype: PackedDtype | None
    """None for the engine's format."""


class LargestBudgets(NamedTuple):
    """Largest budgets with which requests can run one method, in each format that they can get."""

    granted: tuple[Kept, ...]
    """Budgets that requests get without naming one: the engine's own and those of aliases."""
    named: tuple[Kept, ...]
    """Largest budgets that a request may name; empty if requests may not name one."""


def largest_budgets(settings: CompressionConfig, method: str) -> LargestBudgets:
    """Return the budgets that limit the memory of one request with this method.

    A method in `allow_override` can run with the budget of any alias. A method that only an alias
    offers runs with that alias's budget and format.
    """
    aliases = [
        (alias.method, Kept(alias.budget, alias.packed_dtype))
        for alias in settings.alias
        if alias.budget is not None
    ]
    granted = [kept for name, kept in aliases if name == method]
    if method == settings.compress:
        granted.append(Kept(settings.budget, None))
    if not settings.allow_override:
        return LargestBudgets(tuple(granted), ())
    # If no settings use k4v3, every method runs in the engine's format. Otherwise a request may
    # choose either format.
    formats = PACKED_DTYPES if settings.packs_k4v3 else (None,)
    if method in {settings.compress, *settings.allow_override}:
        budgets = [settings.budget, *(kept.budget for _, kept in aliases)]
        granted = [Kept(budget, name) for budget in budgets for name in formats]
    highs = [high for _, high in settings.budget_bounds] or [1.0]
    named = [Kept(high, name) for high in highs for name in formats]
    return LargestBudgets(tuple(granted), tuple(named))


def override_args(settings: CompressionConfig) -> dict[str, str]:
    """Return extra arguments that select the first of `settings.variants`; {} if it is the default.

    Args:
        settings: settings of an engine that can compress something.
    """
    if settings.enabled:
        return {}
    for method in settings.allow_override:
        if method != "off":
            return {COMPRESS: method}
    return {ALIAS: next(alias.name for alias in settings.alias if alias.method != "off")}
