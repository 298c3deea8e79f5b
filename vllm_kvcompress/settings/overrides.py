"""What a request may ask for, in ``vllm_xargs`` or in ``SamplingParams.extra_args``."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.parsing import Alias, parse_budget
from vllm_kvcompress.settings.protection import Protection, protection_of, short
from vllm_kvcompress.settings.request_keys import (
    ALIAS,
    BUDGET,
    BY_ROLE,
    CHOICES,
    COMPRESS,
    DECODE_BUDGET,
    LOOKAHEAD,
    refuse_unknown,
)


def settings_for(
    settings: CompressionConfig | None, extra_args: Mapping[str, Any] | None
) -> CompressionConfig | None:
    """The settings of one request; None when its prompt is left whole.

    The request's own keys win over what its alias stands for, and the alias over the engine's.

    Args:
        settings: the engine's; None when it runs without compression.
        extra_args: the request's, with ``kv_compress``, ``kv_budget``, ``kv_decode_budget`` and
            ``kv_lookahead`` if it asks for anything, and ``kv_alias`` if it came under one of the
            model's other names.

    Raises:
        OverrideError: the request asks for something that it may not have, or that does not exist.
    """
    if settings is not None and extra_args:
        refuse_unknown(extra_args)
    choice = _choice(extra_args) if extra_args else None
    named = (extra_args or {}).get(ALIAS)
    if settings is None:
        if (extra_args or {}).get(BY_ROLE):
            asks = BY_ROLE
        elif named is None and (choice is None or choice.compress == "off"):
            return None
        else:
            asks = f"{COMPRESS} or {BUDGET}"
        raise OverrideError(
            "not_allowed",
            f"this server runs without KV-cache compression, but the request asks for {asks};"
            " remove them, or ask the operator for --kv-allow-override",
        )
    if named is not None and not isinstance(named, str):
        raise OverrideError("invalid", f"{ALIAS} must be a name of the model, got {named!r}")
    if choice is not None or named is not None:
        return _override(settings, named, choice or _Choice())
    return settings if settings.enabled else None


def protection_for(settings: CompressionConfig, extra_args: Mapping[str, Any] | None) -> Protection:
    """What of one request's prompt is protected, or is to be found in it.

    Args:
        settings: the engine's.
        extra_args: the request's, with ``kv_protect`` if it asks for anything.

    Raises:
        OverrideError: it asks for something that it may not have, or that does not exist.
    """
    return protection_of(settings.protect, extra_args, free=bool(settings.allow_override))


def by_role_for(settings: CompressionConfig, extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request asks which share of each role's tokens is kept.

    Args:
        settings: the engine's.
        extra_args: the request's, with ``kv_by_role`` if it asks for anything.

    Raises:
        OverrideError: its value is no truth value, or it may not ask: the server says nothing of
            what it keeps, or lets no request choose. What it asks for takes the server's time.
    """
    asked = (extra_args or {}).get(BY_ROLE, False)
    # `true` arrives as 1 from some clients.
    if asked not in (True, False):
        raise OverrideError("invalid", f"{BY_ROLE} must be true or false, got {short(asked)}")
    if asked and not settings.usage:
        raise OverrideError(
            "not_allowed",
            f"{BY_ROLE} is answered in the usage, and this server says nothing there of what it"
            f" keeps; remove {BY_ROLE}, or ask the operator for --kv-usage",
        )
    if asked and not settings.allow_override:
        raise OverrideError(
            "not_allowed",
            f"this server does not let requests ask for {BY_ROLE}; remove it, or ask the operator"
            " for --kv-allow-override",
        )
    return bool(asked)


def refuse_taken(
    settings: CompressionConfig, served: Iterable[str], adapters: Iterable[str]
) -> None:
    """Refuse an alias whose name is taken.

    Args:
        settings: the engine's, with its aliases.
        served: names that the model is served under.
        adapters: names of LoRA modules.

    Raises:
        ConfigError: an alias has the name of the model or of a LoRA module.
    """
    taken = dict.fromkeys(adapters, "a LoRA module") | dict.fromkeys(served, "the model")
    for alias in settings.alias:
        if alias.name in taken:
            raise ConfigError(
                f"alias {alias.name!r} is already the name of {taken[alias.name]}; choose another"
                " for the alias"
            )


class LargestBudgets(NamedTuple):
    """The largest budgets with which requests can run one method."""

    granted: tuple[float | int, ...]
    """Budgets that no request has to name: the engine's own, and those that aliases stand for."""
    named: tuple[float | int, ...]
    """The largest budgets that a request may name itself; empty where it may name none."""


def largest_budgets(settings: CompressionConfig, method: str) -> LargestBudgets:
    """The budgets that decide how much one request by `method` can take at most.

    Where a request may name a method, it may do so under any alias and leave the budget to that.
    A method that only an alias stands for keeps to this alias's own.
    """
    free = bool(settings.allow_override)
    aliases = tuple(alias for alias in settings.alias if alias.budget is not None)
    granted = [alias.budget for alias in aliases if alias.method == method]
    if method == settings.compress:
        granted.append(settings.budget)
    if free and method in {settings.compress, *settings.allow_override}:
        granted = [settings.budget, *(alias.budget for alias in aliases)]
    named = tuple(high for _, high in settings.budget_bounds) or (1.0,)
    return LargestBudgets(tuple(x for x in granted if x is not None), named if free else ())


def how_to_ask(settings: CompressionConfig) -> dict[str, str]:
    """Extra arguments that get a request the first of `settings.variants`; perhaps none.

    Args:
        settings: of an engine that compresses something.
    """
    if settings.enabled:
        return {}
    for method in settings.allow_override:
        if method != "off":
            return {COMPRESS: method}
    return {ALIAS: next(alias.name for alias in settings.alias if alias.method != "off")}


class _Choice(NamedTuple):
    """What a request names."""

    compress: str | None = None
    budget: float | int | None = None
    growing: int | None = None
    lookahead: int | None = None


def _choice(extra_args: Mapping[str, Any]) -> _Choice | None:
    """What a request names; None when it names nothing."""
    if not extra_args.keys() & set(CHOICES):
        return None
    compress, budget = extra_args.get(COMPRESS), extra_args.get(BUDGET)
    if compress is False:
        compress = "off"
    if COMPRESS in extra_args and not isinstance(compress, str):
        raise OverrideError(
            "invalid", f"{COMPRESS} must be off or the name of a method, got {compress!r}"
        )
    if BUDGET in extra_args:
        try:
            budget = parse_budget(budget)
        except ConfigError as e:
            raise OverrideError("invalid", f"kv_{e}") from None
        # `true` arrives as 1.
        if type(budget) is int and budget < 2:
            raise OverrideError(
                "invalid",
                f"{BUDGET} must be a ratio in (0, 1] or at least 2 tokens per layer, got"
                f" {budget!r}; write 1.0 to keep everything",
            )
    growing = _whole(extra_args, DECODE_BUDGET, 2, "2 tokens per layer")
    lookahead = _whole(extra_args, LOOKAHEAD, 0, "0 tokens of the answer")
    return _Choice(compress, budget, growing, lookahead)


def _whole(extra_args: Mapping[str, Any], key: str, least: int, described: str) -> int | None:
    """The whole number that a request names under a key; None where it names none."""
    value = extra_args.get(key)
    # `1` may arrive as 1.0, and `true` as 1.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if key in extra_args and (type(value) is not int or value < least):
        raise OverrideError(
            "invalid",
            f"{key} must be a whole number of at least {described}, got {extra_args[key]!r}",
        )
    return value


@lru_cache(maxsize=4096, typed=True)
def _override(
    settings: CompressionConfig,
    named: str | None,
    choice: _Choice,
) -> CompressionConfig | None:
    compress, budget, growing, lookahead = choice
    alias = None if named is None else _alias(settings, named)
    if alias is not None and choice == _Choice():
        return settings.granted(alias)
    allowed = settings.allow_override
    if not allowed:
        raise OverrideError(
            "not_allowed",
            f"this server does not let requests choose {COMPRESS} or {BUDGET}; remove them, or ask"
            " the operator for --kv-allow-override",
        )
    own = settings.compress if alias is None else alias.method
    permitted = {*allowed, settings.compress, own}
    method = own if compress is None else compress
    if method not in permitted:
        raise OverrideError(
            "not_allowed",
            f"{COMPRESS} must be one of {sorted(permitted)} on this server, got {compress!r}",
        )
    if method == "off":
        for key, value in ((DECODE_BUDGET, growing), (LOOKAHEAD, lookahead)):
            if value is not None:
                raise OverrideError(
                    "invalid",
                    f"{key}={value} needs a method, and this request has none; add {COMPRESS}, one"
                    f" of {sorted(permitted - {'off'})}",
                )
        if compress is None:
            why = "this server compresses only requests that ask for one"
            if alias is not None:
                why = f"{alias.name!r} stands for off"
            raise OverrideError(
                "invalid",
                f"{BUDGET}={budget!r} needs a method, since {why}; add {COMPRESS}, one of"
                f" {sorted(permitted - {'off'})}",
            )
        return None
    if budget is not None:
        _within_bounds(settings, budget)
    elif alias is not None:
        budget = alias.budget
    if growing is not None:
        _may_bound(settings, growing)
    try:
        asked = settings.variant(method, budget)
        more = {"decode_budget": growing, "lookahead": lookahead}
        more = {key: value for key, value in more.items() if value is not None}
        if lookahead is None or lookahead <= asked.resolved_lookahead:
            return CompressionConfig.parse(asked.to_additional_config() | more) if more else asked
    except ConfigError as e:
        raise OverrideError("invalid", f"{COMPRESS}={method!r}: {e}") from None
    # the server keeps no more queries than that
    raise OverrideError(
        "out_of_bounds",
        f"{LOOKAHEAD} must be at most {asked.resolved_lookahead} for {method!r} on this server, got"
        f" {lookahead}",
    )


def _may_bound(settings: CompressionConfig, budget: int) -> None:
    """Refuse a decode budget above the engine's, or where the engine has none."""
    most = settings.decode_budget
    if most is None:
        raise OverrideError(
            "not_allowed",
            f"this server does not bound answers, but the request asks for {DECODE_BUDGET};"
            " remove it, or ask the operator for --kv-decode-budget",
        )
    if budget > most:
        raise OverrideError(
            "out_of_bounds", f"{DECODE_BUDGET} must be at most {most} on this server, got {budget}"
        )


def _alias(settings: CompressionConfig, named: str) -> Alias:
    for alias in settings.alias:
        if alias.name == named:
            return alias
    raise OverrideError(
        "invalid",
        f"{ALIAS} must be one of {sorted(alias.name for alias in settings.alias)} on this server,"
        f" got {named!r}",
    )


def _within_bounds(settings: CompressionConfig, budget: float | int) -> None:
    bounds = settings.budget_bounds
    if not bounds:
        return
    for low, high in bounds:
        if type(low) is type(budget):
            if low <= budget <= high:
                return
            raise OverrideError(
                "out_of_bounds",
                f"{BUDGET} must be between {low} and {high} on this server, got {budget}",
            )
    kind = "a ratio" if isinstance(bounds[0][0], float) else "a whole number of tokens"
    raise OverrideError(
        "out_of_bounds",
        f"{BUDGET} must be {kind} between {bounds[0][0]} and {bounds[0][1]} on this server, got"
        f" {budget}",
    )
