"""What the scheduler tells the workers about one step. Pickled with the SchedulerOutput."""

from dataclasses import dataclass

from vllm_kvcompress.config import CompressionConfig
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
        observe: requests that run a chunk of their prefill but not its end, and will be
            compressed at its end, with their settings: what the end needs must be kept.
        compress: requests whose prefill ends in this step.
    """

    observe: tuple[tuple[str, CompressionConfig], ...]
    compress: tuple[Compression, ...]
