"""VllmHook `api`: check the compression settings of a request before any part of it runs.

A wrong value is answered with HTTP 400 on every endpoint, streaming or not. vLLM checks parameters
when its generator is first awaited, after a stream has answered 200, so we check where the
generator is created. Offline, and for requests that arrive in other ways, we check again where vLLM
turns parameters into a request.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

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
from vllm_kvcompress.engine.frontend.bodies import ignored_keys
from vllm_kvcompress.engine.frontend.by_role import requested_roles
from vllm_kvcompress.engine.frontend.chat_parts import REPORTED, needed_parts
from vllm_kvcompress.engine.frontend.metrics import count_refusal
from vllm_kvcompress.engine.frontend.modalities import (
    forget,
    has_more_than_text,
    modalities_of,
    refuse_untested,
    rendered,
    waits_for_rendering,
)
from vllm_kvcompress.engine.frontend.prompt_limits import check_fits_pool, check_token_budget
from vllm_kvcompress.engine.frontend.protection import protected_spans
from vllm_kvcompress.engine.frontend.transfers import (
    PARAMETERS,
    Pulls,
    check_lookahead,
    check_transfer,
    prompts_of,
)
from vllm_kvcompress.engine.messages.settings import active_settings, has_settings
from vllm_kvcompress.engine.messages.spans import attach_spans
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.methods.spans import Roles, Spans
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import by_role_for, protection_for, settings_for
from vllm_kvcompress.settings.request_keys import BY_ROLE, XARGS, misplaced, refuse_misplaced

_INSTALLED = "_kvcompress_api"
HANDLERS = (
    (OpenAIServingChat, "create_chat_completion"),
    (OpenAIServingCompletion, "create_completion"),
    (OpenAIServingResponses, "create_responses"),
)


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


def check(processor: InputProcessor, extra_args: Mapping[str, Any] | None) -> None:
    """Refuse a request with wrong or forbidden compression settings.

    Args:
        processor: input processor of the engine, whose configuration determines the policy.
        extra_args: ``vllm_xargs`` of the request, or `extra_args` of its sampling parameters.

    Raises:
        VLLMValidationError: the request is refused. vLLM's server answers with status 400.
    """
    if not extra_args:
        return
    policy = _policy(processor)
    if policy.switched_off:
        return
    with _counted_refusals():
        request_settings = settings_for(policy.settings, extra_args)
        if policy.settings is not None:
            protection_for(policy.settings, extra_args)
            by_role_for(policy.settings, extra_args)
            check_lookahead(processor.vllm_config, request_settings)
            check_token_budget(request_settings, extra_args, processor.vllm_config)


@contextmanager
def _counted_refusals(parameter: str = XARGS) -> Iterator[None]:
    """Turn an OverrideError into vLLM's validation error, and count it."""
    try:
        yield
    except OverrideError as e:
        count_refusal(e.reason)
        raise VLLMValidationError(str(e), parameter=parameter) from None


def _policy(processor: InputProcessor) -> _Policy:
    if processor not in _policies:
        config = processor.vllm_config.additional_config
        settings = active_settings(config)
        switched_off = has_settings(config) and settings is None
        _policies[processor] = _Policy(settings, switched_off=switched_off)
    return _policies[processor]


def _check_request(
    processor: InputProcessor, prompt: Any, params: Any, request_id: str, *, begins: bool = False
) -> tuple[Spans, Roles]:
    """Run `_checked_spans`, and refuse to pull a prompt that another request has pulled.

    If the request is refused, its items are removed from vLLM's processor cache.
    """
    try:
        checked = _checked_spans(processor, prompt, params)
        policy = _policy(processor)
        if policy.settings is not None and isinstance(params, SamplingParams):
            with _counted_refusals(PARAMETERS):
                policy.pulls.check(
                    processor.vllm_config, params.extra_args, request_id, begins=begins
                )
        return checked
    except VLLMValidationError:
        forget(processor.renderer, prompt)
        raise


def _checked_spans(processor: InputProcessor, prompt: Any, params: Any) -> tuple[Spans, Roles]:
    """Run `check`, and the checks that need the prompt.

    If the prompt waits for rendering, its length is unknown and only `check` and the transfer
    parameters are checked.

    Returns:
        The protected spans of the prompt, and the spans of each role if the request asks for them.
    """
    if not isinstance(params, SamplingParams):
        return (), {}
    config, extra_args, policy = processor.vllm_config, params.extra_args, _policy(processor)
    check(processor, extra_args)
    if policy.settings is not None:
        with _counted_refusals(PARAMETERS):
            check_transfer(config, extra_args, params.n)
    if waits_for_rendering(prompt):
        return (), {}
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    tokens = None if ids is None else len(ids)
    with _counted_refusals():
        refuse_untested(config, policy.settings, params, modalities_of(prompt), tokens or 0)
        spans = protected_spans(config, policy.settings, params, prompt)
        roles = requested_roles(policy.settings, params, prompt)
    check_fits_pool(config, policy.settings, extra_args, tokens, spans)
    return spans, roles


def install() -> None:
    """Wrap the methods where requests enter; safe to call twice."""
    if getattr(InputProcessor, _INSTALLED, False):
        return
    process_inputs = InputProcessor.process_inputs
    generate = AsyncLLM.generate

    @functools.wraps(process_inputs)
    def processing(self: Any, *args: Any, **kwargs: Any) -> Any:
        request_id = kwargs["request_id"] if "request_id" in kwargs else args[0]
        prompt = kwargs["prompt"] if "prompt" in kwargs else args[1]
        params = kwargs["params"] if "params" in kwargs else args[2]
        spans, roles = _check_request(self, prompt, params, request_id)
        request = process_inputs(self, *args, **kwargs)
        if waits_for_rendering(prompt):
            spans, roles = _check_request(self, rendered(request), params, request_id)
        if request.sampling_params is not None:
            attach_spans(request.sampling_params, spans, roles)
        return request

    @functools.wraps(generate)
    def generating(self: Any, *args: Any, **kwargs: Any) -> Any:
        prompt = kwargs["prompt"] if "prompt" in kwargs else args[0]
        params = kwargs["sampling_params"] if "sampling_params" in kwargs else args[1]
        request_id = kwargs["request_id"] if "request_id" in kwargs else args[2]
        _check_request(self.input_processor, prompt, params, request_id, begins=True)
        return generate(self, *args, **kwargs)

    InputProcessor.process_inputs = processing
    AsyncLLM.generate = generating
    for serving, name in HANDLERS:
        chat = serving is not OpenAIServingCompletion
        setattr(serving, name, _checking(getattr(serving, name), chat=chat))
    batch: Any = OpenAIServingChatBatch
    batch.create_batch_chat_completion = _checking_batch(batch.create_batch_chat_completion)
    serving_tokens: Any = ServingTokens
    serving_tokens.serve_tokens = _reporting_refusals(serving_tokens.serve_tokens)
    setattr(InputProcessor, _INSTALLED, True)


def _needed_parts(processor: InputProcessor, request: Any) -> tuple[str, ...] | None:
    """Return the parts of a chat to find: protected ones and those of a role report.

    None for beam search, whose own prompts are not chats.
    """
    settings = _policy(processor).settings
    if getattr(request, "use_beam_search", False):
        return None
    if settings is None:
        return ()
    # Uncompressed requests search for roles too, so that comparisons measure the same work.
    reported = REPORTED if by_role_for(settings, request.vllm_xargs) else ()
    if settings_for(settings, request.vllm_xargs) is None:
        return reported
    return (*protection_for(settings, request.vllm_xargs).words, *reported)


def _check_beams(processor: InputProcessor, request: Any, *, chat: bool) -> None:
    """Refuse beam search that compression cannot serve as requested.

    Each beam step is a request for one token with the engine's settings, which stays uncompressed
    unless it is compressed piece by piece. The operator's protected parts apply to chats only.

    Raises:
        VLLMValidationError: the request is refused.
    """
    settings = _policy(processor).settings
    if settings is None or not getattr(request, "use_beam_search", False):
        return
    if by_role_for(settings, request.vllm_xargs):
        with _counted_refusals():
            raise OverrideError(
                "invalid",
                f"beam search starts other requests, which do not report {BY_ROLE};"
                f" send the request without use_beam_search, or without {BY_ROLE}",
            )
    if not settings.enabled or settings.max_whole is None:
        return
    if chat and has_more_than_text(request.messages):
        with _counted_refusals():
            raise OverrideError(
                "invalid",
                "a prompt with more than text must be compressed after its prefill, and beam search"
                " makes longer prompts from this one, which this server may compress piece by"
                " piece; send it without use_beam_search",
            )
    protection = protection_for(settings, request.vllm_xargs)
    if protection.spans or protection.named or (chat and protection.words):
        with _counted_refusals():
            raise OverrideError(
                "invalid",
                "beam search makes other prompts from this one, which this server may compress"
                " piece by piece without protection; send it without use_beam_search",
            )


def _checking(handler: Any, *, chat: bool) -> Any:
    """Wrap a server handler to check the request first, and note the parts of a chat to find.

    This cannot wait for the generator: the Responses API creates it inside the stream, and beam
    search drops the extra arguments.
    """

    async def checked(self: Any, request: Any, raw_request: Any) -> None:
        resolve(self.models, request)
        processor = self.engine_client.input_processor
        await _refuse_misplaced_settings(processor, request, raw_request)
        check(processor, request.vllm_xargs)
        _check_pull(processor, request)
        _check_beams(processor, request, chat=chat)
        needed_parts.set(_needed_parts(processor, request) if chat else None)

    @functools.wraps(handler)
    async def handling(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        raw_request = args[0] if args else kwargs.get("raw_request")
        # If the request is refused, vLLM tells the prefill server to free its blocks.
        await self._with_kv_transfer_rejection_cleanup(
            checked(self, request, raw_request), request, raw_request
        )
        return await handler(self, request, *args, **kwargs)

    return handling


def _checking_batch(handler: Any) -> Any:
    """Wrap the handler of chat batches; each chat is checked when its generation starts.

    The prefill server is not told of refused batches: a batch has no request id, and vLLM's engine
    crashes without one.
    """

    @functools.wraps(handler)
    async def handling(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        processor = self.engine_client.input_processor
        raw_request = args[0] if args else kwargs.get("raw_request")
        await _refuse_misplaced_settings(processor, request, raw_request)
        _check_pull(processor, request)
        return await handler(self, request, *args, **kwargs)

    return handling


def _reporting_refusals(handler: Any) -> Any:
    """Wrap a handler for which vLLM does not tell the prefill server about refused requests.

    If nothing can be compressed, the handler runs unchanged.
    """

    @functools.wraps(handler)
    async def handling(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        processor = self.engine_client.input_processor
        raw_request = args[0] if args else kwargs.get("raw_request")

        async def checked() -> Any:
            await _refuse_misplaced_settings(processor, request, raw_request)
            return await handler(self, request, *args, **kwargs)

        if _policy(processor).settings is None:
            return await checked()
        return await self._with_kv_transfer_rejection_cleanup(checked(), request, raw_request)

    return handling


async def _refuse_misplaced_settings(
    processor: InputProcessor, request: Any, raw_request: Any
) -> None:
    """Refuse settings outside ``vllm_xargs``, which vLLM ignores.

    A server without compression refuses there what it would refuse in ``vllm_xargs``.

    Raises:
        VLLMValidationError: a setting is in the wrong place.
    """
    policy = _policy(processor)
    if policy.switched_off:
        return
    with _counted_refusals():
        for body, fields, place in await ignored_keys(request, raw_request):
            if policy.settings is None:
                settings_for(None, misplaced(body, fields))
            else:
                refuse_misplaced(body, fields, place)


def _check_pull(processor: InputProcessor, request: Any) -> None:
    """Check the transfer parameters of an HTTP request."""
    extra_args = {PARAMETERS: getattr(request, PARAMETERS, None)}
    if _policy(processor).settings is not None:
        with _counted_refusals(PARAMETERS):
            choices, prompts = getattr(request, "n", None), prompts_of(request)
            beams = bool(getattr(request, "use_beam_search", False))
            check_transfer(processor.vllm_config, extra_args, choices, prompts, beams=beams)
