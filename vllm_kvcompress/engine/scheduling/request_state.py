"""The scheduler's record of each request, by vLLM's request id."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vllm_kvcompress.engine.messages.step import AdoptedPages, AttentionAddition, PackRequest
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.schedules.lookahead import LookaheadSchedule
from vllm_kvcompress.schedules.request import RequestSchedule
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions


@dataclass(slots=True, eq=False)
class Decision:
    """The decision about one request's prompt.

    Args:
        settings: settings to compress it with. None if it stays uncompressed.
        skip_reason: why it stays uncompressed, one of `admission.REASONS`. Empty if it is
            compressed.
        output_settings: settings that bound or pack the request's cache during decoding. None if
            the cache may grow.
        is_final: the request was admitted, so the decision no longer changes.
        inputs: request values that the decision depends on. None if it also depends on pool usage,
            so that the next step decides again.
    """

    settings: CompressionConfig | None
    skip_reason: str = ""
    output_settings: CompressionConfig | None = None
    is_final: bool = False
    inputs: tuple[object, ...] | None = None

    @property
    def never_packs(self) -> bool:
        """Return whether neither the prompt nor the output is ever packed."""
        return self.settings is None and self.output_settings is None

    @property
    def recompute_settings(self) -> CompressionConfig | None:
        """Return the settings to pack prompt and output with, when a preemption recomputes both.

        Used if the prompt stays uncompressed. None if the output is never packed. With a decode
        budget, both are packed to that budget, because the prompt's budget would keep all of a
        short prompt. Without one, the output was packed in k4v3, and prompt and output are packed
        in k4v3 together.
        """
        settings = self.output_settings
        if settings is None or settings.decode.budget is None:
            return settings
        return settings.variant(budget=max(settings.decode.budget, settings.resolved_window + 1))


@dataclass(slots=True)
class StepEntry:
    """The workers' tasks for one request in the step that is being scheduled.

    Args:
        observe: settings for observing a prefill chunk after which nothing is packed.
        keep_output_queries, keep_prompt_queries: as in `StepPlan`.
        addition: attention to add to the request's sums.
        pack: packing after the step.
        adopted: packed pages of the prefix cache that the request reads from this step on.
    """

    observe: CompressionConfig | None = None
    keep_output_queries: bool = False
    keep_prompt_queries: bool = False
    addition: AttentionAddition | None = None
    pack: PackRequest | None = None
    adopted: AdoptedPages | None = None


class HostCopy(NamedTuple):
    """Where the pages of a parked request are (`parking`).

    Args:
        slots: slots of host memory.
        packed_blocks: blocks that its packed pages need.
    """

    slots: tuple[int, ...]
    packed_blocks: int


@dataclass(slots=True, eq=False)
class RequestState:
    """Everything that the scheduler knows about one request.

    A preemption resets every field except `request`, `options`, `error`, `decision` and
    `is_counted`, unless the request is parked. The end of the request removes the state.

    Args:
        request: vLLM's request.
        options: what the request chose.
        error: what is wrong with its own settings. Empty if nothing is.
        decision: the latest decision about the prompt.
        is_counted: whether the statistics have the request, as planned or as skipped.
        schedule: when it is packed, and its KV footprint. None before `RequestSchedules.of`.
        schedule_inputs: everything that `schedule` depends on. None if it is fixed.
        blocks: vLLM's list of the request's blocks, with null blocks for packed ones.
        packed_blocks: blocks that hold its packed pages. They are not in `blocks`.
        reused_blocks: of `blocks`, the destinations of the packing that is planned for this step.
        holds_groups: `packed_blocks` hold groups in k4v3.
        packed_hit: packed blocks of the prefix cache that the waiting request's prompt begins with.
            It owns them from its first step on.
        stored_pages: of its packed pages, those in the prefix cache.
        left_grid: a packing that was due found no blocks. Its further pages are not what another
            request would compute.
        cacheable_tokens: maximum tokens that may enter the prefix cache. None for no limit.
        has_lookahead_slot: it holds one of the workers' query slots for its look-ahead.
        was_pulled: its prompt came from another server or from host memory, and its prefill has not
            ended.
        probe_tokens: probe tokens behind its chunk in this step. They score the chunk. vLLM counts
            them as part of the chunk until the step is scheduled.
        lookahead_tokens: during a look-ahead, tokens computed by the end of the last step that the
            request takes part in.
        is_scheduled: whether a request in its look-ahead takes part in the step being scheduled.
        entry: its part of the step that is being scheduled. None if it has none.
        parked: its pages in host memory while it waits after a preemption. None if it is not
            parked.
    """

    request: Request
    options: RequestOptions
    error: str
    decision: Decision
    is_counted: bool = False
    schedule: RequestSchedule | None = None
    schedule_inputs: tuple[object, ...] | None = None
    blocks: list[KVCacheBlock] = field(default_factory=list)
    packed_blocks: list[KVCacheBlock] = field(default_factory=list)
    reused_blocks: list[KVCacheBlock] = field(default_factory=list)
    holds_groups: bool = False
    packed_hit: list[KVCacheBlock] = field(default_factory=list)
    stored_pages: int = 0
    left_grid: bool = False
    cacheable_tokens: int | None = None
    has_lookahead_slot: bool = False
    was_pulled: bool = False
    probe_tokens: int = 0
    lookahead_tokens: int = 0
    is_scheduled: bool = False
    entry: StepEntry | None = None
    parked: HostCopy | None = None
    _budget_plan: tuple[LookaheadSchedule, tuple[int, ...], PagePlan | None] | None = None

    @property
    def request_id(self) -> str:
        """Return vLLM's id of the request."""
        return str(self.request.request_id)

    @property
    def num_packed_pages(self) -> int:
        """Return the packed pages of each layer, without those of a packing that is planned."""
        if self.schedule is None:
            return 0
        footprint = self.schedule.footprint
        return footprint.pages // footprint.num_layers

    @property
    def reuses_pages(self) -> bool:
        """Return whether the request's packed pages enter the prefix cache."""
        settings = self.decision.settings or self.decision.output_settings
        return settings is not None and settings.reuses_pages

    @property
    def has_fixed_schedule(self) -> bool:
        """Return whether the schedule no longer depends on the request and the pool."""
        return self.schedule is not None and self.schedule_inputs is None

    @property
    def has_prefilled(self) -> bool:
        """Return whether the request's prefill has ended, packed or not."""
        return self.schedule is not None and self.schedule.prefilled

    @property
    def current_schedule(self) -> RequestSchedule:
        """Return `schedule`; `RequestSchedules.of` must have been called before."""
        assert self.schedule is not None, self.request_id
        return self.schedule

    @property
    def planned_pack(self) -> PackRequest:
        """Return the packing planned for this step."""
        assert self.entry is not None, self.request_id
        assert self.entry.pack is not None, self.request_id
        return self.entry.pack

    @property
    def lookahead(self) -> LookaheadSchedule:
        """Return the look-ahead of a request that has one."""
        lookahead = self.current_schedule.lookahead
        assert lookahead is not None, self.request_id
        return lookahead

    def budget_plan(self, tokens: int) -> PagePlan | None:
        """Return `LookaheadSchedule.plan_at`, computed once per footprint and length."""
        lookahead, footprint = self.lookahead, self.current_schedule.footprint
        key = (footprint.pages, footprint.first_block, tokens)
        latest = self._budget_plan
        if latest is None or latest[0] is not lookahead or latest[1] != key:
            latest = self._budget_plan = (lookahead, key, lookahead.plan_at(footprint, tokens))
        return latest[2]

    def unpacked_blocks(self, tokens: int) -> list[KVCacheBlock]:
        """Return the full blocks that were not packed before. Packing reads them.

        Args:
            tokens: computed tokens of the request.
        """
        footprint = self.current_schedule.footprint
        return self.blocks[footprint.first_block : tokens // footprint.block_size]


class RequestStates:
    """The states of one scheduler's requests.

    Args:
        requests: the scheduler's requests by id.
        new_state: `Admissions.new_state`; called once per request.
    """

    def __init__(
        self, requests: Mapping[str, Request], new_state: Callable[[Request], RequestState]
    ) -> None:
        self._requests, self._new_state = requests, new_state
        self._states: dict[str, RequestState] = {}
        self.ids_without_packing: set[str] = set()
        """Ids of requests that need no packing until they end or are preempted. Steps skip them."""
        self.limited_ids: set[str] = set()
        """Ids of requests with tokens that must not enter the prefix cache."""

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def of(self, request: Request) -> RequestState:
        """Return the state of a request; create it on the first call."""
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = self._new_state(request)
        return state

    def by_id(self, request_id: str) -> RequestState:
        """Return the state of one of the scheduler's requests."""
        return self._states.get(request_id) or self.of(self._requests[request_id])

    def get(self, request_id: str) -> RequestState | None:
        """Return the state of a request; None if it has none yet."""
        return self._states.get(request_id)

    def pop(self, request_id: str) -> RequestState | None:
        """Remove and return a state, None if there is none. A preempted request gets a new one.

        A parked request keeps its state, but has no blocks.
        """
        state = self._states.pop(request_id, None)
        self.ids_without_packing.discard(request_id)
        self.limited_ids.discard(request_id)
        if state is not None and not state.request.is_finished():
            if state.parked is not None:
                self._states[request_id] = state
                return state
            self._states[request_id] = RequestState(
                state.request, state.options, state.error, state.decision, state.is_counted
            )
        return state

    def limit_caching(self, state: RequestState, tokens: int) -> None:
        """Let no more than the first `tokens` tokens of a request enter the prefix cache."""
        limit = state.cacheable_tokens
        state.cacheable_tokens = tokens if limit is None else min(limit, tokens)
        self.limited_ids.add(state.request_id)
