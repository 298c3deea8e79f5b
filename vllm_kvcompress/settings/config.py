"""Every setting, with its unit, default and check."""

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.allocators import ALLOCATORS
from vllm_kvcompress.methods.base import Allocator, Reads, Scorer, Selector, build, choose, closest
from vllm_kvcompress.methods.page_plan import PagePlan, page_plan
from vllm_kvcompress.methods.presets import (
    CAOTES,
    CUSTOM,
    METHODS,
    PRESETS,
    Merge,
    Params,
    Preset,
    least_window,
    refuse_base,
    refuse_nonsense,
    refuse_window,
    usual_window,
)
from vllm_kvcompress.methods.prompt import Prompt
from vllm_kvcompress.methods.published import published
from vllm_kvcompress.methods.scorers import SCORERS
from vllm_kvcompress.methods.selectors import SELECTORS, Chunks
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.settings.decode import USUAL_WINDOW, DecodeSettings, least_decode_budget
from vllm_kvcompress.settings.lookahead import LookaheadSettings, judges_by_window
from vllm_kvcompress.settings.parsing import (
    Alias,
    Bounds,
    one_sentence,
    parse_aliases,
    parse_bounds,
    parse_budget,
    parse_merge,
    parse_methods,
    plain,
    whole_tokens,
)
from vllm_kvcompress.settings.pieces import PieceSettings
from vllm_kvcompress.settings.protection import ProtectSettings

MAX_WINDOW = 1024
_OF_THE_ENGINE = {"min_prompt", "min_output", "pressure", "model", "log_requests", "usage"}
for _settings in (DecodeSettings, PieceSettings, LookaheadSettings, ProtectSettings):
    _OF_THE_ENGINE |= {*_settings.model_fields}
_FOR_REQUESTS = {"allow_override", "budget_bounds", "alias"}


class CompressionConfig(DecodeSettings, PieceSettings, LookaheadSettings, ProtectSettings):
    """Settings of one engine, frozen and hashable.

    Every field is a key of ``--kv-compress-config JSON`` and of
    ``additional_config={"kvcompress": {...}}``; those of `FLAGS` in engine/startup/cli_args.py are
    flags too. Use `parse`: it says in one sentence what is wrong.
    """

    compress: str = "off"
    """off, a name in PRESETS, or custom, whose parts are `allocator`, `scorer` and `selector`."""
    budget: float | int = 0.2
    """Ratio of the prompt in (0, 1], or a whole number of tokens per layer; window included."""
    window: int | None = Field(default=None, ge=0, le=MAX_WINDOW)
    """Observation window: last tokens of a prompt, always kept; None takes the preset's."""
    min_prompt: int = Field(default=1024, ge=0)
    """Prompts of fewer tokens are left whole."""
    min_output: int = Field(default=2, ge=2)
    """Requests for fewer tokens are left whole; an answer of one token reads nothing back."""
    pressure: float = Field(default=0.0, ge=0, le=1)
    """A prompt is left whole while less of the pool is in use, the prompt included."""
    allow_override: tuple[str, ...] = ()
    """Methods that a request may ask for instead, off among them if it may opt out; or "all"."""
    budget_bounds: tuple[Bounds, ...] = ()
    """Smallest and largest budget that a request may ask for, as ratios, as tokens or as both."""
    alias: tuple[Alias, ...] = ()
    """Further names of the model, each with what it stands for: ``{"llama@kv0.2": "cake:0.2"}``."""
    usage: bool = False
    """Say in the usage of a compressed answer what was kept."""
    allocator: str | None = None
    """How much each layer keeps; None takes the preset's."""
    scorer: str | None = None
    """Which tokens matter; None takes the preset's."""
    base: str | None = None
    """The scorer from which caote and fastcaote take their weights: snapkv, tova or h2o."""
    selector: str | None = None
    """How scores become positions; None takes the preset's."""
    merge: Merge | None = None
    """Fold evicted tokens into their nearest kept ones (D2O), or only their "values", which
    leaves keys as they are; None takes the preset's."""
    allocator_params: Params = ()
    """Parameters of the allocator, as an object: ``{"beta": 10}``."""
    scorer_params: Params = ()
    """Parameters of the scorer, as an object: ``{"kernel": 5}``."""
    selector_params: Params = ()
    """Parameters of the selector, as an object: ``{"size": 20}``."""
    model: str | None = None
    """Model whose published parameters are used where none are given; an engine fills it in."""
    log_requests: bool = False
    """Log one line per compressed request: tokens before and after, and per layer."""

    # -- checks -------------------------------------------------------------------------------

    @field_validator("compress", mode="before")
    @classmethod
    def _known_method(cls, value: Any) -> str:
        # YAML reads a bare off as False.
        name = "off" if value is False else str(value)
        choose("compress", dict.fromkeys(METHODS), name)
        return name

    @field_validator("budget", mode="before")
    @classmethod
    def _budget(cls, value: Any) -> float | int:
        return parse_budget(value)

    @field_validator("window", "min_prompt", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return whole_tokens(value)

    @field_validator("min_output", "pressure", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ConfigError(f"must be a number, got {value!r}")
        return value

    @field_validator("allow_override", mode="before")
    @classmethod
    def _methods(cls, value: Any) -> tuple[str, ...]:
        return parse_methods(value)

    @field_validator("budget_bounds", mode="before")
    @classmethod
    def _bounds(cls, value: Any) -> tuple[Bounds, ...]:
        return parse_bounds(value)

    @field_validator("merge", mode="before")
    @classmethod
    def _merge(cls, value: Any) -> Merge | None:
        return parse_merge(value)

    @field_validator("alias", mode="before")
    @classmethod
    def _aliases(cls, value: Any) -> tuple[Alias, ...]:
        return parse_aliases(value)

    @field_validator("allocator_params", "scorer_params", "selector_params", mode="before")
    @classmethod
    def _sorted_items(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            items = ((str(key), plain(item)) for key, item in value.items())
            return tuple(sorted(items, key=lambda item: item[0]))
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> "CompressionConfig":
        if self.budget_bounds and not self.allow_override:
            raise ConfigError(
                "budget_bounds needs allow_override, without which requests may ask for nothing;"
                " add --kv-allow-override all, or remove budget_bounds"
            )
        for name in self.allow_override:
            try:
                self.variant(name)
            except ConfigError as e:
                raise ConfigError(f"allow_override={name!r}: {e}") from None
        for alias in self.alias:
            try:
                self.granted(alias)
            except ConfigError as e:
                raise ConfigError(f"alias {alias.name!r}: {e}") from None
        if not self.enabled:
            return self
        parts, window = self.parts, self.resolved_window
        refuse_base(parts.scorer, self.base, dict(self.scorer_params))
        allocator, scorer = self.build_allocator(), self.build_scorer()
        refuse_nonsense(parts, allocator, scorer, self.build_selector())
        reads = allocator.reads | scorer.reads
        least = least_window(reads)
        bounded = self.decode_budget is not None
        self.refuse_lookahead_nonsense(self.compress, reads, least, bounded=bounded)
        refuse_window(parts.scorer, reads, window)
        self.refuse_decode_nonsense(self.resolved_decode_window, least, self._chunk)
        self.refuse_piece_nonsense(window, self.min_prompt)
        if isinstance(self.budget, int) and self.budget <= window:
            hint = "; write 1.0 to keep everything" if self.budget == 1 else ""
            raise ConfigError(
                f"budget={self.budget} tokens per layer cannot hold the observation window of"
                f" {window} and one token more; set budget above {window}, or window below{hint}"
            )
        return self

    @classmethod
    def parse(cls, raw: Any) -> "CompressionConfig":
        """Make settings of what a user wrote.

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
        if "compress" not in raw and raw.keys() & {"allocator", "scorer"}:
            raw = {"compress": CUSTOM, **raw}
        # Settings without a method must not switch compression off silently.
        if raw and "compress" not in raw:
            raise ConfigError(
                f"kvcompress settings need a method, got only {sorted(map(str, raw))}; add"
                " --kv-compress cake, or off"
            )
        try:
            return cls.model_validate(dict(raw))
        except ValidationError as e:
            raise ConfigError(one_sentence(e)) from None

    def to_additional_config(self) -> dict[str, Any]:
        """Plain JSON values that `parse` turns back into an equal configuration."""
        plain = self.model_dump(mode="json", exclude_unset=True) | {"compress": self.compress}
        for key in ("allocator_params", "scorer_params", "selector_params"):
            if key in plain:
                plain[key] = dict(getattr(self, key))
        if self.alias:
            plain["alias"] = {alias.name: alias.meaning for alias in self.alias}
        return plain

    # -- meaning ------------------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Whether requests that ask for nothing are compressed."""
        return self.compress != "off"

    @property
    def active(self) -> bool:
        """Whether any request can be compressed."""
        on_request = {*self.allow_override, *(alias.method for alias in self.alias)}
        return self.enabled or bool(on_request - {"off"})

    @property
    def variants(self) -> tuple["CompressionConfig", ...]:
        """The settings that requests may get: the engine's own, and each method's and alias's."""
        others = [name for name in self.allow_override if name not in {"off", self.compress}]
        named = [self.granted(alias) for alias in self.alias]
        requested = [*(self.variant(name) for name in others), *(each for each in named if each)]
        return (self,) * self.enabled + tuple(dict.fromkeys(requested))

    def granted(self, alias: Alias) -> "CompressionConfig | None":
        """The settings that `alias` stands for; None when it compresses nothing.

        Raises:
            ConfigError: its budget does not fit its method.
        """
        return None if alias.method == "off" else self.variant(alias.method, alias.budget)

    def variant(
        self, compress: str | None = None, budget: float | int | None = None
    ) -> "CompressionConfig":
        """These settings with another method or budget.

        A method other than this one's own runs as its preset: the parts, parameters and window of
        the engine's method do not carry over to it.

        Raises:
            ConfigError: the budget does not fit the method.
        """
        name = self.compress if compress is None else compress
        keys = _OF_THE_ENGINE
        if name == self.compress:
            keys = type(self).model_fields.keys() - _FOR_REQUESTS
        values = {key: getattr(self, key) for key in self.model_fields_set & keys}
        values["compress"] = name
        other = name != self.compress and name in PRESETS
        if "lookahead" in values and other and not judges_by_window(_reads_of(name)):
            del values["lookahead"]
        if budget is not None or "budget" not in values:
            values["budget"] = self.budget if budget is None else budget
        return type(self).parse(values)

    @property
    def _base(self) -> str:
        """The scorer from which a caote scorer takes its weights."""
        return self.base or str(dict(self.scorer_params).get("base", "snapkv"))

    @property
    def parts(self) -> Preset:
        """The preset with this configuration's replacements."""
        if self.compress == CUSTOM:
            own = self.allocator or "uniform", self.scorer or "snapkv"
            usual = usual_window(*own, self._base)
            preset = Preset(allocator=own[0], scorer=own[1], window=usual)
        else:
            preset = PRESETS[self.compress]
        allocator, scorer = self.allocator or preset.allocator, self.scorer or preset.scorer
        selector = self.selector or preset.selector
        as_preset = scorer == preset.scorer and scorer not in CAOTES
        names, params = (allocator, scorer, selector), self.scorer_params + self.selector_params
        as_it_is = preset.is_made_of(names, params)
        usual = preset.window if as_preset else usual_window(allocator, scorer, self._base)
        return Preset(
            allocator=allocator,
            scorer=scorer,
            selector=selector,
            window=usual if self.window is None else self.window,
            scorer_params=preset.scorer_params if scorer == preset.scorer else (),
            selector_params=preset.selector_params if selector == preset.selector else (),
            merge=preset.merge if self.merge is None else self.merge,
            lookahead=preset.lookahead if as_preset else 0,
            prompt_window=preset.prompt_window if as_it_is and self.window is None else 0,
            answer_scorer=preset.answer_scorer if as_it_is else "",
        )

    @property
    def resolved_window(self) -> int:
        """Observation window in tokens; a method's own is no longer than its look-ahead."""
        window, ahead = self.parts.window, self.resolved_lookahead
        return min(window, ahead) if ahead and self.window is None else window

    @property
    def resolved_lookahead(self) -> int:
        """Tokens of an answer that its prompt stays whole for; 0 packs it when its prefill ends."""
        return self.parts.lookahead if self.lookahead is None else self.lookahead

    @property
    def resolved_decode_window(self) -> int:
        """Decode window in tokens."""
        usual = min(self.resolved_window, USUAL_WINDOW)
        return usual if self.decode_window is None else self.decode_window

    @property
    def least_decode_budget(self) -> int:
        """Smallest decode budget in tokens that the method can answer with."""
        return least_decode_budget(self.resolved_decode_window, self._chunk)

    @property
    def _chunk(self) -> int:
        """Tokens of the chunks that the method keeps; 0 where it keeps single tokens."""
        selector = self.build_selector()
        return selector.size if isinstance(selector, Chunks) else 0

    def build_allocator(self) -> Allocator:
        name = self.parts.allocator
        defaults = published(name, self.model, self.budget)
        policy: Allocator = build("allocator", ALLOCATORS, name, defaults, self.allocator_params)
        return policy

    def build_scorer(self) -> Scorer:
        base = {} if self.base is None else {"base": self.base}
        defaults = dict(self.parts.scorer_params) | base
        policy: Scorer = build("scorer", SCORERS, self.parts.scorer, defaults, self.scorer_params)
        return policy

    def build_selector(self) -> Selector:
        parts, own = self.parts, self.selector_params
        usual = dict(parts.selector_params)
        policy: Selector = build("selector", SELECTORS, parts.selector, usual, own)
        return policy

    def tokens_per_layer(self, tokens: int) -> int:
        """Mean tokens to keep per layer for a prompt of `tokens`, window included.

        A ratio gives ``max(floor(ratio * tokens), window + 1)``, exact in the ratio as written.
        """
        if isinstance(self.budget, int):
            return self.budget
        return max(math.floor(Fraction(repr(self.budget)) * tokens), self.resolved_window + 1)

    def page_plan(
        self, num_layers: int, tokens: int, block_size: int, spans: Spans = ()
    ) -> PagePlan | None:
        """The plan for a prompt; None if it is shorter than `min_prompt`, or nothing is dropped."""
        if tokens < max(self.min_prompt, 1):
            return None
        own = self.prompt(num_layers, tokens)
        return page_plan(own, block_size, spans, full_share=self.full_share)

    def prompt(self, num_layers: int, tokens: int) -> Prompt:
        total = None
        if not isinstance(self.budget, int) and ALLOCATORS[self.parts.allocator].exact_ratio:
            share = round(Fraction(repr(self.budget)) * tokens * num_layers)
            total = max(share, num_layers * (self.resolved_window + 1))
        return Prompt(
            num_layers=num_layers,
            tokens=tokens,
            window=self.resolved_window,
            budget=self.tokens_per_layer(tokens),
            total=total,
        )


@cache
def _reads_of(method: str) -> Reads:
    """What the preset of this name reads of a prompt."""
    preset = CompressionConfig.parse({"compress": method})
    return preset.build_allocator().reads | preset.build_scorer().reads
