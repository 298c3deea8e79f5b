"""All settings with their defaults and checks."""

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache, cached_property, lru_cache
from typing import Annotated, Any

from pydantic import ValidationError, model_validator

from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.base import Reads, build, closest
from vllm_kvcompress.methods.budget_spec import BudgetSpec
from vllm_kvcompress.methods.entry_points import Kind
from vllm_kvcompress.methods.method import Method
from vllm_kvcompress.methods.page_plan import RECENT_TOKENS, PagePlan, page_plan
from vllm_kvcompress.methods.parts.topk import TopK
from vllm_kvcompress.methods.preset import MAX_WINDOW, Preset, scores_by_window
from vllm_kvcompress.methods.published.chunkkv import Chunks
from vllm_kvcompress.methods.registry import (
    BUILT_IN,
    CAOTES,
    CUSTOM,
    METHODS,
    PRESETS,
    SCORERS,
    TABLES,
    fallback_window,
    load_added_methods,
    published,
)
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.refusals.rule import refuse
from vllm_kvcompress.refusals.settings import METHOD, MIN_CHUNKS, REQUESTS
from vllm_kvcompress.settings.declared import (
    DEPLOY_DEFAULT,
    Parsed,
    SettingDeclaration,
    SettingsGroup,
    declare,
)
from vllm_kvcompress.settings.groups import DecodeSettings, LookaheadSettings, PieceSettings
from vllm_kvcompress.settings.packed_dtype import AUTO, GRID, K4V3, OFF, PackedDtype, PackedSettings
from vllm_kvcompress.settings.parsing import (
    Alias,
    Aliases,
    BoundsOfKinds,
    Budget,
    MergeOrUnset,
    MethodName,
    MethodNames,
    Park,
    PartParams,
    Tokens,
    TokensOrUnset,
    number,
    one_sentence,
)
from vllm_kvcompress.settings.protection import ProtectSettings
from vllm_kvcompress.settings.resolved_method import ResolvedMethod

_REUSE_INTERVAL = 512
"""Tokens between two packings of a request whose pages are reused, rounded up to whole pages."""
_MAX_DEFAULT_DECODE_WINDOW = 8
"""Largest default decode window in tokens. A method with a smaller observation window uses that."""
_CACHED = ("given_keys", "parts", "method")
"""Properties of `CompressionConfig` that are derived once and never copied."""


def _names(kind: Kind) -> str:
    """Return the built-in names of a kind for docs/flags.md."""
    *names, last = (f"`{name}`" for name in BUILT_IN[kind])
    return f"{', '.join(names)} or {last}"


_COMPRESS = f"""After the prefill or the look-ahead, compress the KV cache of long prompts with this
method:
{", ".join(METHODS)}.

[Methods](methods.md) explains them. `custom` is a combination of your own, implied if you set only
an allocator or scorer."""


class CompressionConfig(SettingsGroup):
    """Compression settings of an engine or of a request; frozen and hashable.

    Users write one flat object, in ``--kv-compress-config JSON`` or in
    ``additional_config={"kvcompress": {...}}``. A group's settings are keys of the same object.
    KEYS lists all keys in the order of --help. Create a configuration with `parse`, which reports
    each error in one sentence.
    """

    compress: MethodName = declare(
        "off", "METHOD", deployed=DEPLOY_DEFAULT, per_method=True, description=_COMPRESS
    )
    budget: Budget = declare(0.2, "BUDGET", deployed=DEPLOY_DEFAULT, per_method=True)
    """How much of each prompt to keep, the observation window included: a ratio in (0, 1], or a
    whole number of tokens per layer.

    `0.2` is a fifth, `1024` is 1,024 tokens per layer, `1.0` is every token and `1` is one
    token."""
    packed: PackedSettings = PackedSettings()
    window: TokensOrUnset = declare(None, "TOKENS", ge=0, le=MAX_WINDOW, per_method=True)
    """Observation window: the last prompt tokens, which are always kept and whose queries score the
    others."""
    lookahead: LookaheadSettings = LookaheadSettings()
    protection: ProtectSettings = ProtectSettings()
    min_prompt: Tokens = declare(1024, "TOKENS", ge=0, deployed=DEPLOY_DEFAULT)
    """Prompts with fewer tokens stay uncompressed. With --kv-reuse, the default is 0."""
    # At least 2: a request for one token never reads the compressed cache.
    min_output: Annotated[int, Parsed(number)] = declare(2, "TOKENS", ge=2)
    """Prompts of requests with a smaller max_tokens stay uncompressed. With --kv-reuse, the default
    is 1."""
    pressure: Annotated[float, Parsed(number)] = declare(0.0, "SHARE", ge=0, le=1)
    """A prompt stays uncompressed while less than this share of the KV pool is in use, counting the
    prompt itself."""
    decode: DecodeSettings = DecodeSettings()
    pieces: PieceSettings = PieceSettings()
    park: Park = declare(None, "GIB", per_engine=True)
    """GiB of host memory for the pages of preempted compressed requests, which then resume without
    being computed again."""
    allow_override: MethodNames = declare((), "METHODS", deployed="off", per_engine=True)
    """Methods that requests may choose in vllm_xargs.kv_compress: all, or a list separated by
    commas.

    With `off` in the list, a request may stay uncompressed."""
    budget_bounds: BoundsOfKinds = declare(
        (),
        "MIN:MAX",
        deployed="0.05:1.0,256:65536",
        per_engine=True,
    )
    """Smallest and largest budget that requests may choose in vllm_xargs.kv_budget, for example
    0.05:0.5 or 256:4096, or one range of each kind separated by a comma."""
    alias: Aliases = declare((), "NAME=METHOD:BUDGET", repeated=True, per_engine=True)
    """Another model name, whose requests use this method and budget. NAME=METHOD:BUDGET:k4v3 also
    sets --kv-packed-dtype. NAME=off compresses nothing. May be repeated."""
    usage: bool = declare(False, "", deployed=DEPLOY_DEFAULT)
    """Report in the usage of each compressed request how many prompt tokens were kept.

    `--no-kv-usage` turns it off."""
    allocator: str | None = declare(
        None, per_method=True, description=f"How much each layer keeps: {_names('allocator')}."
    )
    scorer: str | None = declare(
        None, per_method=True, description=f"Which tokens matter: {_names('scorer')}."
    )
    selector: str | None = declare(
        None, per_method=True, description=f"How scores become positions: {_names('selector')}."
    )
    allocator_params: PartParams = declare((), per_method=True)
    """Parameters of the allocator, such as `{"beta": 10}`."""
    scorer_params: PartParams = declare((), per_method=True)
    """Parameters of the scorer, such as `{"kernel": 5}`."""
    selector_params: PartParams = declare((), per_method=True)
    """Parameters of the selector, such as `{"size": 20}`."""
    merge: MergeOrUnset = declare(None, per_method=True)
    """`true` merges dropped tokens into their nearest kept ones, `"values"` merges only their
    values, and `false` drops them."""
    log_requests: bool = declare(False)
    """Log one line for each compressed prompt, with its tokens and blocks before and after."""
    model: str | None = declare(None)
    """Name of the model, which selects the method parameters that papers publish for it. The engine
    sets it."""

    # -- checks -------------------------------------------------------------------------------

    @model_validator(mode="before")
    @classmethod
    def _group(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Put the values of each group into a mapping of their own."""
        grouped: dict[str, Any] = {}
        for key, value in values.items():
            group = KEYS[key].group
            place = grouped.setdefault(group, {}) if group else grouped
            place[key] = value
        return grouped

    @model_validator(mode="after")
    def _check_combination(self) -> "CompressionConfig":
        if self.active:
            load_added_methods()
        refuse(REQUESTS, self)
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
        if self.enabled:
            refuse(METHOD, self)
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
        for key in raw:
            if key not in KEYS:
                raise ConfigError(
                    f"kvcompress setting {key!r} is unknown{closest(str(key), KEYS)}"
                    f" (known: {sorted(KEYS)})"
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
            raise ConfigError(one_sentence(e, KEYS)) from None

    def to_additional_config(self) -> dict[str, Any]:
        """Return JSON values that `parse` turns back into an equal configuration."""
        values: dict[str, Any] = {}
        dump = self.model_dump(mode="json", exclude_unset=True, by_alias=True)
        for name, value in dump.items():
            values |= value if isinstance(getattr(self, name), SettingsGroup) else {name: value}
        values["compress"] = self.compress
        for key in ("allocator_params", "scorer_params", "selector_params"):
            if key in values:
                values[key] = dict(getattr(self, key))
        if self.alias:
            values["alias"] = {alias.name: alias.meaning for alias in self.alias}
        return values

    @cached_property
    def given_keys(self) -> frozenset[str]:
        """Return the keys that were set, even if to their default."""
        return frozenset(
            key for key, each in KEYS.items() if each.name in self._holder(key).model_fields_set
        )

    def value(self, key: str) -> Any:
        """Return the value of a key, which may be in a group."""
        return getattr(self._holder(key), KEYS[key].name)

    def _holder(self, key: str) -> SettingsGroup:
        """Return the group that holds a key's value, or these settings."""
        group = KEYS[key].group
        return getattr(self, group) if group else self

    def with_values(self, **values: Any) -> "CompressionConfig":
        """Return these settings with other values for these keys. The values are not checked."""
        changed: dict[str, Any] = {}
        for key, value in values.items():
            group, name = KEYS[key].group, KEYS[key].name
            if group:
                old = changed.get(group, getattr(self, group))
                changed[group] = old.model_copy(update={name: value})
            else:
                changed[name] = value
        return self.model_copy(update=changed)

    def in_whole_blocks(self, block_size: int) -> "CompressionConfig":
        """Return these settings with the default interval and piece rounded to whole KV blocks.

        Hybrid models size a block to their recurrent state, for example 528 tokens, and no fixed
        default is a multiple of such a block. The interval and the piece become the largest
        multiples of the block up to their defaults, but at least one block. The interval is also at
        least the decode window. Values that the user set stay as they are, and are refused if they
        do not fit.

        Args:
            block_size: tokens per KV block.
        """
        return _in_whole_blocks(self, self.given_keys, block_size)

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
        """Return whether output tokens are packed in k4v3 too."""
        return self.enabled and (
            self.reuses_pages
            or (
                self.resolved_packed_dtype == "k4v3"
                and self.decode.budget is None
                and "interval" in self.decode.model_fields_set
            )
        )

    @property
    def reuses_pages(self) -> bool:
        """Return whether packed pages enter the prefix cache, for later requests."""
        return self.packed.reuse != OFF and self.keeps_all_tokens

    @property
    def resolved_min_prompt(self) -> int:
        """Return the tokens below which prompts stay uncompressed.

        If pages are reused, the default is 0, because chats begin with short prompts.
        """
        is_default = "min_prompt" not in self.model_fields_set
        return 0 if self.reuses_pages and is_default else self.min_prompt

    @property
    def resolved_min_output(self) -> int:
        """Return the `max_tokens` below which prompts stay uncompressed.

        If pages are reused, the default is 1: later requests read the pages.
        """
        is_default = "min_output" not in self.model_fields_set
        return 1 if self.reuses_pages and is_default else self.min_output

    def output_interval(self, page_tokens: int) -> int:
        """Return the tokens between two packings of an output, rounded up to whole packed pages."""
        tokens = self.decode.interval
        if self.reuses_pages:
            tokens = _REUSE_INTERVAL
        return -(-tokens // page_tokens) * page_tokens

    def grid_cell(self, page_tokens: int | None) -> int | None:
        """Return the tokens between two packings on the grid of `--kv-reuse grid`; else None.

        Args:
            page_tokens: tokens in a packed page; None if it holds those of an ordinary page.
        """
        if page_tokens is None or not self.reuses_pages or self.packed.reuse != GRID:
            return None
        return -(-_REUSE_INTERVAL // page_tokens) * page_tokens

    @property
    def recent_tokens(self) -> int:
        """Return the minimum of the last tokens that k4v3 leaves in 16 bits.

        It is 0 on the grid, where a token's position alone decides which tokens before it are
        packed, and where dropped tokens are merged into kept ones: no other request may share a
        block that merging writes to, and only the last block of a prompt is never shared.
        """
        is_grid = self.reuses_pages and self.packed.reuse == GRID
        merges = self.method.merge and not self.keeps_all_tokens
        return 0 if is_grid or merges else RECENT_TOKENS

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
        is_other = name != self.compress
        dropped = {
            key for key, each in KEYS.items() if each.per_engine or (is_other and each.per_method)
        }
        values = {key: self.value(key) for key in self.given_keys - dropped}
        values["compress"] = name
        is_other_preset = is_other and name in PRESETS
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
        return str(dict(self.scorer_params).get("base", "snapkv"))

    @cached_property
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
        return self.parts.packed_dtype if self.packed.dtype is None else self.packed.dtype

    @property
    def packs_k4v3(self) -> bool:
        """Return whether requests can be packed in k4v3: some settings of `variants` use it."""
        return any(variant.resolved_packed_dtype == K4V3 for variant in self.variants)

    @property
    def resolved_lookahead(self) -> int:
        """Return the output tokens that compression waits for; 0 compresses after the prefill."""
        return self.parts.lookahead if self.lookahead.tokens is None else self.lookahead.tokens

    @property
    def resolved_decode_window(self) -> int:
        """Return the decode window in tokens."""
        default = min(self.resolved_window, _MAX_DEFAULT_DECODE_WINDOW)
        return default if self.decode.window is None else self.decode.window

    @property
    def min_decode_budget(self) -> int:
        """Return the smallest decode budget of the method, in tokens per layer."""
        return self.resolved_decode_window + max(MIN_CHUNKS * self.chunk_size, 1)

    @property
    def chunk_size(self) -> int:
        """Return the tokens per chunk that the method keeps; 0 if it keeps single tokens."""
        selector = self.method.selector
        return selector.size if isinstance(selector, Chunks) else 0

    @cached_property
    def method(self) -> ResolvedMethod:
        """Return the method that these settings describe, built once.

        Raises:
            KeyError: `compress` is "off".
        """
        parts, window = self.parts, self.resolved_window
        method = Method(
            allocator=self._part("allocator", published(parts.allocator, self.model, self.budget)),
            scorer=self._part("scorer", dict(parts.scorer_params)),
            selector=self._part("selector", dict(parts.selector_params)),
            merge=parts.merge,
        )
        after_lookahead = method
        if parts.output_scorer:
            scorer = SCORERS[parts.output_scorer]()
            after_lookahead = replace(method, scorer=scorer, selector=TopK())
        lookahead, prompt_window = self.resolved_lookahead, parts.prompt_window
        return ResolvedMethod(
            allocator=method.allocator,
            scorer=method.scorer,
            selector=method.selector,
            merge=method.merge,
            after_lookahead=after_lookahead,
            decode=self.decode,
            pieces=self.pieces,
            packed_dtype=self.resolved_packed_dtype,
            decode_window=self.resolved_decode_window,
            lookahead=lookahead,
            lookahead_window=lookahead + prompt_window if prompt_window else window,
        )

    def _part(self, kind: Kind, defaults: Mapping[str, Any]) -> Any:
        """Return the allocator, the scorer or the selector with its parameters."""
        params = getattr(self, f"{kind}_params")
        return build(kind, TABLES[kind], getattr(self.parts, kind), defaults, params)

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> "CompressionConfig":
        """Return a copy that derives its own cached values, because `update` may change them."""
        copied = super().model_copy(update=update, deep=deep)
        for name in _CACHED:
            copied.__dict__.pop(name, None)
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        """Return the state to pickle, without cached values, which each process derives itself."""
        state = super().__getstate__()
        fields = {key: value for key, value in state["__dict__"].items() if key not in _CACHED}
        return {**state, "__dict__": fields}

    @property
    def scoring_query_counts(self) -> tuple[int, int]:
        """Return the number of first and of last prompt tokens that score a piece, for reports.

        If compression is off by default, return the largest counts that a request can choose.
        """
        variants = [self] if self.enabled else self.variants
        return max((each.method.scoring_query_counts for each in variants), default=(0, 0))

    @property
    def ring_window(self) -> int:
        """Return the number of last queries that the engine stores per request; 0 for none."""
        return max((variant.method.ring_window for variant in self.variants), default=0)

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
        draft_layers: int = 0,
    ) -> PagePlan | None:
        """Return the page plan of a prompt; None if it is too short, or frees no block.

        Args:
            page_tokens, draft_layers: as in `page_plan`.
        """
        if tokens < max(self.resolved_min_prompt, 1):
            return None
        budget = self.budget_spec(num_layers, tokens)
        return page_plan(
            budget,
            block_size,
            spans,
            full_share=self.protection.full_share,
            page_tokens=page_tokens,
            cell=self.grid_cell(page_tokens) or page_tokens,
            recent_tokens=self.recent_tokens,
            draft_layers=draft_layers,
        )

    def budget_spec(self, num_layers: int, tokens: int) -> BudgetSpec:
        """Return the budget of a prompt of `tokens` tokens on `num_layers` layers."""
        total = None
        if not isinstance(self.budget, int) and self.method.allocator.exact_ratio:
            share = round(Fraction(repr(self.budget)) * tokens * num_layers)
            total = max(share, num_layers * (self.resolved_window + 1))
        return BudgetSpec(
            num_layers=num_layers,
            tokens=tokens,
            window=self.resolved_window,
            budget=self.tokens_per_layer(tokens),
            total=total,
        )


KEYS: Mapping[str, SettingDeclaration] = {each.key: each for each in CompressionConfig.declared()}
"""Every setting by its key, in the order of --help."""
COMPRESS_CONFIG_FLAG = SettingDeclaration(
    key="compress_config",
    metavar="JSON",
    help="Any settings and method parameters, as a JSON object. The flags above win over it.",
)
"""The flag ``--kv-compress-config``, which takes any key."""


@lru_cache(maxsize=256)
def _in_whole_blocks(
    settings: CompressionConfig, given_keys: frozenset[str], block_size: int
) -> CompressionConfig:
    # `given_keys` is part of the cache key: equal settings may differ in which keys were set.
    windows = (variant.resolved_decode_window for variant in settings.variants)
    min_tokens = {"decode_interval": max(windows, default=1), "piece": 1}
    limits = {"decode_interval": settings.decode.budget, "piece": settings.pieces.max_whole}
    defaults = {key: settings.value(key) for key, limit in limits.items() if limit is not None}
    rounded = {
        key: max(tokens // block_size, -(-min_tokens[key] // block_size)) * block_size
        for key, tokens in defaults.items()
        if key not in given_keys and tokens % block_size
    }
    if not rounded:
        return settings
    return CompressionConfig.parse({**settings.to_additional_config(), **rounded})


@cache
def _reads_of(method: str) -> Reads:
    """Return the statistics that a preset reads."""
    return CompressionConfig.parse({"compress": method}).method.reads
