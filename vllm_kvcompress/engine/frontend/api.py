"""VllmHook `api`: parse and check the options of each request before it runs.

A wrong value is answered with HTTP 400 on every endpoint, streaming or not. vLLM checks parameters
when its generator is first awaited, after a stream has answered 200, so we check in the handler and
where the generator is created. The options then travel in the request's extra arguments to
`process_inputs`, which attaches them for the engine core. Requests that arrive in other ways, such
as those of `LLM`, get their options there.
"""

import copy
import functools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from starlette.requests import Request
from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor

from vllm_kvcompress.engine.frontend.aliases import resolve
from vllm_kvcompress.engine.frontend.metrics import count_refusal
from vllm_kvcompress.engine.frontend.modalities import (
    forget,
    has_more_than_text,
    modalities_of,
    refuse_untested,
    rendered,
    waits_for_rendering,
)
from vllm_kvcompress.engine.frontend.prompt_limits import check_fits_pool
from vllm_kvcompress.engine.frontend.protection.chat_parts import needed_parts
from vllm_kvcompress.engine.frontend.protection.spans import protected_spans
from vllm_kvcompress.engine.frontend.transfers import (
    PARAMETERS,
    Pulls,
    check_lookahead,
    check_transfer,
    prompts_of,
)
from vllm_kvcompress.engine.messages.options import attach_options
from vllm_kvcompress.engine.messages.settings import active_settings, has_settings
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_keys import (
    OPTIONS,
    XARGS,
    misplaced,
    refuse_misplaced,
)
from vllm_kvcompress.settings.request_options import RequestOptions

HANDLERS = (
    (OpenAIServingChat, "create_chat_completion"),
    (OpenAIServingCompletion, "create_completion"),
    (OpenAIServingResponses, "create_responses"),
)
_PARAMS = "sampling_params"
_PARAMS_FIELDS = frozenset(SamplingParams.__annotations__)


# -- enter ----------------------------------------------------------------------------------------


@functools.cache
def install() -> None:
    """Wrap the methods where requests enter; safe to call twice."""
    process_inputs = InputProcessor.process_inputs
    generate = AsyncLLM.generate

    @functools.wraps(process_inputs)
    def processing(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        options = _checked(self, prompt, params, request_id)
        request = process_inputs(self, request_id, prompt, params, *args, **kwargs)
        if options is not None and waits_for_rendering(prompt):
            options = _checked(self, rendered(request), params, request_id, options)
        if options is not None and request.sampling_params is not None:
            attach_options(request.sampling_params, options)
        return request

    @functools.wraps(generate)
    def generating(
        self: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        options = _checked(self.input_processor, prompt, sampling_params, request_id, begins=True)
        if options is not None:
            sampling_params = copy.copy(sampling_params)
            sampling_params.extra_args = _with_options(sampling_params.extra_args, options)
        return generate(self, prompt, sampling_params, request_id, *args, **kwargs)

    InputProcessor.process_inputs = processing
    AsyncLLM.generate = generating
    for serving, name in HANDLERS:
        chat = serving is not OpenAIServingCompletion
        setattr(serving, name, _checking(getattr(serving, name), chat=chat))
    batch: Any = OpenAIServingChatBatch
    batch.create_batch_chat_completion = _checking_batch(batch.create_batch_chat_completion)
    serving_tokens: Any = ServingTokens
    serving_tokens.serve_tokens = _reporting_refusals(serving_tokens.serve_tokens)


def _checking(handler: Any, *, chat: bool) -> Any:
    """Wrap a server handler to check the request first, and note the parts of a chat to find.

    This cannot wait for the generator: the Responses API creates it inside the stream, and beam
    search drops the extra arguments.
    """

    async def checked(self: Any, request: Any, raw_request: Any) -> None:
        resolve(self.models, request)
        processor = self.engine_client.input_processor
        settings = _policy(processor).settings
        beams = bool(getattr(request, "use_beam_search", False))
        with _refusals(processor):
            await _refuse_misplaced_settings(processor, request, raw_request)
            options = _options(processor, request.vllm_xargs)
            if settings is not None:
                _check_pull(processor.vllm_config, request)
            if settings is not None and beams:
                _check_beams(settings, options, request, chat=chat)
        if settings is not None:
            request.vllm_xargs = _with_options(request.vllm_xargs, options)
        # Beam search makes its own prompts, which are not chats.
        needed_parts.set(_needed_parts(options) if chat and not beams else None)

    @functools.wraps(handler)
    async def handling(self: Any, request: Any, raw_request: Any = None, **more: Any) -> Any:
        # If the request is refused, vLLM tells the prefill server to free its blocks.
        await self._with_kv_transfer_rejection_cleanup(
            checked(self, request, raw_request), request, raw_request
        )
        return await handler(self, request, raw_request, **more)

    return handling


def _checking_batch(handler: Any) -> Any:
    """Wrap the handler of chat batches; each chat is checked when its generation starts.

    The prefill server is not told of refused batches: a batch has no request id, and vLLM's engine
    crashes without one.
    """

    @functools.wraps(handler)
    async def handling(self: Any, request: Any, raw_request: Any = None, **more: Any) -> Any:
        processor = self.engine_client.input_processor
        with _refusals(processor):
            await _refuse_misplaced_settings(processor, request, raw_request)
            if _policy(processor).settings is not None:
                _check_pull(processor.vllm_config, request)
        return await handler(self, request, raw_request, **more)

    return handling


def _reporting_refusals(handler: Any) -> Any:
    """Wrap a handler for which vLLM does not tell the prefill server about refused requests.

    If nothing can be compressed, the handler runs unchanged.
    """

    @functools.wraps(handler)
    async def handling(self: Any, request: Any, raw_request: Any = None, **more: Any) -> Any:
        processor = self.engine_client.input_processor

        async def checked() -> Any:
            with _refusals(processor):
                await _refuse_misplaced_settings(processor, request, raw_request)
            return await handler(self, request, raw_request, **more)

        if _policy(processor).settings is None:
            return await checked()
        return await self._with_kv_transfer_rejection_cleanup(checked(), request, raw_request)

    return handling


# -- parse ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Policy:
    """An engine's policy for the compression settings of requests.

    Args:
        settings: settings of the engine; None if nothing can be compressed.
        switched_off: whether the operator gave ``--kv-compress off`` and allows no other method.
            Requests may then set anything, so clients need no change when compression is turned
            off.
        pulls: prompts that requests of this engine have pulled.
    """

    settings: CompressionConfig | None
    switched_off: bool
    pulls: Pulls = field(default_factory=Pulls)


_policies: WeakKeyDictionary[InputProcessor, _Policy] = WeakKeyDictionary()


def _policy(processor: InputProcessor) -> _Policy:
    if processor not in _policies:
        config = processor.vllm_config.additional_config
        settings = active_settings(config)
        switched_off = has_settings(config) and settings is None
        _policies[processor] = _Policy(settings, switched_off=switched_off)
    return _policies[processor]


def _options(processor: InputProcessor, extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """Return a request's options; parse and check them if this process has not done so yet.

    A `RequestOptions` object under the key OPTIONS is trusted: a client's JSON cannot contain one.

    Args:
        processor: input processor of the engine, whose configuration determines the policy.
        extra_args: ``vllm_xargs`` of the request, or `extra_args` of its sampling parameters.
    """
    carried = (extra_args or {}).get(OPTIONS)
    if isinstance(carried, RequestOptions):
        return carried
    policy, config = _policy(processor), processor.vllm_config
    if policy.switched_off:
        return RequestOptions()
    max_model_len = int(config.model_config.max_model_len)
    options = RequestOptions.parse(policy.settings, extra_args, max_model_len)
    check_lookahead(config, options.settings)
    return options


def _with_options(extra_args: Mapping[str, Any] | None, options: RequestOptions) -> dict[str, Any]:
    """Return extra arguments in which the options travel inside this process."""
    return {**(extra_args or {}), OPTIONS: options}


def _needed_parts(options: RequestOptions) -> tuple[str, ...]:
    """Return the protected parts of a chat, which must be found."""
    return () if options.settings is None else options.protection.words


# -- check ----------------------------------------------------------------------------------------


@contextmanager
def _refusals(processor: InputProcessor, prompt: Any = None) -> Iterator[None]:
    """Turn an OverrideError into vLLM's validation error, which its server answers with 400.

    The refusal is counted, and the prompt's items are removed from vLLM's processor cache.
    """
    try:
        yield
    except OverrideError as e:
        count_refusal(e.reason)
        forget(processor.renderer, prompt)
        raise VLLMValidationError(str(e), parameter=e.parameter) from None


def _checked(
    processor: InputProcessor,
    prompt: Any,
    params: Any,
    request_id: str,
    options: RequestOptions | None = None,
    *,
    begins: bool = False,
) -> RequestOptions | None:
    """Return the options of a request after all checks; None if nothing can be compressed.

    If the prompt still waits for rendering, its length is unknown, and the result has no spans.

    Args:
        processor: input processor of the engine.
        prompt: prompt of the request.
        params: its parameters.
        request_id: vLLM's id of the request.
        options: its options if they have been parsed already.
        begins: whether a new request starts here.

    Raises:
        VLLMValidationError: the request is refused.
    """
    if not isinstance(params, SamplingParams):
        return None
    policy, config = _policy(processor), processor.vllm_config
    with _refusals(processor, prompt):
        if options is None:
            options = _options(processor, params.extra_args)
        if policy.settings is None:
            return None
        if options.has_spans:
            return options
        check_transfer(config, params.extra_args, params.n)
        if not waits_for_rendering(prompt):
            options = _with_spans(config, policy.settings, options, prompt, params.max_tokens)
        policy.pulls.check(config, params.extra_args, request_id, begins=begins)
    return options


def _with_spans(
    config: VllmConfig,
    settings: CompressionConfig,
    options: RequestOptions,
    prompt: Any,
    max_tokens: int | None,
) -> RequestOptions:
    """Return the options with the spans of the prompt, after the checks that need the prompt."""
    is_rendered = isinstance(prompt, Mapping)
    ids = prompt.get("prompt_token_ids") if is_rendered else None
    tokens = None if ids is None else len(ids)
    refuse_untested(config, options, modalities_of(prompt), tokens or 0, max_tokens)
    options = replace(
        options,
        spans=protected_spans(config, settings, options, prompt, max_tokens),
        has_spans=is_rendered,
    )
    check_fits_pool(config, settings, options, tokens)
    return options


def _check_pull(config: VllmConfig, request: Any) -> None:
    """Check the transfer parameters of an HTTP request."""
    extra_args = {PARAMETERS: getattr(request, PARAMETERS, None)}
    choices, prompts = getattr(request, "n", None), prompts_of(request)
    beams = bool(getattr(request, "use_beam_search", False))
    check_transfer(config, extra_args, choices, prompts, beams=beams)


def _check_beams(
    settings: CompressionConfig, options: RequestOptions, request: Any, *, chat: bool
) -> None:
    """Refuse beam search that compression cannot serve as requested.

    Each beam step is a request for one token with the engine's settings, which stays uncompressed
    unless it is compressed piece by piece. The operator's protected parts apply to chats only.
    """
    protection = options.protection
    if not settings.enabled or settings.pieces.max_whole is None:
        return
    if chat and has_more_than_text(request.messages):
        problem = (
            "a prompt with more than text must be compressed after its prefill, and beam search"
            " makes longer prompts from this one, which this server may compress piece by"
            " piece; send it without use_beam_search"
        )
    elif protection.spans or protection.named or (chat and protection.words):
        problem = (
            "beam search makes other prompts from this one, which this server may compress"
            " piece by piece without protection; send it without use_beam_search"
        )
    else:
        return
    raise OverrideError.invalid(problem)


async def _refuse_misplaced_settings(
    processor: InputProcessor, request: Any, raw_request: Any
) -> None:
    """Refuse settings outside ``vllm_xargs``, which vLLM ignores.

    A server without compression applies the rules of ``vllm_xargs`` to them.
    """
    policy = _policy(processor)
    if policy.switched_off:
        return
    for body, fields, place in await ignored_keys(request, raw_request):
        if policy.settings is None:
            RequestOptions.parse(None, misplaced(body, fields))
        else:
            refuse_misplaced(body, fields, place)


async def ignored_keys(
    request: Any, raw_request: Any
) -> list[tuple[Mapping[str, Any], Collection[str], str]]:
    """Return the objects in a request body where a client may have misplaced a setting.

    For some APIs, such as Anthropic messages and requests with token ids, vLLM drops unknown keys,
    so the HTTP body is read.

    Args:
        request: request as parsed by vLLM, or converted from another API's request.
        raw_request: HTTP request; None if the request comes from a file.

    Returns:
        Each object with the keys that vLLM reads there, and the place where settings belong.
    """
    body: Any = dict(getattr(request, "model_extra", None) or {})
    if isinstance(raw_request, Request):
        body = await raw_request.json()  # vLLM has parsed it, and Starlette caches the result
    fields = frozenset(type(request).model_fields)
    if not isinstance(body, Mapping):
        return []
    if _PARAMS not in fields:
        return [(body, fields | {XARGS}, XARGS)]
    place = f"{_PARAMS}.extra_args"
    objects: list[tuple[Mapping[str, Any], Collection[str], str]] = [(body, fields, place)]
    if isinstance(body.get(_PARAMS), Mapping):
        objects.append((body[_PARAMS], _PARAMS_FIELDS, place))
    return objects
