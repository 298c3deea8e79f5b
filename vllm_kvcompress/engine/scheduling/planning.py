"""Which prompts are compressed, at which step and to how many pages: from lengths alone.

The manager of the blocks asks; nothing here touches a block. Not thread-safe: it lives in the
scheduler's loop.
"""

from collections.abc import Mapping

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.engine.scheduling.admission import Admissions
from vllm_kvcompress.errors import SeamError
from vllm_kvcompress.growth import Growth
from vllm_kvcompress.pipeline import method_of
from vllm_kvcompress.plan import PagePlan
from vllm_kvcompress.policies.base import Reads


class Planner:
    """Plans one scheduler's compressions.

    Args:
        settings: the engine's.
        num_layers: layers that share the page pool, L.
        block_size: tokens in a block.
        pool: vLLM's blocks, for admissions that ask how many are in use.
    """

    def __init__(
        self, settings: CompressionConfig, num_layers: int, block_size: int, pool: BlockPool
    ) -> None:
        self.admissions = Admissions(settings, num_layers, block_size, pool)
        self._num_layers, self._block_size = num_layers, block_size
        self._requests: Mapping[str, Request] | None = None
        # Requests whose prefill ended: they are compressed, or left whole for good.
        self._settled: set[str] = set()
        # Those among them whose answer is bounded.
        self.growing: dict[str, Growth] = {}

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
        """From the request's first block on, what was decided about it stays (`Admissions`)."""
        return self.admissions.admit(self.request(request_id))

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
        request = self.request(request_id)
        settings = self.admissions.of(request).growing
        if settings is None:
            return
        growth = self.growing[request_id] = Growth(
            settings=settings,
            num_layers=self._num_layers,
            block_size=self._block_size,
            prefilled=int(request.num_tokens),
            last=int(request.num_prompt_tokens + request.max_tokens),
        )
        if plan is not None:
            growth.prefill_packed(plan)

    def forget(self, request_id: str) -> None:
        """The request ended or was preempted; unknown ones may be named."""
        self._settled.discard(request_id)
        self.growing.pop(request_id, None)

    def plan_of(self, request_id: str) -> PagePlan | None:
        """The plan for a prefill of all tokens the request has now.

        After a preemption these are the prompt and what was generated before it: the same as
        a fresh request for the same tokens; but where answers are bounded the budget stays that of
        the prompt, or each preemption would raise it. Whether to compress at all was decided when
        it was admitted.
        """
        request = self.request(request_id)
        settings = self.admissions.of(request).settings
        if settings is None or request.max_tokens - request.num_output_tokens <= 1:
            # With one token of the answer left, nothing would read a compressed prompt.
            return None
        if settings.decode_budget is not None and request.num_output_tokens:
            prompt = settings.tokens_per_layer(request.num_prompt_tokens)
            settings = settings.variant(budget=prompt)
        return self.admissions.plan(settings, request.num_tokens)

    def longest_hit(self, request: Request, max_length: int) -> int:
        """How much of a waiting prompt may come from the prefix cache, at most `max_length`.

        A prompt that will be compressed computes what its method reads the queries of: its whole
        window, or, where that is the whole attention, all of it. Keys and values are read where
        they lie, however they came there.
        """
        settings = self.admissions.of(request).settings
        # vLLM always recomputes the last token, so it asks for one less.
        tokens = max_length + 1
        if settings is None or self.admissions.plan(settings, tokens) is None:
            return max_length
        reads = method_of(settings).reads
        if Reads.COLUMN_SUMS in reads:
            return 0
        return tokens - settings.resolved_window if Reads.WINDOW in reads else max_length
