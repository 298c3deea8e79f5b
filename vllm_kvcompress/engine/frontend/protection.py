"""What of one prompt is protected, as spans of its tokens, and whether it may be."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

from vllm_kvcompress.engine.frontend.chat_parts import parts_of, wanted
from vllm_kvcompress.engine.frontend.renderings import PartError
from vllm_kvcompress.engine.layers import layers_together
from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.methods.spans import MOST_SPANS, Spans, count_before, joined, parse_spans
from vllm_kvcompress.planning.pieces import EveryPiece
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import protection_for, settings_for
from vllm_kvcompress.settings.protection import NONE, PROTECT, Protection


def protected_spans(
    config: VllmConfig,
    settings: CompressionConfig | None,
    params: SamplingParams,
    prompt: Any,
) -> Spans:
    """The protected spans of a prompt; none where nothing of it will be dropped.

    Args:
        config: the engine's.
        settings: the engine's; None without compression.
        params: the request's, whose extra arguments `settings_for` has accepted.
        prompt: as it goes to the engine.

    Raises:
        OverrideError: what is to be protected cannot be found, or is more than may be.
    """
    own = None if settings is None else settings_for(settings, params.extra_args)
    if (
        settings is None
        or own is None
        or not (asked := protection_for(settings, params.extra_args))
    ):
        return ()
    given = prompt if isinstance(prompt, Mapping) else {}
    ids, rows = given.get("prompt_token_ids"), given.get("prompt_embeds")
    if ids is None:
        whole = rows is not None and stays_whole(own, params, len(rows))
        if not whole and (asked.spans or asked.named or wanted.get() is not None):
            raise OverrideError(
                "invalid",
                f"{PROTECT} needs the tokens of the prompt, and this one comes without any; send a"
                f" text or token ids, or set {PROTECT} to {NONE}",
            )
        return ()
    try:
        spans = parse_spans(asked.spans, len(ids))
    except ConfigError as e:
        raise OverrideError("invalid", f"{PROTECT}: {e}") from None
    if stays_whole(own, params, len(ids)):
        return ()
    granted = joined(_of_words(asked.granted, asked, settings, prompt))
    others = tuple(word for word in asked.words if word not in asked.granted)
    spans = joined([*granted, *_of_words(others, asked, settings, prompt), *spans])
    if len(spans) > MOST_SPANS:
        raise OverrideError(
            "out_of_bounds",
            f"{PROTECT} must be at most {MOST_SPANS} spans that do not touch, got {len(spans)}",
        )
    if spans:
        limits = _Limits(config=config, settings=settings, own=own, tokens=len(ids))
        limits.refuse_too_much(spans, granted)
    return spans


def stays_whole(own: CompressionConfig, params: SamplingParams, tokens: int) -> bool:
    """Whether nothing of a prompt is ever dropped, by its length or its answer's."""
    most = params.max_tokens
    if own.max_whole is None and most is not None and most <= 1:
        return True
    if own.max_whole is not None or own.decode_budget is not None:
        return False
    return tokens < own.min_prompt or (most is not None and most < own.min_output)


def _of_words(
    words: tuple[str, ...], asked: Protection, settings: CompressionConfig, prompt: Any
) -> list[tuple[int, int]]:
    """The spans of some parts of a chat.

    What is no chat has no parts: the operator's words do not concern it.
    """
    parts, found = parts_of(prompt), list[tuple[int, int]]()
    for word in words:
        if parts is None:
            if wanted.get() is None and word not in asked.named:
                continue
            problem = "this request is no chat that a template was applied to"
        else:
            try:
                found += parts.spans(word)
                continue
            except PartError as e:
                problem = str(e)
        cure = f"name its tokens, such as {PROTECT}=0:200, or leave {word} out"
        if word in asked.granted and not settings.allow_override:
            cure = f"ask the operator to leave {word} out of --kv-protect, or for overrides"
        raise OverrideError(
            "invalid",
            f"{PROTECT}: {word} cannot be found in the prompt, since {problem}; {cure}",
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """How much of one prompt may be protected.

    The operator's words raise a budget as far as they must, and so does what a request adds, up to
    the largest budget that it might have named.

    Args:
        config: the engine's. `settings`: likewise.
        own: the request's settings.
        tokens: prompt length.
    """

    config: VllmConfig
    settings: CompressionConfig
    own: CompressionConfig
    tokens: int

    def refuse_too_much(self, spans: Spans, granted: Spans) -> None:
        """Refuse what no budget may be raised for, or what never fits between a prompt's pieces.

        Args:
            granted: of `spans`, what the operator protects.

        Raises:
            OverrideError: it is more than may be.
        """
        protected = count_before(spans, self.tokens)
        self._refuse_between_pieces(spans, protected)
        if spans == granted:
            return
        # What it adds must fit beside half of the others' share, also where the operator's parts
        # leave them all of it: that is then added for its own spans too.
        by_request = self.own.model_copy(update={"protect": ()})
        needed = self._needed(by_request, spans)
        most = max(self._most, self._needed(self.own, granted))
        if needed > most:
            raise OverrideError(
                "out_of_bounds",
                f"{PROTECT}: {protected} tokens need a budget of {needed} tokens per layer, and"
                f" this request may have {most}; protect less, or ask for a larger kv_budget",
            )
        bound = self.own.decode_budget
        if bound is None:
            return
        needed, most = self._beside_answer(spans), max(bound, self._beside_answer(granted))
        if needed > most:
            raise OverrideError(
                "out_of_bounds",
                f"{PROTECT}: {protected} tokens need a decode budget of {needed} tokens per layer,"
                f" and this request may have {most}; protect less",
            )

    def _refuse_between_pieces(self, spans: Spans, protected: int) -> None:
        """However long it is by now: after a preemption its answer is computed with it."""
        own, size = self.own, self._block_size
        if own.max_whole is None:
            return
        pieces = EveryPiece(
            settings=own,
            num_layers=self._layers,
            block_size=size,
            tokens=max(self.tokens, own.max_whole + 1),
            spans=spans,
        )
        if pieces.protects_too_much:
            held = pieces.without_protected // self._layers * size
            raise OverrideError(
                "out_of_bounds",
                f"{PROTECT}: {protected} tokens are protected, and of a prompt that is packed piece"
                f" by piece every layer holds {held} between its pieces; protect less, or ask the"
                " operator for a longer --kv-max-whole",
            )

    def _needed(self, own: CompressionConfig, spans: Spans) -> int:
        """The budget that some spans raise the request's own to; its own where they do not."""
        plan = own.page_plan(self._layers, self.tokens, self._block_size, spans)
        if plan is not None:
            return plan.budget if plan.raised else own.tokens_per_layer(self.tokens)
        # left whole for what it protects, and not for its length or its budget
        unprotected = own.page_plan(self._layers, self.tokens, self._block_size)
        return own.tokens_per_layer(self.tokens) if unprotected is None else self.tokens

    def _beside_answer(self, spans: Spans) -> int:
        """Tokens of the pages that they and the decode window take; 0 where none are protected."""
        protected, size = count_before(spans, self.tokens), self._block_size
        window = self.own.resolved_decode_window
        return -(-(window + protected) // size) * size if protected else 0

    @property
    def _most(self) -> int:
        """The largest budget in tokens that the request may name, or has."""
        own, settings = self.own.tokens_per_layer(self.tokens), self.settings
        if not settings.allow_override:
            return own
        if not settings.budget_bounds:
            return max(own, self.tokens)
        most = [own]
        for _, high in settings.budget_bounds:
            # a bound under the method's window is nothing that a request may ask of it
            with suppress(ConfigError):
                named = settings.variant(self.own.compress, high)
                most.append(named.tokens_per_layer(self.tokens))
        return max(most)

    @property
    def _layers(self) -> int:
        return layers_together(self.config)

    @property
    def _block_size(self) -> int:
        return int(self.config.cache_config.block_size)
