"""What the scheduler tells the workers about one step, and what they tell back.

Pickled with the SchedulerOutput and with the ModelRunnerOutput.
"""

from dataclasses import dataclass

from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.engine.tally import Packed
from vllm_kvcompress.plan import PagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """One request whose prefill ends in this step and is then compressed.

    Args:
        request_id: vLLM's request id.
        settings: what compresses it.
        plan: how much is kept; tokens, pages and blocks.
        destination: `plan.blocks` vLLM block ids that receive the kept tokens.
        in_place: some of `destination` are the prompt's own blocks.
    """

    request_id: str
    settings: CompressionConfig
    plan: PagePlan
    destination: tuple[int, ...]
    in_place: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Attached to a SchedulerOutput as ``kvcompress`` when there is something to do.

    Args:
        number: of this plan, counted by its scheduler; a worker acknowledges it by that.
        observe: requests that run a chunk of their prefill but not its end, and will be
            compressed at its end, with their settings: what the end needs must be kept.
        compress: requests whose prefill ends in this step.
    """

    number: int
    observe: tuple[tuple[str, CompressionConfig], ...]
    compress: tuple[Compression, ...]

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests whose prefills this step watches or ends."""
        observed = (request_id for request_id, _ in self.observe)
        return (*observed, *(todo.request_id for todo in self.compress))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Attached to a step's output as ``kvcompress`` when there is something to tell.

    Args:
        carried_out: number of the step's plan, if it had one: the host has laid out its batch,
            watched every layer and launched the packing. A device may still be at it.
        packed: prompts that the device has packed since the last report, of this step or of
            earlier ones.
    """

    carried_out: int | None
    packed: tuple[Packed, ...]
