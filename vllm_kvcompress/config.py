"""Every setting, with its unit, default and check; and the presets users type."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.plan import Prompt
from vllm_kvcompress.policies.allocators import ALLOCATORS
from vllm_kvcompress.policies.base import Allocator, Scorer, choose, closest
from vllm_kvcompress.policies.scorers import SCORERS
from vllm_kvcompress.policies.selectors import SELECTORS, Selector

Params = tuple[tuple[str, float | int | str | bool], ...]

MAX_WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What a method's name stands for.

    Args:
        allocator: name in ALLOCATORS.
        scorer: name in SCORERS.
        window: observation window in tokens (METHODS' defaults; 0 where none is needed).
        selector: name in SELECTORS.
    """

    allocator: str
    scorer: str
    window: int
    selector: str = "topk"


PRESETS: Mapping[str, Preset] = {
    "snapkv": Preset(allocator="uniform", scorer="snapkv", window=32),
    "pyramidkv": Preset(allocator="pyramid", scorer="snapkv", window=32),
    "streamingllm": Preset(allocator="uniform", scorer="streamingllm", window=0),
    "cake": Preset(allocator="cake", scorer="cake", window=32),
}

METHODS = ("off", *PRESETS)


class CompressionConfig(BaseModel):
    """Settings of one engine, frozen and hashable.

    On the command line ``--kv-compress``, ``--kv-budget``, ``--kv-window`` and
    ``--kv-min-prompt``; every field through ``--kv-compress-config JSON`` or
    ``additional_config={"kvcompress": {...}}``. Use `parse`: it says in one sentence what is wrong.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    compress: str = "off"
    """Preset: off, snapkv, pyramidkv, streamingllm or cake."""
    budget: float | int = 0.2
    """Ratio of the prompt in (0, 1], or a whole number of tokens per layer; window included."""
    window: int | None = Field(default=None, ge=0, le=MAX_WINDOW)
    """Observation window in tokens, always kept; None takes the preset's."""
    min_prompt: int = Field(default=1024, ge=0)
    """Prompts shorter than this, in tokens, are left whole."""
    allocator: str | None = None
    """How much each layer keeps; None takes the preset's."""
    scorer: str | None = None
    """Which tokens matter; None takes the preset's."""
    selector: str | None = None
    """From scores to positions; None takes the preset's."""
    allocator_params: Params = ()
    """Parameters of the allocator, as an object: ``{"beta": 10}``."""
    scorer_params: Params = ()
    """Parameters of the scorer, as an object: ``{"kernel": 5}``."""
    log_requests: bool = False
    """Log one line per compressed request: tokens before and after, and per layer."""

    # -- checks -------------------------------------------------------------------------------

    @field_validator("compress", mode="before")
    @classmethod
    def _known_method(cls, value: Any) -> str:
        name = "off" if value is False else str(value)  # YAML reads a bare off as False
        choose("compress", dict.fromkeys(METHODS), name)
        return name

    @field_validator("budget", mode="before")
    @classmethod
    def _budget(cls, value: Any) -> float | int:
        return parse_budget(value)

    @field_validator("window", "min_prompt", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ConfigError(f"must be a whole number of tokens, got {value!r}")
        return value

    @field_validator("allocator_params", "scorer_params", mode="before")
    @classmethod
    def _sorted_items(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return tuple(sorted((str(key), item) for key, item in value.items()))
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> "CompressionConfig":
        if not self.enabled:
            return self
        allocator, scorer = self.build_allocator(), self.build_scorer()
        self.build_selector()
        window = self.resolved_window
        if window < 1 and scorer.reads_window:
            raise ConfigError(
                f"scorer {self.names.scorer!r} reads the attention of a window;"
                f" set window to at least 1, got {window}"
            )
        if window < 2 and (allocator.needs_stats or scorer.needs_variance):
            raise ConfigError(
                f"CAKE needs a variance over the window; set window to at least 2, got {window}"
            )
        if isinstance(self.budget, int) and self.budget <= window:
            hint = "; write 1.0 to keep everything" if self.budget == 1 else ""
            raise ConfigError(
                f"budget={self.budget} tokens per layer cannot hold the window of {window} and a"
                f" token more; set budget above {window}, or a smaller window{hint}"
            )
        return self

    @classmethod
    def parse(cls, raw: Any) -> "CompressionConfig":
        """Check settings as a user writes them.

        Raises:
            ConfigError: one sentence with the key, what must hold, what was given and what to do.
        """
        if isinstance(raw, cls):
            return raw
        if not isinstance(raw, Mapping):
            raise ConfigError(
                f'kvcompress settings must be an object such as {{"compress": "cake"}}, got {raw!r}'
            )
        for key in raw:
            if key not in cls.model_fields:
                raise ConfigError(
                    f"kvcompress setting {key!r} is unknown{closest(str(key), cls.model_fields)}"
                    f" (known: {sorted(cls.model_fields)})"
                )
        if raw and "compress" not in raw:  # never silently off
            raise ConfigError(
                f"kvcompress settings need a method, got only {sorted(map(str, raw))}; add"
                " --kv-compress cake, or off"
            )
        try:
            return cls.model_validate(dict(raw))
        except ValidationError as e:
            raise ConfigError(_one_sentence(e)) from None

    def to_additional_config(self) -> dict[str, Any]:
        """Plain JSON values that `parse` turns back into an equal configuration."""
        plain = self.model_dump(mode="json", exclude_defaults=True) | {"compress": self.compress}
        for key in ("allocator_params", "scorer_params"):
            if key in plain:
                plain[key] = dict(getattr(self, key))
        return plain

    # -- meaning ------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        return self.compress != "off"

    @property
    def names(self) -> Preset:
        """The preset with this configuration's replacements."""
        preset = PRESETS[self.compress]
        return Preset(
            allocator=self.allocator or preset.allocator,
            scorer=self.scorer or preset.scorer,
            selector=self.selector or preset.selector,
            window=preset.window if self.window is None else self.window,
        )

    @property
    def resolved_window(self) -> int:
        """Observation window in tokens."""
        return self.names.window

    def build_allocator(self) -> Allocator:
        policy: Allocator = _build(
            "allocator", ALLOCATORS, self.names.allocator, self.allocator_params
        )
        return policy

    def build_scorer(self) -> Scorer:
        policy: Scorer = _build("scorer", SCORERS, self.names.scorer, self.scorer_params)
        return policy

    def build_selector(self) -> Selector:
        return choose("selector", SELECTORS, self.names.selector)

    def tokens_per_layer(self, tokens: int) -> int:
        """Mean tokens to keep per layer for a prompt of `tokens`, window included.

        A ratio gives ``max(floor(ratio * tokens), window + 1)``, exact in the ratio as written.
        """
        if isinstance(self.budget, int):
            return self.budget
        share = Fraction(repr(self.budget)) * tokens
        return max(math.floor(share), self.resolved_window + 1)

    def prompt(self, num_layers: int, tokens: int) -> Prompt:
        return Prompt(
            num_layers=num_layers,
            tokens=tokens,
            window=self.resolved_window,
            budget=self.tokens_per_layer(tokens),
        )


def parse_budget(value: Any) -> float | int:
    """A ratio in (0, 1] or a whole number of tokens >= 1, from a number or its text.

    Raises:
        ConfigError: anything else.
    """
    rule = (
        "budget must be a ratio in (0, 1] such as 0.1, or a whole number of tokens per layer such"
        f" as 1024; got {value!r}"
    )
    number: Any = value
    if isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            try:
                number = float(value)
            except ValueError:
                raise ConfigError(rule) from None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ConfigError(rule)
    if isinstance(number, int):
        if number < 1:
            raise ConfigError(rule)
        return number
    if not 0 < number <= 1:  # NaN fails too
        raise ConfigError(rule)
    return number


def _build(role: str, table: Mapping[str, type[Any]], name: str, params: Params) -> Any:
    policy = choose(role, table, name)
    known = {f.name: f for f in dataclasses.fields(policy)}
    for key, value in params:
        if key not in known:
            raise ConfigError(
                f"{role} {name!r} has no parameter {key!r}{closest(key, known)}"
                f" (known: {sorted(known)})"
            )
        wants = type(known[key].default)
        fits = isinstance(value, wants) or (wants is float and isinstance(value, int))
        if isinstance(value, bool) or not fits:
            raise ConfigError(
                f"{role} {name!r}: {key} must be a {wants.__name__} like {known[key].default!r},"
                f" got {value!r}"
            )
    return policy(**dict(params))


def _one_sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"][:1])
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return text if not key or key in text else f"{key} {text}"
    message = text[:1].lower() + text[1:]
    return f"{key}: {message}, got {first.get('input')!r}"
