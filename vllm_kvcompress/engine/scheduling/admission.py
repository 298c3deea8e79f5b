"""Admission: which prompts are compressed, and why the others are not.

The decision is made when a request is admitted, from the request's settings and the current state
of the pool. It stays until the request ends, even if the request is preempted.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from vllm_kvcompress.engine.layers import OtherLayers
from vllm_kvcompress.engine.messages.spans import spans_of
from vllm_kvcompress.engine.scheduling.settings_memo import SettingsMemo
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.methods.page_plan import PagePlan, mostly_protected
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.planning.pieces import PiecewiseSchedule, piece_schedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import settings_for

logger = init_logger("vllm.kvcompress")

# Reasons why a prompt stays uncompressed, and values of the metric's label `reason`.
OFF = "off"
SHORT_PROMPT = "short_prompt"
SHORT_OUTPUT = "short_output"
WITHIN_BUDGET = "within_budget"
LOW_PRESSURE = "low_pressure"
UNSUPPORTED = "unsupported"
INVALID = "invalid"
# More than half of the prompt is protected, or the budget raised for protection covers all of it.
PROTECTED = "protected"
# The output ended before the look-ahead was over.
ANSWERED = "answered"
# The request was aborted before its prompt was compressed, for example by a client that hung up.
ABORTED = "aborted"
# The request failed before its prompt was compressed.
FAILED = "failed"
# The prompt was pulled from another server, no look-ahead slot was free, and the pool had too few
# blocks to pack it.
FULL_POOL = "full_pool"
REASONS = (
    OFF,
    SHORT_PROMPT,
    SHORT_OUTPUT,
    WITHIN_BUDGET,
    LOW_PRESSURE,
    UNSUPPORTED,
    INVALID,
    PROTECTED,
    ANSWERED,
    ABORTED,
    FAILED,
    FULL_POOL,
)


@dataclass(slots=True)
class Decision:
    """The decision about one request's prompt.

    Args:
        settings: settings to compress it with. None if it stays uncompressed.
        skip_reason: why it stays uncompressed, one of REASONS. Empty if it is compressed.
        output_settings: settings that bound or pack the request's cache during decoding. None if
            the cache may grow.
        is_final: the request was admitted, so the decision no longer changes.
        error: for INVALID, what is wrong with the request's settings.
        spans: protected tokens of the prompt.
        inputs: request values that the decision depends on (`Admissions._inputs`). None if it also
            depends on pool usage, so that the next step decides again.
    """

    settings: CompressionConfig | None
    skip_reason: str = ""
    output_settings: CompressionConfig | None = None
    is_final: bool = False
    error: str = ""
    spans: Spans = ()
    inputs: tuple[object, ...] | None = None

    @property
    def never_packs(self) -> bool:
        """Return whether neither the prompt nor the output is ever packed."""
        return self.settings is None and self.output_settings is None

    @property
    def recompute_settings(self) -> CompressionConfig | None:
        """Return settings to pack an uncompressed prompt that is recomputed with its output.

        None if the cache may grow during decoding. After a preemption, prompt and output are
        computed together and packed to the decode budget. The prompt's own budget would keep all of
        a short prompt. Without a decode budget, the output was packed in k4v3, and so is all of it.
        """
        settings = self.output_settings
        if settings is None or settings.decode_budget is None:
            return settings
        return settings.variant(budget=max(settings.decode_budget, settings.resolved_window + 1))


class Admissions:
    """Decides for one scheduler which requests are compressed.

    Args:
        settings: the engine's settings.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        pool: vLLM's block pool. Block 0 is the null block.
        other_layers: blocks that the uncompressed layers use. None if all are compressed.
        itemsize: bytes of a cached number.
    """

    def __init__(
        self,
        settings: CompressionConfig,
        num_layers: int,
        block_size: int,
        pool: BlockPool,
        other_layers: OtherLayers | None = None,
        itemsize: int = 2,
    ) -> None:
        self._other_layers = other_layers
        self._itemsize = itemsize
        self._engine_settings = settings if settings.active else None
        self._num_layers = num_layers
        self._block_size = block_size
        self._pool = pool
        self._decisions: WeakKeyDictionary[Request, Decision] = WeakKeyDictionary()
        self._page_tokens = SettingsMemo(self._compute_page_tokens)
        self._plans = SettingsMemo(self._compute_plan)

    def consider(self, request: Request) -> Decision:
        """Return the decision for the pool's current state. A final decision does not change."""
        decision = self._decisions.get(request)
        if decision is not None and decision.is_final:
            return decision
        inputs = self._inputs(request)
        if decision is None or decision.inputs != inputs:
            decision = self._decisions[request] = self._decide(request)
            settings, is_low = decision.settings, decision.skip_reason == LOW_PRESSURE
            depends_on_pool = is_low or (settings is not None and settings.pressure > 0)
            decision.inputs = None if depends_on_pool else inputs
        return decision

    @staticmethod
    def _inputs(request: Request) -> tuple[object, ...]:
        """Return the values of a request that its decision depends on and that may change."""
        return (
            request.num_prompt_tokens,
            request.num_tokens,
            request.max_tokens,
            request.resumable,
        )

    def admit(self, request: Request) -> str:
        """Make the decision final.

        Returns:
            Why the prompt stays uncompressed. Empty if it is compressed, or if the decision was
            already final.
        """
        decision = self.decision_of(request)
        if decision.is_final:
            return ""
        decision.is_final = True
        if decision.error:
            logger.warning("request %s stays uncompressed: %s", request.request_id, decision.error)
        return decision.skip_reason

    def decision_of(self, request: Request) -> Decision:
        """Return the latest decision about a request."""
        decision = self._decisions.get(request)
        return self.consider(request) if decision is None else decision

    @property
    def pool_blocks(self) -> int:
        """Return the number of blocks in the pool, without the null block."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def max_request_blocks(self) -> int:
        """Return the maximum number of blocks for the compressed layers of one request."""
        return self.pool_blocks - (self._other_layers.blocks() if self._other_layers else 0)

    def other_layer_blocks(self, tokens: int) -> int:
        """Return the blocks that a request of `tokens` tokens needs in the uncompressed layers."""
        return 0 if self._other_layers is None else self._other_layers.blocks(tokens)

    def plan(self, settings: CompressionConfig, tokens: int, spans: Spans = ()) -> PagePlan | None:
        """Return the plan for a prefill of `tokens` tokens, or None if it frees no block."""
        return self._plans(settings, tokens, spans)

    def _compute_plan(
        self, settings: CompressionConfig, tokens: int, spans: Spans
    ) -> PagePlan | None:
        page_tokens = self.packed_page_tokens(settings)
        return settings.page_plan(self._num_layers, tokens, self._block_size, spans, page_tokens)

    def packed_page_tokens(self, settings: CompressionConfig) -> int | None:
        """Return the tokens in a packed page; None if it holds those of an ordinary page."""
        return self._page_tokens(settings)

    def _compute_page_tokens(self, settings: CompressionConfig) -> int | None:
        return packed_page_tokens(settings, self._block_size, self._itemsize)

    def usage_with_prompt(self, tokens: int) -> float:
        """Return the share of the pool in use once an uncompressed prompt of `tokens` is added."""
        total = self.pool_blocks
        used = total - self._pool.get_num_free_blocks()
        prompt = -(-tokens // self._block_size) + self.other_layer_blocks(tokens)
        return float((used + prompt) / max(total, 1))

    def piece_schedule(
        self, settings: CompressionConfig, tokens: int, spans: Spans = ()
    ) -> PiecewiseSchedule | None:
        """Return the schedule that packs a prefill of `tokens` in pieces, or None if none does."""
        if settings.max_whole is None:
            return None
        page_tokens = self.packed_page_tokens(settings)
        return piece_schedule(
            settings, self._num_layers, self._block_size, tokens, spans, page_tokens
        )

    def _decide(self, request: Request) -> Decision:
        if request.pooling_params is not None or request.resumable:
            return Decision(None, UNSUPPORTED)
        params = request.sampling_params
        try:
            settings = settings_for(self._engine_settings, params.extra_args if params else None)
        except OverrideError as e:
            # The request did not come through a front end that checks it (`frontend.api`).
            return Decision(None, INVALID, error=str(e))
        if settings is None:
            return Decision(None, OFF)
        spans = spans_of(params)
        decision = self._decide_prompt(request, settings, spans)
        decision.spans = spans
        packs_groups = self.packed_page_tokens(settings) is not None
        if settings.decode_budget is not None or (packs_groups and settings.packs_outputs):
            decision.output_settings = settings
        return decision

    def _decide_prompt(
        self, request: Request, settings: CompressionConfig, spans: Spans
    ) -> Decision:
        if self.piece_schedule(settings, request.num_prompt_tokens, spans) is not None:
            # It exceeds `max_whole`, so it must be compressed whatever the checks below say.
            return Decision(settings)
        if request.num_prompt_tokens < settings.min_prompt:
            return Decision(None, SHORT_PROMPT)
        if request.max_tokens < settings.min_output:
            return Decision(None, SHORT_OUTPUT)
        if self.plan(settings, request.num_tokens, spans) is None:
            is_protected = mostly_protected(spans, int(request.num_prompt_tokens))
            if is_protected or self.plan(settings, request.num_tokens) is not None:
                return Decision(None, PROTECTED)
            return Decision(None, WITHIN_BUDGET)
        if settings.pressure and self.usage_with_prompt(request.num_tokens) < settings.pressure:
            return Decision(None, LOW_PRESSURE)
        return Decision(settings)
