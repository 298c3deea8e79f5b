"""Which prompts are compressed, and why the others are not.

Decided when a request is admitted, from what it asks for and from the pool as it is then; it stays
so until the request ends, whatever preempts it.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from vllm_kvcompress.engine.layers import OtherLayers
from vllm_kvcompress.engine.messages.spans import spans_of
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.methods.page_plan import PagePlan, mostly_protected
from vllm_kvcompress.methods.spans import Spans
from vllm_kvcompress.planning.pieces import EveryPiece, pieces_of
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import settings_for

logger = init_logger("vllm.kvcompress")

# why a prompt is left whole: values of the metric's label `reason`
OFF = "off"
SHORT_PROMPT = "short_prompt"
SHORT_OUTPUT = "short_output"
WITHIN_BUDGET = "within_budget"
LOW_PRESSURE = "low_pressure"
UNSUPPORTED = "unsupported"
INVALID = "invalid"
# more than half of it is protected, or all is kept beside what is
PROTECTED = "protected"
# the output ended before the look-ahead was over
ANSWERED = "answered"
# the request was aborted before its prompt was compressed: its client hung up, for instance
ABORTED = "aborted"
# the request ended with an error before its prompt was compressed
FAILED = "failed"
# it was pulled, no slot for a look-ahead was free, and the pool had no blocks to pack it into
FULL_POOL = "full_pool"
REASONS = (
    *(OFF, SHORT_PROMPT, SHORT_OUTPUT, WITHIN_BUDGET, LOW_PRESSURE, UNSUPPORTED, INVALID),
    *(PROTECTED, ANSWERED, ABORTED, FAILED, FULL_POOL),
)


@dataclass(slots=True)
class Decision:
    """What becomes of one request's prompt.

    Args:
        settings: what compresses it; None when it is left whole.
        reason: why it is left whole, one of REASONS; empty when it is compressed.
        growing: what bounds its answer; None when it may grow.
        final: the request was admitted, so that this will not change.
        error: for INVALID, what is wrong with what it asks for.
        spans: what of its prompt is protected.
    """

    settings: CompressionConfig | None
    reason: str = ""
    growing: CompressionConfig | None = None
    final: bool = False
    error: str = ""
    spans: Spans = ()

    @property
    def bound_again(self) -> CompressionConfig | None:
        """What packs a bounded answer that is computed again with its prompt; None if it may grow.

        It keeps what the answer held: the budget of a short prompt would be its whole.
        """
        own = self.growing
        if own is None or own.decode_budget is None:
            return None
        return own.variant(budget=max(own.decode_budget, own.resolved_window + 1))


class Admissions:
    """Decides for one scheduler's requests.

    Args:
        settings: the engine's.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        pool: vLLM's blocks; block 0 is the null block.
        others: what layers that are not compressed take of a request; None where there are none.
    """

    def __init__(
        self,
        settings: CompressionConfig,
        num_layers: int,
        block_size: int,
        pool: BlockPool,
        others: OtherLayers | None = None,
    ) -> None:
        self._others = others
        self._engine = settings if settings.active else None
        self._num_layers = num_layers
        self._block_size = block_size
        self._pool = pool
        self._decisions: WeakKeyDictionary[Request, Decision] = WeakKeyDictionary()

    def consider(self, request: Request) -> Decision:
        """Decide about a request that waits, as the pool is now; admitted ones keep theirs."""
        decision = self._decisions.get(request)
        if decision is None or not decision.final:
            decision = self._decisions[request] = self._decide(request)
        return decision

    def admit(self, request: Request) -> str:
        """From now on what was decided stays; returns the reason of one that was not final."""
        decision = self.of(request)
        if decision.final:
            return ""
        decision.final = True
        if decision.error:
            logger.warning("request %s is left whole: %s", request.request_id, decision.error)
        return decision.reason

    def of(self, request: Request) -> Decision:
        """What was decided last."""
        decision = self._decisions.get(request)
        return self.consider(request) if decision is None else decision

    @property
    def pool_blocks(self) -> int:
        """Blocks that requests can have."""
        return int(self._pool.num_gpu_blocks) - 1

    @property
    def room(self) -> int:
        """Blocks that the compressed layers of one request can have."""
        return self.pool_blocks - (self._others.blocks() if self._others else 0)

    def other_blocks(self, tokens: int) -> int:
        """Blocks of a request of so many tokens for layers that are not compressed."""
        return 0 if self._others is None else self._others.blocks(tokens)

    def plan(self, settings: CompressionConfig, tokens: int, spans: Spans = ()) -> PagePlan | None:
        """How much of a prefill of `tokens` is kept; None when that is everything."""
        return settings.page_plan(self._num_layers, tokens, self._block_size, spans)

    def share_in_use(self, tokens: int) -> float:
        """Share of the pool in use once a prompt of `tokens` is in it, counted whole."""
        total = self.pool_blocks
        used = total - self._pool.get_num_free_blocks()
        prompt = -(-tokens // self._block_size) + self.other_blocks(tokens)
        return float((used + prompt) / max(total, 1))

    def _decide(self, request: Request) -> Decision:
        if request.pooling_params is not None or request.resumable:
            return Decision(None, UNSUPPORTED)
        params = request.sampling_params
        try:
            settings = settings_for(self._engine, params.extra_args if params else None)
        except OverrideError as e:
            # The request did not come through a front end that checks it (`frontend.api`).
            return Decision(None, INVALID, error=str(e))
        if settings is None:
            return Decision(None, OFF)
        decision = self._of_prompt(request, settings, spans_of(params))
        if settings.decode_budget is not None:
            decision.growing = settings
        return decision

    def pieces(
        self, settings: CompressionConfig, tokens: int, spans: Spans = ()
    ) -> EveryPiece | None:
        """How a prefill of `tokens` goes piecewise; None where it stands whole."""
        return pieces_of(settings, self._num_layers, self._block_size, tokens, spans)

    def _of_prompt(self, request: Request, settings: CompressionConfig, spans: Spans) -> Decision:
        decision = self._packed_or_whole(request, settings, spans)
        decision.spans = spans
        return decision

    def _packed_or_whole(
        self, request: Request, settings: CompressionConfig, spans: Spans
    ) -> Decision:
        if self.pieces(settings, request.num_prompt_tokens, spans) is not None:
            # Whatever it is asked for and however much room there is: it must not stand whole.
            return Decision(settings)
        if request.num_prompt_tokens < settings.min_prompt:
            return Decision(None, SHORT_PROMPT)
        if request.max_tokens < settings.min_output:
            return Decision(None, SHORT_OUTPUT)
        if mostly_protected(spans, int(request.num_prompt_tokens)):
            return Decision(None, PROTECTED)
        if self.plan(settings, request.num_tokens, spans) is None:
            unprotected = self.plan(settings, request.num_tokens)
            return Decision(None, WITHIN_BUDGET if unprotected is None else PROTECTED)
        if settings.pressure and self.share_in_use(request.num_tokens) < settings.pressure:
            return Decision(None, LOW_PRESSURE)
        return Decision(settings)
