"""Seam `api`: check what a request asks for before anything of it runs.

A wrong value is answered with HTTP 400 on every endpoint, streaming or not. vLLM checks a request's
parameters when its generator is first asked, and a stream has answered 200 by then; we therefore
check where the generator is made. Offline, and for requests that come another way, we check again
where vLLM turns parameters into a request.
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
from vllm_kvcompress.engine.frontend.by_role import asked_roles
from vllm_kvcompress.engine.frontend.chat_parts import TOLD, wanted
from vllm_kvcompress.engine.frontend.metrics import count_refusal
from vllm_kvcompress.engine.frontend.modalities import (
    forget,
    held_beside_text,
    refuse_untested,
    rendered,
    shows_more_than_text,
    waits_for_rendering,
)
from vllm_kvcompress.engine.frontend.protection import protected_spans
from vllm_kvcompress.engine.frontend.room import check_reach, check_room
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
    """What an engine's requests may ask for.

    Args:
        settings: the engine's; None when nothing can be compressed.
        switched_off: whether the operator gave ``--kv-compress off`` and allows nothing else. Then
            requests may ask for anything, so that no client needs a change when an operator goes
            back to that.
        pulls: prompts that this engine's requests have pulled.
    """

    settings: CompressionConfig | None
    switched_off: bool
    pulls: Pulls = field(default_factory=Pulls)


_policies: WeakKeyDictionary[InputProcessor, _Policy] = WeakKeyDictionary()


def check(processor: InputProcessor, extra_args: Mapping[str, Any] | None) -> None:
    """Refuse a request that asks for something that it may not have.

    Args:
        processor: the engine's, whose configuration says what is allowed.
        extra_args: the request's ``vllm_xargs``, or its sampling parameters' `extra_args`.

    Raises:
        VLLMValidationError: the request is refused; vLLM's server answers it with status 400.
    """
    if not extra_args:
        return
    policy = _policy(processor)
    if policy.switched_off:
        return
    with _refusing():
        own = settings_for(policy.settings, extra_args)
        if policy.settings is not None:
            protection_for(policy.settings, extra_args)
            by_role_for(policy.settings, extra_args)
            check_lookahead(processor.vllm_config, own)
            check_reach(own, extra_args, processor.vllm_config)


@contextmanager
def _refusing(parameter: str = XARGS) -> Iterator[None]:
    """Answer what a request may not have with vLLM's error, and count it."""
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


def _check_whole(
    processor: InputProcessor, prompt: Any, params: Any, request_id: str, *, begins: bool = False
) -> tuple[Spans, Roles]:
    """Run `_checked_whole`, and refuse to pull what another request has.

    What was processed for a refused prompt is forgotten.
    """
    try:
        checked = _checked_whole(processor, prompt, params)
        policy = _policy(processor)
        if policy.settings is not None and isinstance(params, SamplingParams):
            with _refusing(PARAMETERS):
                policy.pulls.check(
                    processor.vllm_config, params.extra_args, request_id, begins=begins
                )
        return checked
    except VLLMValidationError:
        forget(processor.renderer, prompt)
        raise


def _checked_whole(processor: InputProcessor, prompt: Any, params: Any) -> tuple[Spans, Roles]:
    """Run `check`, and `check_room` where the prompt's tokens are known.

    Of a prompt that waits for its rendering, only what can be judged before.

    Returns:
        What of the prompt is protected, and the tokens of each role where the request asks.
    """
    if not isinstance(params, SamplingParams):
        return (), {}
    config, extra_args, policy = processor.vllm_config, params.extra_args, _policy(processor)
    check(processor, extra_args)
    if policy.settings is not None:
        with _refusing(PARAMETERS):
            check_transfer(config, extra_args, params.n)
    if waits_for_rendering(prompt):
        return (), {}
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    tokens = None if ids is None else len(ids)
    with _refusing():
        refuse_untested(config, policy.settings, params, held_beside_text(prompt), tokens or 0)
        spans = protected_spans(config, policy.settings, params, prompt)
        roles = asked_roles(policy.settings, params, prompt)
    check_room(config, policy.settings, extra_args, tokens, spans)
    return spans, roles


def install() -> None:
    """Wrap the places where requests enter; safe to call twice."""
    if getattr(InputProcessor, _INSTALLED, False):
        return
    process_inputs = InputProcessor.process_inputs
    generate = AsyncLLM.generate

    @functools.wraps(process_inputs)
    def processing(self: Any, *args: Any, **kwargs: Any) -> Any:
        request_id = kwargs["request_id"] if "request_id" in kwargs else args[0]
        prompt = kwargs["prompt"] if "prompt" in kwargs else args[1]
        params = kwargs["params"] if "params" in kwargs else args[2]
        spans, roles = _check_whole(self, prompt, params, request_id)
        request = process_inputs(self, *args, **kwargs)
        if waits_for_rendering(prompt):
            spans, roles = _check_whole(self, rendered(request), params, request_id)
        if request.sampling_params is not None:
            attach_spans(request.sampling_params, spans, roles)
        return request

    @functools.wraps(generate)
    def generating(self: Any, *args: Any, **kwargs: Any) -> Any:
        prompt = kwargs["prompt"] if "prompt" in kwargs else args[0]
        params = kwargs["sampling_params"] if "sampling_params" in kwargs else args[1]
        request_id = kwargs["request_id"] if "request_id" in kwargs else args[2]
        _check_whole(self.input_processor, prompt, params, request_id, begins=True)
        return generate(self, *args, **kwargs)

    InputProcessor.process_inputs = processing
    AsyncLLM.generate = generating
    for serving, name in HANDLERS:
        chat = serving is not OpenAIServingCompletion
        setattr(serving, name, _checking(getattr(serving, name), chat=chat))
    batch: Any = OpenAIServingChatBatch
    batch.create_batch_chat_completion = _checking_batch(batch.create_batch_chat_completion)
    tokens: Any = ServingTokens
    tokens.serve_tokens = _telling_of_refusals(tokens.serve_tokens)
    setattr(InputProcessor, _INSTALLED, True)


def _words(processor: InputProcessor, request: Any) -> tuple[str, ...] | None:
    """The parts of a chat that are to be found: what is protected, and what is asked about.

    None for beam search: it makes other prompts of a chat, which are no chats.
    """
    settings = _policy(processor).settings
    if getattr(request, "use_beam_search", False):
        return None
    if settings is None:
        return ()
    # Of a prompt that is left whole as well: both sides of a comparison pay for the search.
    asked = TOLD if by_role_for(settings, request.vllm_xargs) else ()
    if settings_for(settings, request.vllm_xargs) is None:
        return asked
    return (*protection_for(settings, request.vllm_xargs).words, *asked)


def _check_beams(processor: InputProcessor, request: Any, *, chat: bool) -> None:
    """Refuse beam search where its prompts may be packed and should not be, or should be protected.

    Each of its steps is a request by the engine's own settings for one token, which is left whole
    unless it is packed piece by piece. The operator's words concern chats alone.

    Raises:
        VLLMValidationError: it is refused.
    """
    settings = _policy(processor).settings
    if settings is None or not getattr(request, "use_beam_search", False):
        return
    if by_role_for(settings, request.vllm_xargs):
        with _refusing():
            raise OverrideError(
                "invalid",
                f"beam search makes other prompts of this one, of which {BY_ROLE} tells nothing;"
                f" send it without use_beam_search, or without {BY_ROLE}",
            )
    if not settings.enabled or settings.max_whole is None:
        return
    if chat and shows_more_than_text(request.messages):
        with _refusing():
            raise OverrideError(
                "invalid",
                "a prompt that holds more than text must stand whole until its end, and beam search"
                " makes longer and longer prompts of this one, which this server may pack piece by"
                " piece; send it without use_beam_search",
            )
    asked = protection_for(settings, request.vllm_xargs)
    if asked.spans or asked.named or (chat and asked.words):
        with _refusing():
            raise OverrideError(
                "invalid",
                "beam search makes other prompts of this one, which this server may pack piece by"
                " piece, and nothing of them would be protected; send it without use_beam_search",
            )


def _checking(answer: Any, *, chat: bool) -> Any:
    """Wrap a handler of the server, so that the request is checked first.

    What of a chat is to be protected is noted for whoever renders it.

    Responses make their generator within the stream, and beam search drops the extra arguments.
    """

    async def checked(self: Any, request: Any, raw_request: Any) -> None:
        resolve(self.models, request)
        processor = self.engine_client.input_processor
        await _check_places(processor, request, raw_request)
        check(processor, request.vllm_xargs)
        _check_pull(processor, request)
        _check_beams(processor, request, chat=chat)
        wanted.set(_words(processor, request) if chat else None)

    @functools.wraps(answer)
    async def answering(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        raw_request = args[0] if args else kwargs.get("raw_request")
        # where it is refused, vLLM tells a prefill server that keeps blocks for it
        await self._with_kv_transfer_rejection_cleanup(
            checked(self, request, raw_request), request, raw_request
        )
        return await answer(self, request, *args, **kwargs)

    return answering


def _checking_batch(answer: Any) -> Any:
    """Wrap the handler of several chats at once; each of them is checked when it is generated.

    No prefill server is told of one that is refused: a batch has no id to tell it by, and vLLM's
    engine ends where it is told of none.
    """

    @functools.wraps(answer)
    async def answering(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        processor = self.engine_client.input_processor
        raw_request = args[0] if args else kwargs.get("raw_request")
        await _check_places(processor, request, raw_request)
        _check_pull(processor, request)
        return await answer(self, request, *args, **kwargs)

    return answering


def _telling_of_refusals(answer: Any) -> Any:
    """Wrap a handler that checks where it generates: vLLM tells no prefill server what it refuses.

    Where nothing is compressed it stays as it is.
    """

    @functools.wraps(answer)
    async def answering(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        processor = self.engine_client.input_processor
        raw_request = args[0] if args else kwargs.get("raw_request")

        async def asked() -> Any:
            await _check_places(processor, request, raw_request)
            return await answer(self, request, *args, **kwargs)

        if _policy(processor).settings is None:
            return await asked()
        return await self._with_kv_transfer_rejection_cleanup(asked(), request, raw_request)

    return answering


async def _check_places(processor: InputProcessor, request: Any, raw_request: Any) -> None:
    """Refuse settings outside ``vllm_xargs``, which vLLM ignores.

    A server without compression refuses there what it refuses in ``vllm_xargs``.

    Raises:
        VLLMValidationError: a setting is in the wrong place.
    """
    policy = _policy(processor)
    if policy.switched_off:
        return
    with _refusing():
        for sent, fields, place in await ignored_keys(request, raw_request):
            if policy.settings is None:
                settings_for(None, misplaced(sent, fields))
            else:
                refuse_misplaced(sent, fields, place)


def _check_pull(processor: InputProcessor, request: Any) -> None:
    asked = {PARAMETERS: getattr(request, PARAMETERS, None)}
    if _policy(processor).settings is not None:
        with _refusing(PARAMETERS):
            choices, prompts = getattr(request, "n", None), prompts_of(request)
            beams = bool(getattr(request, "use_beam_search", False))
            check_transfer(processor.vllm_config, asked, choices, prompts, beams=beams)
