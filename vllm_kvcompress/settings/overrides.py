"""Compression settings of a request: ``vllm_xargs``, or ``SamplingParams.extra_args``."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.packed_dtype import AUTO, PACKED_DTYPES, PackedDtype
from vllm_kvcompress.settings.parsing import Alias, parse_budget
from vllm_kvcompress.settings.protection import Protection, protection_of, shorten
from vllm_kvcompress.settings.request_keys import (
    ALIAS,
    BUDGET,
    BY_ROLE,
    CHOICES,
    COMPRESS,
    DECODE_BUDGET,
    LOOKAHEAD,
    PACKED_DTYPE,
    refuse_unknown,
)


def settings_for(
    settings: CompressionConfig | None, extra_args: Mapping[str, Any] | None
) -> CompressionConfig | None:
    """Return the settings of one request; None if its prompt stays uncompressed.

    The request's own keys win over its alias, and the alias over the engine's settings.

    Args:
        settings: settings of the engine; None if it runs without compression.
        extra_args: extra arguments of the request. Its choices are the keys of CHOICES;
            ``kv_alias`` is the alias it was sent to.

    Raises:
        OverrideError: a choice is wrong or not allowed.
    """
    if settings is not None and extra_args:
        refuse_unknown(extra_args)
    choice = _choice(extra_args) if extra_args else None
    alias_name = (extra_args or {}).get(ALIAS)
    if settings is None:
        if (extra_args or {}).get(BY_ROLE):
            setting = BY_ROLE
        elif alias_name is None and (choice is None or choice.compress == "off"):
            return None
        else:
            setting = f"{COMPRESS} or {BUDGET}"
        raise OverrideError(
            "not_allowed",
            f"this server runs without KV-cache compression, but the request sets {setting};"
            " remove them, or ask the operator for --kv-allow-override",
        )
    if alias_name is not None and not isinstance(alias_name, str):
        raise OverrideError("invalid", f"{ALIAS} must be a name of the model, got {alias_name!r}")
    if choice is not None or alias_name is not None:
        fields_set = frozenset(settings.model_fields_set)
        return _override(settings, fields_set, alias_name, choice or _Choice())
    return settings if settings.enabled else None


def protection_for(settings: CompressionConfig, extra_args: Mapping[str, Any] | None) -> Protection:
    """Return what a request protects in its prompt.

    Args:
        settings: settings of the engine.
        extra_args: extra arguments of the request, optionally with ``kv_protect``.

    Raises:
        OverrideError: ``kv_protect`` is wrong or not allowed.
    """
    return protection_of(settings.protect, extra_args, may_choose=bool(settings.allow_override))


def by_role_for(settings: CompressionConfig, extra_args: Mapping[str, Any] | None) -> bool:
    """Return whether a request asks for the share of kept tokens per role.

    Args:
        settings: settings of the engine.
        extra_args: extra arguments of the request, optionally with ``kv_by_role``.

    Raises:
        OverrideError: the value is not a bool, the server does not report usage, or requests may
            not choose settings: the report takes CPU time of the API server.
    """
    by_role = (extra_args or {}).get(BY_ROLE, False)
    # Some clients send `true` as 1.
    if by_role not in (True, False):
        raise OverrideError("invalid", f"{BY_ROLE} must be true or false, got {shorten(by_role)}")
    if by_role and not settings.usage:
        raise OverrideError(
            "not_allowed",
            f"{BY_ROLE} adds to the usage report, which this server does not send; remove"
            f" {BY_ROLE}, or ask the operator for --kv-usage",
        )
    if by_role and not settings.allow_override:
        raise OverrideError(
            "not_allowed",
            f"this server does not let requests set {BY_ROLE}; remove it, or ask the operator for"
            " --kv-allow-override",
        )
    return bool(by_role)


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
    # If no settings use k4v3, every method runs in the engine's format.
    formats = packed_dtypes(settings) if settings.packs_k4v3 else (None,)
    if method in {settings.compress, *settings.allow_override}:
        budgets = [settings.budget, *(kept.budget for _, kept in aliases)]
        granted = [Kept(budget, name) for budget in budgets for name in formats]
    highs = [high for _, high in settings.budget_bounds] or [1.0]
    named = [Kept(high, name) for high in highs for name in formats]
    return LargestBudgets(tuple(granted), tuple(named))


def packed_dtypes(settings: CompressionConfig) -> tuple[PackedDtype, ...]:
    """Return the formats of kept tokens that a request may choose.

    Any request may choose auto. k4v3 takes memory and kernels, so a request may choose it only if
    some of the engine's settings use it: its own, those of an allowed method, or an alias.

    Args:
        settings: settings of the engine.

    Returns:
        Nothing if requests may not choose settings.
    """
    if not settings.allow_override:
        return ()
    return PACKED_DTYPES if settings.packs_k4v3 else (AUTO,)


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


class _Choice(NamedTuple):
    """Choices of a request; None for a key that it does not set."""

    compress: str | None = None
    budget: float | int | None = None
    decode_budget: int | None = None
    lookahead: int | None = None
    packed_dtype: PackedDtype | None = None


def _choice(extra_args: Mapping[str, Any]) -> _Choice | None:
    """Return the choices of a request; None if it sets no key of CHOICES."""
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
        # Some clients send `true` as 1.
        if type(budget) is int and budget < 2:
            raise OverrideError(
                "invalid",
                f"{BUDGET} must be a ratio in (0, 1] or at least 2 tokens per layer, got"
                f" {budget!r}; write 1.0 to keep every token",
            )
    decode_budget = _whole_number(extra_args, DECODE_BUDGET, 2, "2 tokens per layer")
    lookahead = _whole_number(extra_args, LOOKAHEAD, 0, "0 output tokens")
    packed_dtype = extra_args.get(PACKED_DTYPE)
    if PACKED_DTYPE in extra_args and packed_dtype not in PACKED_DTYPES:
        raise OverrideError(
            "invalid",
            f"{PACKED_DTYPE} must be {' or '.join(PACKED_DTYPES)}, got {shorten(packed_dtype)}",
        )
    return _Choice(compress, budget, decode_budget, lookahead, packed_dtype)


def _whole_number(
    extra_args: Mapping[str, Any], key: str, minimum: int, described: str
) -> int | None:
    """Return the whole number under `key`; None if the key is not set."""
    value = extra_args.get(key)
    # Clients may send 1 as 1.0, and `true` as 1.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if key in extra_args and (type(value) is not int or value < minimum):
        raise OverrideError(
            "invalid",
            f"{key} must be a whole number of at least {described}, got {extra_args[key]!r}",
        )
    return value


@lru_cache(maxsize=4096, typed=True)
def _override(
    settings: CompressionConfig,
    fields_set: frozenset[str],
    alias_name: str | None,
    choice: _Choice,
) -> CompressionConfig | None:
    """Return the settings of a request that sets a key or was sent to an alias.

    `fields_set` is part of the cache key: equal settings may differ in which fields were set. If
    `decode_interval` was set, output tokens are packed in k4v3 too.

    Raises:
        OverrideError: see `settings_for`.
    """
    compress, budget, decode_budget, lookahead, packed_dtype = choice
    alias = None if alias_name is None else _alias(settings, alias_name)
    if alias is not None and choice == _Choice():
        return settings.alias_settings(alias)
    allowed_methods = settings.allow_override
    if not allowed_methods:
        raise OverrideError(
            "not_allowed",
            f"this server does not let requests choose {COMPRESS} or {BUDGET}; remove them, or ask"
            " the operator for --kv-allow-override",
        )
    default_method = settings.compress if alias is None else alias.method
    permitted = {*allowed_methods, settings.compress, default_method}
    method = default_method if compress is None else compress
    if method not in permitted:
        raise OverrideError(
            "not_allowed",
            f"{COMPRESS} must be one of {sorted(permitted)} on this server, got {compress!r}",
        )
    if method == "off":
        for key, value in (
            (DECODE_BUDGET, decode_budget),
            (LOOKAHEAD, lookahead),
            (PACKED_DTYPE, packed_dtype),
        ):
            if value is not None:
                raise OverrideError(
                    "invalid",
                    f"{key}={value} needs a method, and this request has none; add {COMPRESS}, one"
                    f" of {sorted(permitted - {'off'})}",
                )
        if compress is None:
            why = "this server compresses only requests that name a method"
            if alias is not None:
                why = f"{alias.name!r} means off"
            raise OverrideError(
                "invalid",
                f"{BUDGET}={budget!r} needs a method, because {why}; add {COMPRESS}, one of"
                f" {sorted(permitted - {'off'})}",
            )
        return None
    if budget is not None:
        _check_budget(settings, budget)
    elif alias is not None:
        budget = alias.budget
    if decode_budget is not None:
        _check_decode_budget(settings, decode_budget)
    if packed_dtype is not None:
        _check_packed_dtype(settings, packed_dtype)
    elif alias is not None:
        packed_dtype = alias.packed_dtype
    try:
        chosen = settings.variant(method, budget, packed_dtype)
        numbers = {"decode_budget": decode_budget, "lookahead": lookahead}
        numbers = {key: value for key, value in numbers.items() if value is not None}
        if lookahead is None or lookahead <= chosen.resolved_lookahead:
            if not numbers:
                return chosen
            return CompressionConfig.parse(chosen.to_additional_config() | numbers)
    except ConfigError as e:
        raise OverrideError("invalid", f"{COMPRESS}={method!r}: {e}") from None
    # The engine stores queries for its own look-ahead only.
    raise OverrideError(
        "out_of_bounds",
        f"{LOOKAHEAD} must be at most {chosen.resolved_lookahead} for {method!r} on this server,"
        f" got {lookahead}",
    )


def _check_decode_budget(settings: CompressionConfig, budget: int) -> None:
    """Refuse a decode budget above the engine's, or on an engine without one.

    Raises:
        OverrideError: the request may not have this budget.
    """
    max_budget = settings.decode_budget
    if max_budget is None:
        raise OverrideError(
            "not_allowed",
            f"this server has no decode budget, but the request sets {DECODE_BUDGET};"
            " remove it, or ask the operator for --kv-decode-budget",
        )
    if budget > max_budget:
        raise OverrideError(
            "out_of_bounds",
            f"{DECODE_BUDGET} must be at most {max_budget} on this server, got {budget}",
        )


def _check_packed_dtype(settings: CompressionConfig, packed_dtype: PackedDtype) -> None:
    """Refuse a format of kept tokens that the engine is not prepared for.

    Raises:
        OverrideError: no settings of this engine use the format.
    """
    if packed_dtype not in packed_dtypes(settings):
        raise OverrideError(
            "not_allowed",
            f"this server does not pack prompts in {packed_dtype}, but the request sets"
            f" {PACKED_DTYPE}; remove it, or ask the operator for --kv-packed-dtype"
            f" {packed_dtype}",
        )


def _alias(settings: CompressionConfig, name: str) -> Alias:
    """Return the alias called `name`; raise OverrideError if there is none."""
    for alias in settings.alias:
        if alias.name == name:
            return alias
    raise OverrideError(
        "invalid",
        f"{ALIAS} must be one of {sorted(alias.name for alias in settings.alias)} on this server,"
        f" got {name!r}",
    )


def _check_budget(settings: CompressionConfig, budget: float | int) -> None:
    """Raise OverrideError if the operator's bounds do not allow `budget`."""
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
