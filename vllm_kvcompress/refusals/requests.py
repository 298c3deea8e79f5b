"""Choices of a request that its server does not allow."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvcompress.errors import OverrideError, shorten
from vllm_kvcompress.refusals.rule import Rule

if TYPE_CHECKING:
    from vllm_kvcompress.settings.config import CompressionConfig
    from vllm_kvcompress.settings.request_options import RequestChoices


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A request that makes choices besides its alias.

    Args:
        settings: settings of the engine.
        keys: what the request chooses.
        method: the method that it chooses; without a choice its alias's, or the engine's.
        permitted: the methods that it may choose, in alphabetical order.
    """

    settings: "CompressionConfig"
    keys: "RequestChoices"
    method: str
    permitted: list[str]


def _choice_without_method(request: Choice) -> tuple[str, list[str]] | None:
    """Return a choice that needs a method, in a request without one, and the methods."""
    keys, names = request.keys, [name for name in request.permitted if name != "off"]
    if request.method != "off":
        return None
    for key, value in (
        ("kv_decode_budget", keys.decode_budget),
        ("kv_lookahead", keys.lookahead),
        ("kv_packed_dtype", keys.packed_dtype),
    ):
        if value is not None:
            return f"{key}={shorten(value)} needs a method, and this request has none", names
    if keys.compress is not None:
        return None
    why = "this server compresses only requests that name a method"
    if keys.alias is not None:
        why = f"{keys.alias!r} means off"
    return f"kv_budget={shorten(keys.budget)} needs a method, because {why}", names


def _budget_out_of_bounds(request: Choice) -> tuple[str, str] | None:
    """Return the range that a request's budget must be in, and the budget."""
    budget, bounds = request.keys.budget, request.settings.budget_bounds
    if budget is None or request.method == "off" or not bounds:
        return None
    same_kind = [(low, high) for low, high in bounds if type(low) is type(budget)]
    low, high = (same_kind or bounds)[0]
    if same_kind and low <= budget <= high:
        return None
    kind = "a ratio " if isinstance(low, float) else "a whole number of tokens "
    return f"{'' if same_kind else kind}between {low} and {high}", shorten(budget)


CHOICES: tuple[Rule[Choice], ...] = (
    Rule(
        when=lambda r: not r.settings.allow_override,
        error=OverrideError.not_allowed,
        reason="this server does not let requests choose kv_compress or kv_budget",
        fix="remove them, or ask the operator for --kv-allow-override",
    ),
    Rule(
        when=lambda r: r.method not in r.permitted and shorten(r.method),
        error=OverrideError.not_allowed,
        reason="kv_compress must be one of {it.permitted} on this server, got {found}",
        fix="",
    ),
    Rule(
        when=_choice_without_method,
        error=OverrideError.invalid,
        reason="{found[0]}",
        fix="add kv_compress, one of {found[1]}",
    ),
    Rule(
        when=_budget_out_of_bounds,
        error=OverrideError.out_of_bounds,
        reason="kv_budget must be {found[0]} on this server, got {found[1]}",
        fix="",
    ),
    Rule(
        when=lambda r: r.keys.decode_budget is not None and r.settings.decode.budget is None,
        error=OverrideError.not_allowed,
        reason="this server has no decode budget, but the request sets kv_decode_budget",
        fix="remove it, or ask the operator for --kv-decode-budget",
    ),
    Rule(
        when=lambda r: (
            r.keys.decode_budget is not None
            and r.keys.decode_budget > (r.settings.decode.budget or 0)
            and shorten(r.keys.decode_budget)
        ),
        error=OverrideError.out_of_bounds,
        reason="kv_decode_budget must be at most {it.settings.decode.budget} on this server, got"
        " {found}",
        fix="",
    ),
    Rule(
        when=lambda r: r.keys.packed_dtype == "k4v3" and not r.settings.packs_k4v3,
        error=OverrideError.not_allowed,
        reason="this server does not pack prompts in k4v3, but the request sets kv_packed_dtype",
        fix="remove it, or ask the operator for --kv-packed-dtype k4v3",
    ),
)
"""Rules for what a request chooses besides its alias."""
