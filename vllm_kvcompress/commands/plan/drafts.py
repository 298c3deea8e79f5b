"""Drafts of ``--speculative-config``: vLLM's JSON, and the draft model's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvcompress.commands.options import json_object
from vllm_kvcompress.commands.plan.model_shape import ModelShape, figure, heads_of, read_config
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.model_traits import text_config, traits_of
from vllm_kvcompress.refusals.rule import refuse
from vllm_kvcompress.refusals.server import DRAFT_SHAPE, draft_facts
from vllm_kvcompress.refusals.tested import DRAFT_MODELS, DRAFTS

_FLAG = "--speculative-config"
_MODULES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys of the number of MTP modules, by model family."""
_FORMATS = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Parts of a draft model's name by which vLLM recognises the method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """How a server drafts.

    Args:
        method: vLLM's name of the method; empty without drafts.
        tokens: draft tokens per step.
        layers: layers of the draft model, D. They keep every token.
        model: folder or hub name of a draft model of its own; None without one.
        config: its config.json.
        facts: what `refusals.server` reads, as in `Server.options`.
    """

    method: str = ""
    tokens: int = 0
    layers: int = 0
    model: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def max_drafts(self, device: str) -> int:
        """Return the draft tokens of the steps in flight, which may all be rejected.

        With async scheduling, which vLLM uses on CUDA with a draft model, two steps are in flight.
        """
        return self.tokens * (2 if self.layers and device == "cuda" else 1)

    @property
    def model_slots(self) -> int:
        """Return the slots that a draft model writes behind each step's tokens."""
        return self.tokens if self.layers else 0

    def refuse_another_shape(self, target: ModelShape) -> None:
        """Raise ConfigError if the draft model's layers cannot exchange pages with the target's."""
        if self.model is None:
            return
        _, kv_heads, head_dim = heads_of(_layers_config(self.config))
        same = (kv_heads, head_dim) == (target.kv_heads, target.head_dim)
        is_plain = same and traits_of(self.config).window is None
        refuse((DRAFT_SHAPE,), "" if is_plain else self.model, "--kv-compress ")


def drafts_of(given: str | None, model: str, config: Mapping[str, Any]) -> Drafts:
    """Return the drafts of ``--speculative-config``, read as vLLM does.

    Args:
        given: vLLM's JSON; None without drafts.
        model: folder or hub name of the target.
        config: the target's config.json.

    Raises:
        ConfigError: `given` is not a JSON object, or has no number of draft tokens.
    """
    if given is None:
        return Drafts()
    values = {key.replace("-", "_"): value for key, value in json_object(_FLAG, given).items()}
    head, method = values.get("model"), str(values.get("method") or "")
    if head in (DRAFTS, f"[{DRAFTS}]") or method == f"[{DRAFTS}]":
        method = method.strip("[]") or DRAFTS
    if method.endswith("_mtp"):
        method = "mtp"
    if method == "mtp" and head is None:
        head = model
    if isinstance(head, str) and method in ("", "mtp", "draft_model"):
        named = (name for part, name in _FORMATS.items() if part in head.lower())
        method = next(named, method or "draft_model")
    method, layers, modules, draft_config = method or "draft_model", 0, None, config
    if method in DRAFT_MODELS:
        if not isinstance(head, str):
            raise ConfigError(f"{_FLAG} with method {method} needs a model, but it names none")
        draft_config = config if head == model else read_config(head)
        text = _layers_config(draft_config)
        layers = figure(text, "num_hidden_layers")
        if method == "mtp":
            layers = modules = figure(text, *_MODULES)
        if not layers:
            raise ConfigError(
                f"{_FLAG} with method {method} needs draft layers, but the config.json of {head}"
                f" has no {' or '.join(_MODULES) if method == 'mtp' else 'num_hidden_layers'};"
                " name a model that has them, or remove it"
            )
    tokens = values.get("num_speculative_tokens", modules)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ConfigError(
            f"{_FLAG} must set num_speculative_tokens to an integer of at least 1, got {tokens!r}"
        )
    return Drafts(
        method=method,
        tokens=tokens,
        layers=layers,
        model=head if method in DRAFT_MODELS and head != model else None,
        config=draft_config,
        facts=dict(draft_facts(method, values, modules)),
    )


def _layers_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the layers, nested or not."""
    nested = config.get("transformer_layer_config")
    return nested if isinstance(nested, Mapping) else text_config(config)
