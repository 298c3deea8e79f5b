"""Admission: which prompts are compressed, and why the others are not.

The decision is made when a request is admitted, from the request's settings and the current state
of the pool. It stays until the request ends, even if the request is preempted.
"""

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from vllm_kvcompress.engine.layers import OtherLayers
from vllm_kvcompress.engine.messages.options import options_of
from vllm_kvcompress.engine.scheduling.request_state import Decision, RequestState
from vllm_kvcompress.errors import OverrideError, quoted_id
from vllm_kvcompress.methods.page_plan import PagePlan, mostly_protected
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.schedules.pieces import PiecewiseSchedule, piece_schedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

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


_MAX_PLANS = 64


class Admissions:
    """Decides for one scheduler which requests are compressed.

    Args:
        settings: the engine's settings.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        pool: vLLM's block pool. Block 0 is the null block.
        other_layers: blocks that the uncompressed layers use. None if all are compressed.
        itemsize: bytes of a cached number.
        draft_layers: layers of a draft model that share the page pool, D.
    """

    def __init__(
        self,
        settings: CompressionConfig,
        num_layers: int,
        block_size: int,
        pool: BlockPool,
        other_layers: OtherLayers | None = None,
        itemsize: int = 2,
        draft_layers: int = 0,
    ) -> None:
        self.draft_layers = draft_layers
        self.settings = settings
        self._other_layers = other_layers
        self._itemsize = itemsize
        self._num_layers = num_layers
        self._block_size = block_size
        self._pool = pool
        # The latest plans. Keys have the ids of settings, because equal settings may differ in the
        # keys that were given. Values hold the settings, so that no other object gets their id.
        self._plans: dict[tuple[object, ...], tuple[CompressionConfig, PagePlan | None]] = {}

    def new_state(self, request: Request) -> RequestState:
        """Return a new state of a request, with its options and a first decision."""
        engine_settings = self.settings if self.settings.active else None
        options, error = RequestOptions(), ""
        try:
            options = options_of(engine_settings, request.sampling_params)
        except OverrideError as e:
            # The request did not come through a front end that checks it (`frontend.api`).
            error = str(e)
        return RequestState(request, options, error, self.decide(request, options, error))

    def refresh_decision(self, state: RequestState) -> None:
        """Repeat the decision about a waiting request if an input of the decision has changed.

        The inputs are the request's lengths and, with `pressure`, the number of blocks in use.
        """
        decision = state.decision
        if not decision.is_final and decision.inputs != _inputs(state.request):
            state.decision = self.decide(state.request, state.options, state.error)

    def finalize_decision(self, state: RequestState) -> str:
        """Make the decision final.

        Returns:
            Why the prompt stays uncompressed. Empty if it is compressed, or if the decision was
            already final.
        """
        decision = state.decision
        if decision.is_final:
            return ""
        decision.is_final = True
        if decision.skip_reason == INVALID:
            shown = quoted_id(state.request_id)
            logger.warning("request %s stays uncompressed: %s", shown, state.error)
        return decision.skip_reason

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
        key = (id(settings), tokens, spans)
        if key not in self._plans:
            page_tokens = self.packed_page_tokens(settings)
            layers, size = self._num_layers, self._block_size
            plan = settings.page_plan(layers, tokens, size, spans, page_tokens, self.draft_layers)
            self._plans[key] = settings, plan
            if len(self._plans) > _MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            return plan
        return self._plans[key][1]

    def packed_page_tokens(self, settings: CompressionConfig) -> int | None:
        """Return the tokens in a packed page; None if it holds those of an ordinary page."""
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
        page_tokens = self.packed_page_tokens(settings)
        if settings.pieces.max_whole is None and settings.grid_cell(page_tokens) is None:
            return None
        return piece_schedule(
            settings, self._num_layers, self._block_size, tokens, spans, page_tokens
        )

    def decide(self, request: Request, options: RequestOptions, error: str) -> Decision:
        """Return a new decision about a request."""
        if request.pooling_params is not None or request.resumable:
            return Decision(None, UNSUPPORTED, inputs=_inputs(request))
        settings = options.settings
        if settings is None:
            return Decision(None, INVALID if error else OFF, inputs=_inputs(request))
        skip_reason = self._skip_reason(request, settings, options.spans)
        packs_groups = self.packed_page_tokens(settings) is not None
        packs_output = settings.decode.budget is not None or (
            packs_groups and settings.packs_outputs
        )
        if skip_reason and settings.reuses_pages:
            packs_output = self._is_packed_with_output(settings, request.num_prompt_tokens)
        depends_on_pool = skip_reason == LOW_PRESSURE or (not skip_reason and settings.pressure > 0)
        return Decision(
            None if skip_reason else settings,
            skip_reason,
            output_settings=settings if packs_output else None,
            inputs=None if depends_on_pool else _inputs(request),
        )

    def _skip_reason(self, request: Request, settings: CompressionConfig, spans: Spans) -> str:
        """Return why a prompt stays uncompressed; empty if it is compressed."""
        if (
            settings.pieces.max_whole is not None
            and self.piece_schedule(settings, request.num_prompt_tokens, spans) is not None
        ):
            # It exceeds `max_whole`, so it must be compressed whatever the checks below say.
            return ""
        if request.num_prompt_tokens < max(
            settings.resolved_min_prompt, self._min_packed_tokens(settings)
        ):
            return SHORT_PROMPT
        if request.max_tokens < settings.resolved_min_output:
            return SHORT_OUTPUT
        if self.plan(settings, request.num_tokens, spans) is None:
            is_protected = mostly_protected(spans, int(request.num_prompt_tokens))
            if is_protected or self.plan(settings, request.num_tokens) is not None:
                return PROTECTED
            return WITHIN_BUDGET
        if settings.pressure and self.usage_with_prompt(request.num_tokens) < settings.pressure:
            return LOW_PRESSURE
        return ""

    def _min_packed_tokens(self, settings: CompressionConfig) -> int:
        """Return the shortest prompt of which a page or a cell of the grid is packed."""
        page_tokens = self.packed_page_tokens(settings)
        if page_tokens is None or not settings.keeps_all_tokens:
            return 0
        cell = settings.grid_cell(page_tokens) or page_tokens
        return self._block_size + cell + settings.recent_tokens

    def _is_packed_with_output(self, settings: CompressionConfig, prompt_tokens: int) -> bool:
        """Return whether an uncompressed prompt is packed once its output fills a page or cell.

        On a grid, each cell must be packed before the next one is computed.
        """
        min_packed = self._min_packed_tokens(settings)
        return prompt_tokens < min_packed and settings.resolved_min_prompt <= min_packed


def _inputs(request: Request) -> tuple[object, ...]:
    """Return the values of a request that its decision depends on and that may change."""
    return (
        request.num_prompt_tokens,
        request.num_tokens,
        request.max_tokens,
        request.resumable,
    )
