"""VllmHook `aliases`: serve the model under further names, each with its own settings.

The aliases are added to vLLM's list of names, so vLLM checks, lists and refuses them like its own.
A request sent to an alias carries it in its extra arguments, where the scheduler reads it.
"""

import functools
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_kvcompress.engine.frontend.metrics import count_refusal
from vllm_kvcompress.engine.messages.settings import parsed_settings
from vllm_kvcompress.errors import OverrideError, shorten
from vllm_kvcompress.settings.overrides import refuse_taken_names
from vllm_kvcompress.settings.request_keys import ALIAS, XARGS

_NAMES = "_kvcompress_aliases"
_ACTIVE = "_kvcompress_active"

# alias that the current task's request was sent to; None for vLLM's own names
_addressed: ContextVar[str | None] = ContextVar("kvcompress_addressed", default=None)


def resolve(models: Any, request: Any) -> None:
    """Write the alias that a request was sent to into its extra arguments. Safe to call twice.

    Requests to other names stay unchanged. So do requests without a field for extra arguments,
    which only count or read tokens.

    Args:
        models: the server's `OpenAIServingModels`.
        request: a request to any endpoint with a `model` field.

    Raises:
        VLLMValidationError: the client has written an alias there.
    """
    name = getattr(request, "model", None)
    is_alias = name in getattr(models, _NAMES, ())
    if getattr(models, _ACTIVE, False):
        _refuse_other_alias(request, name if is_alias else None)
    if not is_alias:
        _addressed.set(None)
        return
    _addressed.set(name)
    carrier, field = _extra_arguments(request)
    if carrier is not request or _takes_extra_arguments(type(request)):
        sent = getattr(carrier, field, None) or {}
        # vLLM refuses anything but an object later.
        if isinstance(sent, Mapping):
            setattr(carrier, field, {**sent, ALIAS: name})


def _extra_arguments(request: Any) -> tuple[Any, str]:
    """Return the object with a request's extra arguments, and the name of its field."""
    params = getattr(request, "sampling_params", None)
    return (params, "extra_args") if isinstance(params, SamplingParams) else (request, XARGS)


def _refuse_other_alias(request: Any, name: str | None) -> None:
    """Refuse a request whose extra arguments have another alias than its `model`.

    vLLM's render endpoints return requests in which `resolve` has written the alias of `model`.
    """
    sent = getattr(*_extra_arguments(request), None)
    if not isinstance(sent, Mapping) or sent.get(ALIAS, name) == name:
        return
    error = OverrideError.invalid(
        f"{ALIAS} must not be sent over HTTP, got {shorten(sent[ALIAS])}; name the alias in the"
        " request's `model`"
    )
    count_refusal(error.reason)
    raise VLLMValidationError(str(error), parameter=error.parameter)


def _takes_extra_arguments(kind: type[Any]) -> bool:
    """Return whether a request class has `vllm_xargs` or accepts unknown fields."""
    known = getattr(kind, "model_fields", {})
    return "vllm_xargs" in known or getattr(kind, "model_config", {}).get("extra") == "allow"


@functools.cache
def install() -> None:
    """Wrap the methods that set, look up and report model names; safe to call twice."""
    init = OpenAIServingModels.__init__
    model_name = OpenAIServingModels.model_name
    check_model = BaseServing._check_model

    @functools.wraps(init)
    def with_aliases(
        self: Any, engine_client: Any, base_model_paths: list[BaseModelPath], **more: Any
    ) -> None:
        settings = parsed_settings(engine_client.vllm_config.additional_config)
        served = [path.name for path in base_model_paths]
        refuse_taken_names(settings, served, [lora.name for lora in more.get("lora_modules") or ()])
        names = [alias.name for alias in settings.alias]
        root = base_model_paths[0].model_path
        aliases = [BaseModelPath(name=name, model_path=root) for name in names]
        init(self, engine_client, [*base_model_paths, *aliases], **more)
        setattr(self, _NAMES, frozenset(names))
        setattr(self, _ACTIVE, settings.active)

    @functools.wraps(model_name)
    def reporting_alias(self: Any, lora_request: Any = None) -> Any:
        name = _addressed.get()
        return model_name(self, lora_request) if lora_request is not None or name is None else name

    @functools.wraps(check_model)
    async def resolving(self: Any, request: Any) -> Any:
        resolve(self.models, request)
        return await check_model(self, request)

    OpenAIServingModels.__init__ = with_aliases
    OpenAIServingModels.model_name = reporting_alias
    BaseServing._check_model = resolving
