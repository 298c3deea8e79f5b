"""What the scheduler tells the workers about one step, and what they tell back.

A plan is pickled with vLLM's SchedulerOutput, a report with its ModelRunnerOutput: both are an
attribute ``kvcompress`` that vLLM's own classes do not know.
"""

from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.settings.config import CompressionConfig

# what a look-ahead that is cut short packs its prompt to: values of the metric's label `to`
HALF, BUDGET = "half", "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRequest:
    """One request that is packed after this step.

    Args:
        request_id: vLLM's request id.
        settings: what chooses.
        plan: pages over all layers, and how many of its tokens no layer exceeds.
        tokens: tokens computed when the step ends; a multiple of the block but at a prompt's end.
        destination: vLLM block ids that receive the kept tokens; None where layers keep the pages
            that they have.
        prefill: it is a prompt, and not an answer that is packed again.
        answered: of a prompt that looked ahead, tokens of its answer that were computed by then;
            perhaps 0. The latest queries choose, which the ring has: the answer's, and before them
            the prompt's. None where it is packed in its prefill, by what its chunks left.
        whole: nothing of it was dropped yet, so that a token's slot is its position.
        ends: this is the prompt's end.
        in_place: some of the pages that are written may be read, so that all are staged.
        cut: of a prompt that is packed before its look-ahead is over, to what: HALF, and again
            later, or BUDGET.
    """

    request_id: str
    settings: CompressionConfig
    plan: PagePlan
    tokens: int
    destination: tuple[int, ...] | None
    prefill: bool = True
    answered: int | None = None
    whole: bool = True
    ends: bool = True
    in_place: bool = False
    cut: str = ""

    @property
    def uses_ring_queries(self) -> bool:
        """Whether the ring has the queries that choose, and not what its chunks left."""
        return not self.prefill or self.answered is not None

    @property
    def protected_tokens(self) -> int:
        """Tokens of the prompt that are kept whatever their score."""
        return count_before(self.plan.spans, self.prompt_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens without those that were answered."""
        return self.tokens - (self.answered or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """One growing request whose latest queries' attention is added to that of the earlier ones.

    Args:
        request_id: vLLM's request id.
        tokens: computed when the step ends; a multiple of the block.
        latest: queries that were not added yet.
        most: tokens that no layer exceeds.
    """

    request_id: str
    tokens: int
    latest: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the workers have to do in one step, when there is something to do.

    Args:
        number: of this plan, counted by its scheduler; a worker acknowledges it by that.
        observe: requests that run a chunk of their prefill and are not packed after this step, with
            their settings: what its end needs must be kept, or what their answer will.
        grow: requests whose prefill ends in this step, and whose answer will judge what they hold:
            from now on their queries must be kept.
        keep: requests that will look ahead, whose prefill goes on but has come to its last queries:
            likewise.
        add: requests whose latest attention is added up after this step, before any is packed.
        pack: requests that are packed after this step.
    """

    number: int
    observe: tuple[tuple[str, CompressionConfig], ...] = ()
    grow: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    add: tuple[Addition, ...] = ()
    pack: tuple[PackRequest, ...] = ()

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests that this step has something to do for."""
        observed = [request_id for request_id, _ in self.observe]
        packed = [pack_request.request_id for pack_request in self.pack]
        added = [pack_request.request_id for pack_request in self.add]
        return tuple(dict.fromkeys((*observed, *packed, *added, *self.grow, *self.keep)))

    @property
    def ended(self) -> tuple[PackRequest, ...]:
        """The prompts whose compression this step completes."""
        return tuple(
            pack_request for pack_request in self.pack if pack_request.prefill and pack_request.ends
        )

    @property
    def told(self) -> tuple[PackRequest, ...]:
        """The prompts of which this step decides what is kept from now on, perhaps for a while."""
        return tuple(
            pack_request
            for pack_request in self.pack
            if pack_request.prefill and (pack_request.ends or pack_request.cut)
        )


class RoleKept(NamedTuple):
    """How much is kept of one role's tokens.

    Args:
        tokens: that it has in the prompt.
        share: that is kept of them, mean of all layers and KV heads.
    """

    role: str
    tokens: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One prompt that a worker has packed. Pickled with the step's output.

    Args:
        request_id: vLLM's request id.
        method: what compressed it.
        tokens: prompt length.
        answered: tokens of its answer that were computed when it was packed.
        layers: indices of the model's layers that are compressed.
        layer_tokens: tokens that each of these keeps, those of the answer included.
        seconds: what scoring and packing took on the worker's device.
        by_role: where the request asks, and nothing of its prompt was dropped before.
    """

    request_id: str
    method: str
    tokens: int
    layers: tuple[int, ...]
    layer_tokens: tuple[int, ...]
    seconds: float
    answered: int = 0
    by_role: tuple[RoleKept, ...] = ()

    @property
    def kept(self) -> float:
        """Mean tokens kept per layer beside the answer's."""
        return sum(self.layer_tokens) / len(self.layer_tokens) - self.answered


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What the workers have done, when there is something to tell.

    Args:
        carried_out: number of the step's plan, if it had one: the host has laid out its batch,
            watched every layer and launched the packing. A device may still be at it.
        packed: prompts that the device has packed since the last report, of this step or of
            earlier ones.
    """

    carried_out: int | None
    packed: tuple[Packed, ...]


def attach_plan(output: SchedulerOutput, plan: StepPlan | None) -> None:
    """Send a step's plan to the workers with the step."""
    output.kvcompress = plan


def plan_of(output: SchedulerOutput) -> StepPlan | None:
    """The plan that came with a step; None where there is none, or it was lost on its way."""
    plan: StepPlan | None = getattr(output, "kvcompress", None)
    return plan


def attach_report(output: ModelRunnerOutput, report: StepReport) -> None:
    """Send a report to the scheduler with a step's output."""
    output.kvcompress = report


def report_of(output: ModelRunnerOutput) -> StepReport | None:
    """The report that came with a step's output, if any."""
    report: StepReport | None = getattr(output, "kvcompress", None)
    return report
