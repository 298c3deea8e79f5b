"""Messages between the scheduler and the workers about one step.

The scheduler attaches a `StepPlan` to vLLM's `SchedulerOutput`, and the workers attach a
`StepReport` to `ModelRunnerOutput`. Both are pickled with the object, as an attribute
``kvcompress`` that vLLM does not know.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.spans import count_before
from vllm_kvcompress.settings.config import CompressionConfig

# Targets of an early compression under memory pressure, and values of the metric's label `to`.
HALF, BUDGET = "half", "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRequest:
    """Instruction to pack one request after this step. There is a subclass for each case.

    Args:
        request_id: vLLM's request id.
        settings: the settings that choose which tokens to keep.
        plan: pages kept over all layers, and the maximum tokens of a layer.
        tokens: tokens computed when the step ends. A multiple of the block size, except at the end
            of a prompt.
        destination: vLLM block ids that receive the kept tokens, once the scheduler has taken the
            blocks. None if each layer keeps the pages that it has.
        in_place: some written pages may also be read, so all pages are staged.
    """

    request_id: str
    settings: CompressionConfig
    plan: PagePlan
    tokens: int
    destination: tuple[int, ...] | None = ()
    in_place: bool = False

    @property
    def prefill(self) -> bool:
        """Return whether the packed tokens are a prompt's, not only an output's."""
        return True

    @property
    def completes_prompt(self) -> bool:
        """Return whether this is the prompt's last packing."""
        return True

    @property
    def reads_page_tables(self) -> bool:
        """Return whether the tokens are read through the page tables of the batch.

        Otherwise nothing was packed before, and they are read through the prompt's block ids: a
        token's slot is its position.
        """
        return False

    @property
    def output_tokens(self) -> int | None:
        """Return the output tokens in a prompt with a look-ahead, 0 or more; else None."""
        return None

    @property
    def early_target(self) -> str:
        """Return HALF or BUDGET for a prompt packed before its look-ahead is over; else ""."""
        return ""

    @property
    def packed_end(self) -> int:
        """Return the number of the request's tokens before the tail, which stays in place."""
        return self.plan.packed_end

    @property
    def protected_tokens(self) -> int:
        """Return the number of prompt tokens that are kept regardless of their score."""
        return count_before(self.plan.spans, self.prompt_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens without the output tokens."""
        return self.tokens - (self.output_tokens or 0)


# `field()` without a default: a dataclass would otherwise take the property as the default.


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPrompt(PackRequest):
    """Pack a prompt to its budget when its prefill ends. The attention of its chunks scores it.

    Args:
        reads_page_tables: whether the prompt is in pieces.
    """

    reads_page_tables: bool = field()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPiece(PackRequest):
    """Pack a prompt at a boundary between pieces. The attention of its chunks scores it.

    It is packed again at later boundaries and at its end.
    """

    completes_prompt: ClassVar[bool] = False
    reads_page_tables: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLookahead(PackRequest):
    """Pack a prompt after its look-ahead, or early. The latest queries in the query ring score it.

    The ring holds the prompt's last queries, then the output's.

    Args:
        reads_page_tables: whether the prompt is in pieces, or was compressed early before.
        output_tokens: output tokens computed so far.
        early_target: HALF (it is packed again later) or BUDGET if its look-ahead is not over.
    """

    reads_page_tables: bool = field()
    output_tokens: int = field()
    early_target: str = field()

    @property
    def completes_prompt(self) -> bool:
        """Return whether the prompt is packed to its budget."""
        return self.early_target != HALF


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOutput(PackRequest):
    """Pack a decoding request again to its decode budget. Queries in the query ring score it."""

    prefill: ClassVar[bool] = False
    completes_prompt: ClassVar[bool] = False
    reads_page_tables: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AddGroups(PackRequest):
    """Pack all tokens since the last packing as groups in k4v3, and add their pages.

    Earlier groups stay as they are. Nothing is scored. `destination` has the added blocks.

    Args:
        prefill: whether the tokens are a prompt's.
        completes_prompt: whether the prompt's prefill ends.
        added_tokens: tokens that are packed, possibly 0 at a prompt's end.
        leading_blocks: ordinary blocks before the packed tokens.
    """

    prefill: bool = field()
    completes_prompt: bool = field()
    added_tokens: int = field()
    leading_blocks: int = field()


ScoredByChunks = PackPrompt | PackPiece
"""Cases in which the attention of the prompt's chunks scores the tokens."""
ScoredByRing = PackLookahead | PackOutput
"""Cases in which queries from the query ring score the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionAddition:
    """Instruction to add the attention of a decoding request's latest queries to its sums.

    Args:
        request_id: vLLM's request id.
        tokens: tokens computed when the step ends, a multiple of the block size.
        num_queries: latest queries that were not added yet.
        max_tokens: maximum tokens that a layer holds.
    """

    request_id: str
    tokens: int
    num_queries: int
    max_tokens: int


class AdoptedPages(NamedTuple):
    """Packed pages of the prefix cache with which a request begins.

    Args:
        request_id: vLLM's request id.
        leading_blocks: vLLM block ids of the ordinary blocks before the packed tokens.
        blocks: vLLM block ids. Block n holds page n of every layer.
        page_tokens: tokens in a page.
    """

    request_id: str
    leading_blocks: tuple[int, ...]
    blocks: tuple[int, ...]
    page_tokens: int

    @property
    def tokens(self) -> int:
        """Return the tokens in the pages of a layer."""
        return len(self.blocks) * self.page_tokens


class ParkPages(NamedTuple):
    """Instruction to copy the pages of a preempted request to host memory, before the step.

    Args:
        request_id: vLLM's request id.
        packed_pages: its packed pages over all layers.
        max_layer_pages: packed pages that no layer exceeds.
        blocks: vLLM block ids of its ordinary blocks.
        slots: slots of host memory. The packed pages come first, then the pages of `blocks`.
    """

    request_id: str
    packed_pages: int
    max_layer_pages: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


class ResumePages(NamedTuple):
    """Instruction to copy pages of `ParkPages` back, before the step in which a request resumes.

    Args:
        request_id: vLLM's request id.
        packed_pages: as in `ParkPages`.
        destination: vLLM block ids that receive the packed pages.
        first_block: index of the request's first ordinary block behind the packed tokens.
        leading_blocks: how many of `blocks` are before the packed tokens.
        blocks: vLLM block ids of its ordinary blocks. They may be fewer than were copied.
        slots: as in `ParkPages`.
    """

    request_id: str
    packed_pages: int
    destination: tuple[int, ...]
    first_block: int
    leading_blocks: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The workers' instructions for one step. There is no plan if there is nothing to do.

    Args:
        number: counts this scheduler's plans. A worker acknowledges a plan by its number.
        observe: requests with a prefill chunk in this step that are not packed after it, with their
            settings. The workers record what scoring will need later.
        keep_output_queries: requests whose prefill ends in this step and whose output will score
            their cache. The workers store their queries from now on.
        keep_prompt_queries: requests with a look-ahead whose current chunk reaches the prompt's
            last queries, but not the end of the prefill. The workers store these queries.
        add_attention: requests whose latest attention is added to their sums after this step,
            before any packing.
        pack: requests to pack after this step.
        adopt: requests that begin with packed pages of the prefix cache, from this step on.
        park: requests that were preempted, whose pages the workers copy to host memory first.
        zero_blocks: vLLM block ids that held packed groups and were freed. The workers fill them
            with zeros before this step.
        resume: requests that resume from their copies in this step.
        finish_stores: ids of the KV connector's stores that the workers finish before they pack.
    """

    number: int
    observe: tuple[tuple[str, CompressionConfig], ...] = ()
    keep_output_queries: tuple[str, ...] = ()
    keep_prompt_queries: tuple[str, ...] = ()
    add_attention: tuple[AttentionAddition, ...] = ()
    pack: tuple[PackRequest, ...] = ()
    adopt: tuple[AdoptedPages, ...] = ()
    park: tuple[ParkPages, ...] = ()
    zero_blocks: tuple[int, ...] = ()
    resume: tuple[ResumePages, ...] = ()
    finish_stores: tuple[int, ...] = ()

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Return the ids of all requests in this plan, each once."""
        parked = [order.request_id for order in self.park]
        resumed = [order.request_id for order in self.resume]
        return tuple(dict.fromkeys((*self.compressed_ids, *parked, *resumed)))

    @property
    def compressed_ids(self) -> tuple[str, ...]:
        """Return the ids of the requests that this step observes or packs, each once."""
        observed = [request_id for request_id, _ in self.observe]
        packed = [pack_request.request_id for pack_request in self.pack]
        added = [addition.request_id for addition in self.add_attention]
        ring = (*self.keep_output_queries, *self.keep_prompt_queries)
        return tuple(dict.fromkeys((*observed, *packed, *added, *ring)))

    @property
    def reported_prompts(self) -> tuple[PackRequest, ...]:
        """Return the prompts whose new size the client is told: completed or compressed early."""
        return tuple(
            pack_request
            for pack_request in self.pack
            if pack_request.prefill and (pack_request.completes_prompt or pack_request.early_target)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPrompt:
    """A worker's report about one packed prompt. Pickled with the step's output.

    Args:
        request_id: vLLM's request id.
        method: name of the compression method.
        tokens: prompt length.
        layers: model-wide indices of the compressed layers.
        layer_tokens: prompt tokens that each of `layers` keeps. The output tokens of a look-ahead
            are not among them: they all count as kept.
        seconds: device time to score and pack.
        output_tokens: as in `PackRequest`.
    """

    request_id: str
    method: str
    tokens: int
    layers: tuple[int, ...]
    layer_tokens: tuple[int, ...]
    seconds: float
    output_tokens: int | None = None

    @property
    def kept_tokens(self) -> float:
        """Return the mean number of kept prompt tokens per layer."""
        return sum(self.layer_tokens) / len(self.layer_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The workers' report after one step. There is no report if there is nothing to say.

    Args:
        executed_plan: number of the step's plan, None if it had none. The host has prepared the
            batch, observed every layer and launched the packing. The device may still be busy.
        packed: prompts whose packing the device has finished since the last report, from this step
            or earlier ones.
    """

    executed_plan: int | None
    packed: tuple[PackedPrompt, ...]


def attach_plan(output: SchedulerOutput, plan: StepPlan | None) -> None:
    """Attach a plan to the step that is sent to the workers."""
    output.kvcompress = plan


def plan_of(output: SchedulerOutput) -> StepPlan | None:
    """Return the plan attached to a step, None if it has none or it was lost on the way."""
    plan: StepPlan | None = getattr(output, "kvcompress", None)
    return plan


def attach_report(output: ModelRunnerOutput, report: StepReport) -> None:
    """Attach a report to the step's output that is sent to the scheduler."""
    output.kvcompress = report


def report_of(output: ModelRunnerOutput) -> StepReport | None:
    """Return the report attached to a step's output, None if it has none."""
    report: StepReport | None = getattr(output, "kvcompress", None)
    return report
