"""The compression options of one request, parsed once in the front end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from vllm_kvcompress.errors import ConfigError, OverrideError, shorten
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.refusals.requests import CHOICES, Choice
from vllm_kvcompress.refusals.rule import refuse
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.packed_dtype import PACKED_DTYPES, PackedDtype
from vllm_kvcompress.settings.parsing import Alias, parse_budget
from vllm_kvcompress.settings.protection import Protection, protection_of
from vllm_kvcompress.settings.request_keys import (
    ALIAS,
    BUDGET,
    COMPRESS,
    DECODE_BUDGET,
    LOOKAHEAD,
    PACKED_DTYPE,
    REQUEST_KEYS,
    refuse_unknown,
)


class RequestChoices(NamedTuple):
    """Choices of a request; None for a key that it does not set."""

    compress: str | None = None
    budget: float | int | None = None
    packed_dtype: PackedDtype | None = None
    decode_budget: int | None = None
    lookahead: int | None = None
    alias: str | None = None
    """The alias that the request was sent to."""

    def resolve(self, settings: CompressionConfig) -> CompressionConfig | None:
        """Return the settings of a request; None if its prompt stays uncompressed.

        The request's own choices win over its alias, and the alias over the engine's settings.
        Equal choices give the same object.

        Args:
            settings: settings of the engine.

        Raises:
            OverrideError: a choice is not allowed.
        """
        if self == RequestChoices():
            return settings if settings.enabled else None
        return _resolve(settings, settings.given_keys, self)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Checked options of one request, and the settings that they give on one engine.

    Args:
        choice: the choices, which are the same in every process.
        settings: the settings of the request on this engine; None if its prompt stays uncompressed.
        protection: what the request protects in its prompt.
        spans: protected tokens of its prompt.
        has_spans: whether `spans` have been searched for in the rendered prompt.
    """

    choice: RequestChoices = field(default=RequestChoices())
    settings: CompressionConfig | None = field(default=None, repr=False)
    protection: Protection = field(default=Protection(), repr=False)
    spans: Spans = ()
    has_spans: bool = False

    @classmethod
    def parse(
        cls,
        settings: CompressionConfig | None,
        extra_args: Mapping[str, Any] | None,
        max_model_len: int | None = None,
    ) -> "RequestOptions":
        """Return the options of a request.

        Args:
            settings: settings of the engine; None if it runs without compression.
            extra_args: ``vllm_xargs`` of the request, or ``SamplingParams.extra_args``, with the
                keys of REQUEST_KEYS. ``kv_alias`` is the alias that the request was sent to.
            max_model_len: the longest prompt on this server, in tokens; None does not limit a
                token budget.

        Raises:
            OverrideError: a choice is wrong or not allowed.
        """
        extra_args = extra_args or {}
        if settings is None:
            _refuse_without_compression(extra_args)
            return cls()
        refuse_unknown(extra_args)
        choice = _parse_choice(extra_args)
        if choice.alias is not None and not isinstance(choice.alias, str):
            raise OverrideError.invalid(
                f"{ALIAS} must be a name of the model, got {shorten(choice.alias)}"
            )
        may_choose = bool(settings.allow_override)
        options = cls(
            choice=choice,
            settings=choice.resolve(settings),
            protection=protection_of(settings.protection.words, extra_args, may_choose=may_choose),
        )
        budget = None if options.settings is None else choice.budget
        if isinstance(budget, int) and max_model_len is not None and budget > max_model_len:
            # No prompt could exceed this budget.
            raise OverrideError.out_of_bounds(
                f"{BUDGET} must be at most {max_model_len}, the longest prompt on this server, got"
                f" {shorten(extra_args[BUDGET])}; lower it, or set {COMPRESS} to off",
            )
        return options

    def stays_uncompressed(self, tokens: int, max_tokens: int | None) -> bool:
        """Return whether the prompt stays uncompressed: by choice, or because it is too short.

        Args:
            tokens: prompt length.
            max_tokens: maximum length of the output; None without a limit.
        """
        settings = self.settings
        if settings is None:
            return True
        packs_in_prefill = settings.pieces.max_whole is not None or settings.reuses_pages
        if not packs_in_prefill and max_tokens is not None and max_tokens <= 1:
            return True
        if settings.pieces.max_whole is not None or settings.decode.budget is not None:
            return False
        return tokens < settings.resolved_min_prompt or (
            max_tokens is not None and max_tokens < settings.resolved_min_output
        )

    def __deepcopy__(self, memo: Any) -> "RequestOptions":
        # vLLM copies the sampling parameters that these options travel in. They are immutable.
        return self


def check_form(extra_args: Mapping[str, Any]) -> None:
    """Check the keys and values of a request as on a server that allows every setting.

    Raises:
        OverrideError: a key is unknown, or a value is invalid whatever the server allows.
    """
    refuse_unknown(extra_args)
    _parse_choice(extra_args)
    protection_of((), extra_args, may_choose=True)


def _refuse_without_compression(extra_args: Mapping[str, Any]) -> None:
    """Raise OverrideError if the request chooses anything but `off`."""
    choice = _parse_choice(extra_args)
    is_off = choice == RequestChoices() or (choice.compress == "off" and choice.alias is None)
    if not is_off:
        raise OverrideError.not_allowed(
            "this server runs without KV-cache compression, but the request sets"
            f" {COMPRESS} or {BUDGET}; remove them, or ask the operator for --kv-allow-override",
        )


def _parse_choice(extra_args: Mapping[str, Any]) -> RequestChoices:
    """Return the choices in extra arguments.

    Raises:
        OverrideError: a value is invalid, whatever the server allows.
    """
    compress, budget = extra_args.get(COMPRESS), extra_args.get(BUDGET)
    if compress is False:
        compress = "off"
    if COMPRESS in extra_args and not isinstance(compress, str):
        raise OverrideError.invalid(
            f"{COMPRESS} must be off or the name of a method, got {shorten(compress)}"
        )
    if BUDGET in extra_args:
        try:
            budget = parse_budget(budget)
        except ConfigError as e:
            raise OverrideError.invalid(f"kv_{e}") from None
        # Some clients send `true` as 1.
        if type(budget) is int and budget < REQUEST_KEYS[BUDGET].minimum:
            raise OverrideError.invalid(
                f"{BUDGET} must be a ratio in (0, 1] or at least {REQUEST_KEYS[BUDGET].smallest},"
                f" got {shorten(budget)}; write 1.0 to keep every token",
            )
    decode_budget = _whole_number(extra_args, DECODE_BUDGET)
    lookahead = _whole_number(extra_args, LOOKAHEAD)
    packed_dtype = extra_args.get(PACKED_DTYPE)
    if PACKED_DTYPE in extra_args and packed_dtype not in PACKED_DTYPES:
        raise OverrideError.invalid(
            f"{PACKED_DTYPE} must be {' or '.join(PACKED_DTYPES)}, got {shorten(packed_dtype)}",
        )
    return RequestChoices(
        compress, budget, packed_dtype, decode_budget, lookahead, alias=extra_args.get(ALIAS)
    )


def _whole_number(extra_args: Mapping[str, Any], key: str) -> int | None:
    """Return the whole number under `key`; None if the key is not set."""
    value, declared = extra_args.get(key), REQUEST_KEYS[key]
    # Clients may send 1 as 1.0, and `true` as 1.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if key in extra_args and (type(value) is not int or value < declared.minimum):
        raise OverrideError.invalid(
            f"{key} must be a whole number of at least {declared.smallest}, got"
            f" {shorten(extra_args[key])}",
        )
    return value


@lru_cache(maxsize=4096)
def _resolve(
    settings: CompressionConfig, given_keys: frozenset[str], choice: RequestChoices
) -> CompressionConfig | None:
    """Return the settings of a request that makes a choice.

    `given_keys` is part of the cache key: equal settings may differ in which keys were set. If
    `decode_interval` was set, output tokens are packed in k4v3 too.
    """
    alias = None if choice.alias is None else _alias(settings, choice.alias)
    method = settings.compress if alias is None else alias.method
    # Any request may be sent to an alias, but not every request may add choices of its own.
    if choice != RequestChoices(alias=choice.alias):
        permitted = sorted({*settings.allow_override, settings.compress, method})
        method = method if choice.compress is None else choice.compress
        refuse(CHOICES, Choice(settings=settings, keys=choice, method=method, permitted=permitted))
    if method == "off":
        return None
    budget, packed_dtype, lookahead = choice.budget, choice.packed_dtype, choice.lookahead
    if alias is not None:
        budget = alias.budget if budget is None else budget
        packed_dtype = alias.packed_dtype if packed_dtype is None else packed_dtype
    numbers = {"decode_budget": choice.decode_budget, "lookahead": lookahead}
    numbers = {key: value for key, value in numbers.items() if value is not None}
    try:
        chosen = settings.variant(method, budget, packed_dtype)
        if lookahead is None or lookahead <= chosen.resolved_lookahead:
            if not numbers:
                return chosen
            return CompressionConfig.parse(chosen.to_additional_config() | numbers)
    except ConfigError as e:
        raise OverrideError.invalid(f"{COMPRESS}={method!r}: {e}") from None
    # The engine stores queries for its own look-ahead only.
    raise OverrideError.out_of_bounds(
        f"{LOOKAHEAD} must be at most {chosen.resolved_lookahead} for {method!r} on this server,"
        f" got {shorten(lookahead)}",
    )


def _alias(settings: CompressionConfig, name: str) -> Alias:
    """Return the alias called `name`; raise OverrideError if there is none."""
    for alias in settings.alias:
        if alias.name == name:
            return alias
    raise OverrideError.invalid(
        f"{ALIAS} must be one of {sorted(alias.name for alias in settings.alias)} on this server,"
        f" got {shorten(name)}",
    )
