"""Seam `api`: what a request asks for is checked before anything of it runs.

A wrong value is an HTTP 400 on every endpoint, streaming or not. vLLM checks a request's
parameters when its generator is first asked, and a stream has answered 200 by then; so the check
stands where the generator is made. Offline, and for whatever comes another way, it stands again
where vLLM turns parameters into a request.
"""

import functools
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor

from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.engine.metrics import count_refusal
from vllm_kvcompress.engine.settings import settings_in
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.overrides import settings_for

_INSTALLED = "_kvcompress_api"
_settings: WeakKeyDictionary[InputProcessor, CompressionConfig | None] = WeakKeyDictionary()


def check(processor: InputProcessor, extra_args: Mapping[str, Any] | None) -> None:
    """Refuse a request that asks for what it may not have; nothing happens to any other.

    Args:
        processor: of the engine that is asked; its configuration says what is allowed.
        extra_args: the request's ``vllm_xargs``, or its sampling parameters' `extra_args`.

    Raises:
        VLLMValidationError: which vLLM's server answers with status 400.
    """
    if not extra_args:
        return
    if processor not in _settings:
        _settings[processor] = settings_in(processor.vllm_config.additional_config)
    try:
        settings_for(_settings[processor], extra_args)
    except OverrideError as e:
        count_refusal(e.reason)
        raise VLLMValidationError(str(e), parameter="vllm_xargs") from None


def install() -> None:
    """Wrap the three places where requests enter; safe to call twice."""
    if getattr(InputProcessor, _INSTALLED, False):
        return
    process_inputs = InputProcessor.process_inputs
    generate = AsyncLLM.generate
    create_responses = OpenAIServingResponses.create_responses

    @functools.wraps(process_inputs)
    def processing(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = kwargs["params"] if "params" in kwargs else args[2]
        check(self, getattr(params, "extra_args", None))
        return process_inputs(self, *args, **kwargs)

    @functools.wraps(generate)
    def generating(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = kwargs["sampling_params"] if "sampling_params" in kwargs else args[1]
        check(self.input_processor, getattr(params, "extra_args", None))
        return generate(self, *args, **kwargs)

    @functools.wraps(create_responses)
    async def responding(self: Any, request: Any, *a: Any, **k: Any) -> Any:
        check(self.engine_client.input_processor, request.vllm_xargs)
        return await create_responses(self, request, *a, **k)

    InputProcessor.process_inputs = processing
    AsyncLLM.generate = generating
    OpenAIServingResponses.create_responses = responding
    setattr(InputProcessor, _INSTALLED, True)
