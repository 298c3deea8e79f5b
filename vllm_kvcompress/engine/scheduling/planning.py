"""Which prompts are compressed, at which step and to how many pages: from lengths alone.

The manager of the blocks asks; nothing here touches a block. Not thread-safe: it lives in the
scheduler's loop.
"""

from collections.abc import Mapping

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from vllm_kvcompress.engine.layers import Windows
from vllm_kvcompress.engine.scheduling.admission import Admissions
from vllm_kvcompress.errors import SeamError
from vllm_kvcompress.growth import Growth, most_blocks
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.pieces import Pieces
from vllm_kvcompress.pipeline import method_of
from vllm_kvcompress.repacking import adds_up
from vllm_kvcompress.settings.config import CompressionConfig

logger = init_logger("vllm.kvcompress")


class Planner:
    """Plans one scheduler's compressions.

    Args:
        settings: the engine's.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        pool: vLLM's blocks, for admissions that ask how many are in use.
        windows: what layers with a sliding window take of a request; None where there are none.
    """

    def __init__(
        self,
        settings: CompressionConfig,
        num_layers: int,
        block_size: int,
        pool: BlockPool,
        windows: Windows | None = None,
    ) -> None:
        self.admissions = Admissions(settings, num_layers, block_size, pool, windows)
        self._settings = settings
        self._num_layers, self._block_size = num_layers, block_size
        self._requests: Mapping[str, Request] | None = None
        # Requests whose prefill ended: they are compressed, or left whole for good.
        self._settled: set[str] = set()
        # Those among them whose answer is bounded.
        self.growing: dict[str, Growth] = {}
        # Prefills under way that never stand whole.
        self._in_pieces: dict[str, Pieces] = {}

    def follow(self, requests: Mapping[str, Request] | None) -> None:
        """Look up requests here from now on."""
        self._requests = requests

    def request(self, request_id: str) -> Request:
        """Raises SeamError where no scheduler is followed."""
        if self._requests is None:
            raise SeamError(
                "CompressedManager follows no scheduler; select the scheduler through"
                " --kv-compress, not by hand"
            )
        return self._requests[request_id]

    def admit(self, request_id: str) -> str:
        """From the request's first block on, what was decided about it stays (`Admissions`).

        An answer that nothing bounds ends where the pool does.
        """
        request = self.request(request_id)
        final = self.admissions.of(request).final
        reason = self.admissions.admit(request)
        pieces = self.pieces_of(request)
        if pieces is not None:
            self._in_pieces[request_id] = pieces
        if not final and self._settings.max_whole is not None:
            self._end_with_the_pool(request)
        return reason

    def settings_of(self, request_id: str) -> CompressionConfig:
        """What compresses an admitted request."""
        settings = self.admissions.of(self.request(request_id)).settings
        assert settings is not None, request_id
        return settings

    def is_settled(self, request_id: str) -> bool:
        return request_id in self._settled

    def ends_prefill(self, request_id: str, num_tokens: int) -> bool:
        """Whether the chunk up to `num_tokens` is the last of a prefill that goes on."""
        if request_id in self._settled:
            return False
        return num_tokens >= int(self.request(request_id).num_tokens)

    def settle(self, request_id: str, plan: PagePlan | None) -> None:
        """The prefill ends in this step, and is compressed by `plan`."""
        self._settled.add(request_id)
        self._in_pieces.pop(request_id, None)
        growth = self._growth(self.request(request_id), plan)
        if growth is not None:
            self.growing[request_id] = growth

    def _growth(self, request: Request, plan: PagePlan | None) -> Growth | None:
        """How the answer behind a prefill that is compressed by `plan` is bounded, if it is."""
        settings = self.admissions.of(request).growing
        if settings is None:
            return None
        growth = Growth(
            settings=settings,
            num_layers=self._num_layers,
            block_size=self._block_size,
            prefilled=int(request.num_tokens),
            last=int(request.num_prompt_tokens + request.max_tokens),
            added_up=int(request.num_tokens) if adds_up(settings) else None,
        )
        if plan is not None:
            growth.prefill_packed(plan)
        if not growth.may_be_packed:
            # Nobody will ask, and its blocks may be others' too, beside which their sums lie.
            growth.added_up = None
        return growth

    def watching(
        self, request_id: str, pieces: Pieces | None, whole: PagePlan | None
    ) -> CompressionConfig | None:
        """What a chunk of a prefill, of which nothing is dropped yet, is watched for."""
        if pieces is not None:
            return pieces.settings
        if whole is not None:
            return self.settings_of(request_id)
        return self._watched_whole(self.request(request_id))

    def _watched_whole(self, request: Request) -> CompressionConfig | None:
        """What a prefill is watched for though nothing of it will be dropped at its end.

        A method that ranks by the attention of all rows needs the prompt's when it packs the
        answer; what is never packed is not watched.
        """
        settings = self.admissions.of(request).growing
        if settings is None or not adds_up(settings):
            return None
        growth = self._growth(request, None)
        return settings if growth is not None and growth.may_be_packed else None

    def forget(self, request_id: str) -> None:
        """The request ended or was preempted; unknown ones may be named."""
        self._settled.discard(request_id)
        self.growing.pop(request_id, None)
        self._in_pieces.pop(request_id, None)

    def plan_of(self, request_id: str) -> PagePlan | None:
        """The plan for a prefill of all tokens the request has now.

        After a preemption these are the prompt and what was generated before it: the same as
        a fresh request for the same tokens; but where answers are bounded the budget stays that of
        the prompt, or each preemption would raise it. Whether to compress at all was decided when
        it was admitted.
        """
        request = self.request(request_id)
        settings = self._packing(request)
        if settings is None or request.max_tokens - request.num_output_tokens <= 1:
            # With one token of the answer left, nothing would read a compressed prompt.
            return None
        return self.admissions.plan(settings, request.num_tokens)

    def _packing(self, request: Request) -> CompressionConfig | None:
        """What compresses the prefill that a request has now; None where it is left whole."""
        settings = self.admissions.of(request).settings
        if settings is None or settings.decode_budget is None or not request.num_output_tokens:
            return settings
        return settings.variant(budget=settings.tokens_per_layer(request.num_prompt_tokens))

    # -- prompts that never stand whole -------------------------------------------------------

    def pieces_of(self, request: Request) -> Pieces | None:
        """How a prefill that waits or goes on is packed piecewise; None where it stands whole."""
        if request.request_id in self._settled:
            return None
        known = self._in_pieces.get(request.request_id)
        if known is not None:
            return known
        settings = self._packing(request)
        if settings is None and request.num_output_tokens:
            # Its answer was bounded, so it may have outgrown the pool since its prompt stood whole.
            settings = self.admissions.of(request).bound_again
        return None if settings is None else self.admissions.pieces(settings, request.num_tokens)

    def most_blocks(self, request: Request) -> int:
        """Blocks that the prefill of a request takes at most, from its first to its last."""
        pieces = self.pieces_of(request)
        if pieces is not None:
            return pieces.most_blocks()
        return -(-int(request.num_tokens) // self._block_size)

    def _end_with_the_pool(self, request: Request) -> None:
        """Let an answer end where the pool does, as vLLM's ends with the longest sequence.

        Sequences may be longer than the pool once prompts need not stand whole, so vLLM's own
        check no longer promises that one request fits.
        """
        size, tokens = self._block_size, int(request.num_tokens)
        pieces = self.pieces_of(request)
        plan = self.plan_of(request.request_id) if pieces is None else pieces.plan(tokens)
        packed = 0 if plan is None else plan.blocks
        growth = self._growth(request, plan)
        blocks = self.admissions.room
        if growth is not None and most_blocks(growth, packed=packed, tokens=growth.last) <= blocks:
            return
        behind = 0 if plan is None else tokens // size
        # the last token of an answer is never read, and takes no room
        room = max((blocks - packed + behind) * size - tokens + 1, 1)
        if room < request.max_tokens:
            logger.info(
                "request %s may write %d tokens instead of %d: the KV cache has no room for more",
                *(request.request_id, room, request.max_tokens),
            )
            request.max_tokens = room

    def longest_hit(self, request: Request, max_length: int) -> int:
        """How much of a waiting prompt may come from the prefix cache, at most `max_length`.

        A prompt that will be compressed computes what its method reads the queries of: its whole
        window, or, where that is the whole attention, all of it. Keys and values are read where
        they lie, however they came there.
        """
        if (pieces := self.pieces_of(request)) is not None:
            reads = method_of(pieces.settings).reads
            if Reads.COLUMN_SUMS in reads:
                return 0
            # What lies behind the first packing was computed against what that left.
            window = pieces.settings.resolved_window if Reads.WINDOW in reads else 0
            return min(pieces.first_end - max(window, 1), max_length)
        if self._watched_whole(request) is not None:
            return 0
        settings = self.admissions.of(request).settings
        # vLLM always recomputes the last token, so it asks for one less.
        tokens = max_length + 1
        if settings is None or self.admissions.plan(settings, tokens) is None:
            return max_length
        reads = method_of(settings).reads
        if Reads.COLUMN_SUMS in reads:
            return 0
        return tokens - settings.resolved_window if Reads.WINDOW in reads else max_length
