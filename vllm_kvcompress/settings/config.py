"""All settings with their defaults and checks."""

import math
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.allocators import ALLOCATORS
from vllm_kvcompress.methods.base import Allocator, Reads, Scorer, Selector, build, choose, closest
from vllm_kvcompress.methods.budget_spec import BudgetSpec
from vllm_kvcompress.methods.page_plan import PagePlan, page_plan
from vllm_kvcompress.methods.presets import (
    CAOTES,
    CUSTOM,
    METHODS,
    PRESETS,
    Merge,
    Params,
    Preset,
    fallback_window,
    min_window,
    refuse_base,
    refuse_meaningless_parts,
    refuse_window,
)
from vllm_kvcompress.methods.published import published
from vllm_kvcompress.methods.scorers import SCORERS
from vllm_kvcompress.methods.selectors import SELECTORS, Chunks
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.settings.decode import MAX_DEFAULT_WINDOW, DecodeSettings, min_decode_budget
from vllm_kvcompress.settings.lookahead import (
    LookaheadSettings,
    current_names,
    scores_by_window,
)
from vllm_kvcompress.settings.packed_dtype import AUTO, K4V3, PackedDtype, PackedSettings
from vllm_kvcompress.settings.parsing import (
    Alias,
    Bounds,
    number,
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
_ENGINE_KEYS = {"min_prompt", "min_output", "pressure", "model", "log_requests", "usage"}
for _settings in (
    DecodeSettings,
    PieceSettings,
    LookaheadSettings,
    ProtectSettings,
    PackedSettings,
):
    _ENGINE_KEYS |= {*_settings.model_fields}
_OVERRIDE_KEYS = {"allow_override", "budget_bounds", "alias"}


class CompressionConfig(
    DecodeSettings, PieceSettings, LookaheadSettings, ProtectSettings, PackedSettings
):
    """Compression settings of an engine or of a request; frozen and hashable.

    Every field is a key of ``--kv-compress-config JSON`` and of
    ``additional_config={"kvcompress": {...}}``. Those in `FLAGS` of engine/startup/cli_args.py are
    flags too. Create it with `parse`, which reports each error in one sentence.
    """

    compress: str = "off"
    """off, a preset of PRESETS, or custom with `allocator`, `scorer` and `selector`."""
    budget: float | int = 0.2
    """Ratio of the prompt in (0, 1], or whole number of tokens per layer; includes the window."""
    window: int | None = Field(default=None, ge=0, le=MAX_WINDOW)
    """Observation window: last prompt tokens, always kept. None uses the preset's."""
    min_prompt: int = Field(default=1024, ge=0)
    """Prompts with fewer tokens stay uncompressed."""
    min_output: int = Field(default=2, ge=2)
    """Requests with a smaller max_tokens stay uncompressed. At least 2, because a request for one
    token never reads the compressed cache."""
    pressure: float = Field(default=0.0, ge=0, le=1)
    """A prompt stays uncompressed while the KV pool, with it, is less full than this share."""
    allow_override: tuple[str, ...] = ()
    """Methods that requests may choose, or "all". Include off to let requests opt out."""
    budget_bounds: tuple[Bounds, ...] = ()
    """Smallest and largest budget that requests may choose: ratios, tokens or one pair of each."""
    alias: tuple[Alias, ...] = ()
    """Other model names and what they mean: ``{"llama@kv0.2": "cake:0.2:k4v3"}``."""
    usage: bool = False
    """Report in the usage of compressed requests how many tokens were kept."""
    allocator: str | None = None
    """How much each layer keeps. None uses the preset's allocator."""
    scorer: str | None = None
    """Which tokens matter. None uses the preset's scorer."""
    base: str | None = None
    """Scorer whose weights caote and fastcaote use: snapkv, tova or h2o."""
    selector: str | None = None
    """How scores become positions. None uses the preset's selector."""
    merge: Merge | None = None
    """True merges evicted tokens into their nearest kept tokens (D2O), "values" merges only their
    values, and False drops them. None uses the preset's."""
    allocator_params: Params = ()
    """Parameters of the allocator: ``{"beta": 10}``."""
    scorer_params: Params = ()
    """Parameters of the scorer: ``{"kernel": 5}``."""
    selector_params: Params = ()
    """Parameters of the selector: ``{"size": 20}``."""
    model: str | None = None
    """Model whose published method parameters are the defaults. The engine sets it."""
    log_requests: bool = False
    """Log one line per compressed request: tokens before and after, and per layer."""

    # -- checks -------------------------------------------------------------------------------

    @field_validator("compress", mode="before")
    @classmethod
    def _parse_compress(cls, value: Any) -> str:
        # YAML parses a bare off as False.
        name = "off" if value is False else str(value)
        choose("compress", dict.fromkeys(METHODS), name)
        return name

    @field_validator("budget", mode="before")
    @classmethod
    def _parse_budget(cls, value: Any) -> float | int:
        return parse_budget(value)

    @field_validator("window", "min_prompt", mode="before")
    @classmethod
    def _parse_prompt_tokens(cls, value: Any) -> Any:
        return whole_tokens(value)

    @field_validator("min_output", "pressure", mode="before")
    @classmethod
    def _parse_number(cls, value: Any) -> Any:
        return number(value)

    @field_validator("allow_override", mode="before")
    @classmethod
    def _parse_methods(cls, value: Any) -> tuple[str, ...]:
        return parse_methods(value)

    @field_validator("budget_bounds", mode="before")
    @classmethod
    def _parse_bounds(cls, value: Any) -> tuple[Bounds, ...]:
        return parse_bounds(value)

    @field_validator("merge", mode="before")
    @classmethod
    def _parse_merge(cls, value: Any) -> Merge | None:
        return parse_merge(value)

    @field_validator("alias", mode="before")
    @classmethod
    def _parse_aliases(cls, value: Any) -> tuple[Alias, ...]:
        return parse_aliases(value)

    @field_validator("allocator_params", "scorer_params", "selector_params", mode="before")
    @classmethod
    def _parse_params(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            items = ((str(key), plain(item)) for key, item in value.items())
            return tuple(sorted(items, key=lambda item: item[0]))
        return value

    @model_validator(mode="after")
    def _check_combination(self) -> "CompressionConfig":
        if self.budget_bounds and not self.allow_override:
            raise ConfigError(
                "budget_bounds needs allow_override, without which requests cannot choose a budget;"
                " add --kv-allow-override all, or remove budget_bounds"
            )
        for name in self.allow_override:
            try:
                self.variant(name)
            except ConfigError as e:
                raise ConfigError(f"allow_override={name!r}: {e}") from None
        for alias in self.alias:
            try:
                self.alias_settings(alias)
            except ConfigError as e:
                raise ConfigError(f"alias {alias.name!r}: {e}") from None
        if not self.enabled:
            return self
        parts, window = self.parts, self.resolved_window
        refuse_base(parts.scorer, self.base, dict(self.scorer_params))
        allocator, scorer = self.build_allocator(), self.build_scorer()
        refuse_meaningless_parts(parts, allocator, scorer, self.build_selector())
        reads = allocator.reads | scorer.reads
        smallest_window = min_window(reads)
        bounded = self.decode_budget is not None
        self.check_lookahead(self.compress, reads, smallest_window, bounded=bounded)
        refuse_window(parts.scorer, reads, window)
        self.check_decode(
            self.resolved_decode_window,
            smallest_window,
            self._chunk,
            packs_groups=self.packs_k4v3,
        )
        self.check_pieces(window, self.min_prompt)
        self.check_packed_dtype(
            self.resolved_packed_dtype, self.budget, self.decode_budget, self.max_whole
        )
        if isinstance(self.budget, int) and self.budget <= window:
            hint = "; write 1.0 to keep every token" if self.budget == 1 else ""
            raise ConfigError(
                f"budget={self.budget} tokens per layer cannot hold the observation window of"
                f" {window} and at least one more token;"
                f" raise budget above {window}, or lower window{hint}"
            )
        return self

    @classmethod
    def parse(cls, raw: Any) -> "CompressionConfig":
        """Parse and check settings as a user wrote them.

        Raises:
            ConfigError: one sentence with the key, the rule, the value received and the fix.
        """
        if isinstance(raw, cls):
            return raw
        if not isinstance(raw, Mapping):
            raise ConfigError(
                f'kvcompress settings must be an object such as {{"compress": "cake"}}, got {raw!r}'
            )
        raw = current_names(raw)
        for key in raw:
            if key not in cls.model_fields:
                raise ConfigError(
                    f"kvcompress setting {key!r} is unknown{closest(str(key), cls.model_fields)}"
                    f" (known: {sorted(cls.model_fields)})"
                )
        if "compress" not in raw and raw.keys() & {"allocator", "scorer"}:
            raw = {"compress": CUSTOM, **raw}
        # Settings without a method would otherwise leave compression off silently.
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
        """Return JSON values that `parse` turns back into an equal configuration."""
        values = self.model_dump(mode="json", exclude_unset=True) | {"compress": self.compress}
        for key in ("allocator_params", "scorer_params", "selector_params"):
            if key in values:
                values[key] = dict(getattr(self, key))
        if self.alias:
            values["alias"] = {alias.name: alias.meaning for alias in self.alias}
        return values

    # -- derived values -----------------------------------------------------------------------

    @property
    def enabled(self) -> bool:
        """Return whether requests without compression settings are compressed."""
        return self.compress != "off"

    @property
    def active(self) -> bool:
        """Return whether any request can be compressed."""
        on_request = {*self.allow_override, *(alias.method for alias in self.alias)}
        return self.enabled or bool(on_request - {"off"})

    @property
    def packs_outputs(self) -> bool:
        """Return whether output tokens are packed in k4v3 too, every `decode_interval` tokens."""
        return (
            self.resolved_packed_dtype == "k4v3"
            and self.decode_budget is None
            and "decode_interval" in self.model_fields_set
        )

    @property
    def keeps_all_tokens(self) -> bool:
        """Return whether compression drops no token: at a budget of 1.0 in k4v3."""
        # A budget of 1 is one token.
        keeps_all = isinstance(self.budget, float) and self.budget == 1.0
        return keeps_all and self.resolved_packed_dtype == K4V3

    @property
    def variants(self) -> tuple["CompressionConfig", ...]:
        """Return all settings a request can get: the engine's, each method's and each alias's."""
        methods = [name for name in self.allow_override if name not in {"off", self.compress}]
        aliases = [self.alias_settings(alias) for alias in self.alias]
        requested = [*(self.variant(name) for name in methods), *filter(None, aliases)]
        return (self,) * self.enabled + tuple(dict.fromkeys(requested))

    def alias_settings(self, alias: Alias) -> "CompressionConfig | None":
        """Return the settings of `alias`; None if its method is off.

        Raises:
            ConfigError: its budget does not fit its method.
        """
        if alias.method == "off":
            return None
        return self.variant(alias.method, alias.budget, alias.packed_dtype)

    def variant(
        self,
        compress: str | None = None,
        budget: float | int | None = None,
        packed_dtype: PackedDtype | None = None,
    ) -> "CompressionConfig":
        """Return these settings with another method, budget or format of kept tokens.

        Another method uses its preset. The parts, parameters and window that were set for this
        method do not carry over.

        Raises:
            ConfigError: the budget does not fit the method.
        """
        name = self.compress if compress is None else compress
        keys = _ENGINE_KEYS
        if name == self.compress:
            keys = type(self).model_fields.keys() - _OVERRIDE_KEYS
        values = {key: getattr(self, key) for key in self.model_fields_set & keys}
        values["compress"] = name
        is_other_preset = name != self.compress and name in PRESETS
        if "lookahead" in values and is_other_preset and not scores_by_window(_reads_of(name)):
            del values["lookahead"]
        if budget is not None or "budget" not in values:
            values["budget"] = self.budget if budget is None else budget
        if packed_dtype is not None:
            values["packed_dtype"] = packed_dtype
        preset_dtype = PRESETS[name].packed_dtype if name in PRESETS else AUTO
        if (values.get("packed_dtype") or preset_dtype) == AUTO and "decode_budget" not in values:
            # Without a decode budget, only the format k4v3 packs outputs.
            values.pop("decode_interval", None)
        return type(self).parse(values)

    @property
    def _base(self) -> str:
        """Return the scorer whose weights a caote scorer uses."""
        return self.base or str(dict(self.scorer_params).get("base", "snapkv"))

    @property
    def parts(self) -> Preset:
        """Return the preset with the allocator, scorer, selector, window and merge set here."""
        if self.compress == CUSTOM:
            allocator, scorer = self.allocator or "uniform", self.scorer or "snapkv"
            window = fallback_window(allocator, scorer, self._base)
            preset = Preset(allocator=allocator, scorer=scorer, window=window)
        else:
            preset = PRESETS[self.compress]
        allocator, scorer = self.allocator or preset.allocator, self.scorer or preset.scorer
        selector = self.selector or preset.selector
        has_preset_scorer = scorer == preset.scorer and scorer not in CAOTES
        names, params = (allocator, scorer, selector), self.scorer_params + self.selector_params
        is_preset = preset.matches(names, params)
        default_window = (
            preset.window if has_preset_scorer else fallback_window(allocator, scorer, self._base)
        )
        return Preset(
            allocator=allocator,
            scorer=scorer,
            selector=selector,
            window=default_window if self.window is None else self.window,
            scorer_params=preset.scorer_params if scorer == preset.scorer else (),
            selector_params=preset.selector_params if selector == preset.selector else (),
            merge=preset.merge if self.merge is None else self.merge,
            lookahead=preset.lookahead if has_preset_scorer else 0,
            prompt_window=preset.prompt_window if is_preset and self.window is None else 0,
            output_scorer=preset.output_scorer if is_preset else "",
            packed_dtype=preset.packed_dtype,
        )

    @property
    def resolved_window(self) -> int:
        """Return the observation window in tokens. A preset's is capped at the look-ahead."""
        window, ahead = self.parts.window, self.resolved_lookahead
        return min(window, ahead) if ahead and self.window is None else window

    @property
    def resolved_packed_dtype(self) -> PackedDtype:
        """Return the format of kept tokens."""
        return self.parts.packed_dtype if self.packed_dtype is None else self.packed_dtype

    @property
    def packs_k4v3(self) -> bool:
        """Return whether requests can be packed in k4v3: some settings of `variants` use it."""
        return any(variant.resolved_packed_dtype == K4V3 for variant in self.variants)

    @property
    def resolved_lookahead(self) -> int:
        """Return the output tokens that compression waits for; 0 compresses after the prefill."""
        return self.parts.lookahead if self.lookahead is None else self.lookahead

    @property
    def resolved_decode_window(self) -> int:
        """Return the decode window in tokens."""
        default = min(self.resolved_window, MAX_DEFAULT_WINDOW)
        return default if self.decode_window is None else self.decode_window

    @property
    def min_decode_budget(self) -> int:
        """Return the smallest decode budget of the method, in tokens per layer."""
        return min_decode_budget(self.resolved_decode_window, self._chunk)

    @property
    def _chunk(self) -> int:
        """Return the tokens per chunk that the method keeps; 0 if it keeps single tokens."""
        selector = self.build_selector()
        return selector.size if isinstance(selector, Chunks) else 0

    def build_allocator(self) -> Allocator:
        name = self.parts.allocator
        defaults = published(name, self.model, self.budget)
        allocator: Allocator = build("allocator", ALLOCATORS, name, defaults, self.allocator_params)
        return allocator

    def build_scorer(self) -> Scorer:
        base = {} if self.base is None else {"base": self.base}
        defaults = dict(self.parts.scorer_params) | base
        scorer: Scorer = build("scorer", SCORERS, self.parts.scorer, defaults, self.scorer_params)
        return scorer

    def build_selector(self) -> Selector:
        parts = self.parts
        defaults = dict(parts.selector_params)
        selector: Selector = build(
            "selector", SELECTORS, parts.selector, defaults, self.selector_params
        )
        return selector

    def tokens_per_layer(self, tokens: int) -> int:
        """Return the mean number of tokens to keep per layer, window included.

        A ratio gives ``max(floor(ratio * tokens), window + 1)``, computed exactly from the
        ratio's decimal digits.

        Args:
            tokens: prompt length.
        """
        if isinstance(self.budget, int):
            return self.budget
        return max(math.floor(Fraction(repr(self.budget)) * tokens), self.resolved_window + 1)

    def page_plan(
        self,
        num_layers: int,
        tokens: int,
        block_size: int,
        spans: Spans = (),
        page_tokens: int | None = None,
    ) -> PagePlan | None:
        """Return the page plan of a prompt; None if it is too short, or frees no block.

        Args:
            page_tokens: as in `page_plan`.
        """
        if tokens < max(self.min_prompt, 1):
            return None
        budget = self.budget_spec(num_layers, tokens)
        return page_plan(
            budget, block_size, spans, full_share=self.full_share, page_tokens=page_tokens
        )

    def budget_spec(self, num_layers: int, tokens: int) -> BudgetSpec:
        """Return the budget of a prompt of `tokens` tokens on `num_layers` layers."""
        total = None
        if not isinstance(self.budget, int) and ALLOCATORS[self.parts.allocator].exact_ratio:
            share = round(Fraction(repr(self.budget)) * tokens * num_layers)
            total = max(share, num_layers * (self.resolved_window + 1))
        return BudgetSpec(
            num_layers=num_layers,
            tokens=tokens,
            window=self.resolved_window,
            budget=self.tokens_per_layer(tokens),
            total=total,
        )


@cache
def _reads_of(method: str) -> Reads:
    """Return the statistics that a preset reads."""
    preset = CompressionConfig.parse({"compress": method})
    return preset.build_allocator().reads | preset.build_scorer().reads
