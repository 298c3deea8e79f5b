"""State of one worker step: the prefills it observes and the requests it packs."""

from dataclasses import dataclass, field
from typing import Self

import torch

from vllm_kvcompress.engine.compression.packer import PackJob
from vllm_kvcompress.engine.compression.reports import Stopwatch
from vllm_kvcompress.engine.messages.step import AttentionAddition, PackRequest, StepPlan
from vllm_kvcompress.methods.method import Method


@dataclass(slots=True)
class PrefillState:
    """State that a request's prefill chunks accumulate until its prompt is packed.

    Args:
        method: the method that will pack the prompt.
        window: the observation window w, in queries.
        stopwatch: measures the time spent on packing the prompt.
        tokens: tokens computed so far.
        queries: by layer, the last ``[<= w, Hq, D]`` queries.
        log_sums: by layer, the log-sum-exp ``[Hq, <= w]`` float32 of the scaled logits of each of
            `queries`. No entry if the backend did not return it for every query.
        probe: by layer, queries ``[t, Hq, D]`` of the latest probe; empty before the first.
        sums: by layer, column sums ``[Hq, tokens]`` of all chunks so far; empty once a piece of the
            prompt is packed.
        packed_tokens: upper bound on the tokens that a layer kept when the prompt was last packed,
            and the number of tokens computed by then; None while nothing is packed.
    """

    method: Method
    window: int
    stopwatch: Stopwatch
    tokens: int = 0
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    log_sums: dict[int, torch.Tensor] = field(default_factory=dict)
    probe: dict[int, torch.Tensor] = field(default_factory=dict)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    packed_tokens: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Probe tokens after a piece, whose queries score it: the prompt's first and last tokens.

    Args:
        first: number of tokens from the start of the prompt.
        last: number of tokens from the end of the prompt; they follow the `first` ones.
    """

    first: int
    last: int

    @classmethod
    def of(cls, pack_request: PackRequest) -> Self:
        first = pack_request.settings.pieces.num_first_probe_tokens(pack_request.plan.probe)
        return cls(first, pack_request.plan.probe - first)

    @property
    def rows(self) -> int:
        return self.first + self.last


@dataclass(slots=True)
class ObservedChunk:
    """The observed chunk of one prefill in this step's batch.

    Args:
        batch_row: the request's row in the batch.
        start, stop: its token range in the flattened batch.
        probe: number of probe tokens after `stop`.
        blocks: ``[ceil(tokens / bs)]`` int64, vLLM block ids of all tokens computed so far.
        prefill: state kept across the request's chunks.
        keeps_log_sums: whether the log-sum-exp of its queries can be used to score the prompt.
    """

    batch_row: int
    start: int
    stop: int
    probe: int
    blocks: torch.Tensor
    prefill: PrefillState
    keeps_log_sums: bool = False


@dataclass(slots=True)
class StepState:
    """State that lives for one step.

    Args:
        plan: the scheduler's plan for this step, or None.
        drafts: by request, draft tokens after the last prompt token, which vLLM adds to fill up a
            decode step.
        probes: by request, its probe.
        may_use_scratch: whether rows of the batch may read scratch pages, which every layer fills.
        laid_out: whether `begin_batch` has seen this step's batch.
        layers_observed: layers that have called `after_attention`.
        chunks: the observed prefill chunks.
        keeps_log_sums: whether any of `chunks` keeps the log-sum-exp of its queries.
        log_sums: the log-sum-exp ``[Hq, tokens]`` of the batch's queries in the layer that is being
            computed, if the backend returned it.
        jobs: requests to pack after the step.
        additions: attention to add after the step, each with its row in the batch.
        prompt_sums: block ids and state of prompts whose column sums are stored in the page pool
            after the step.
    """

    plan: StepPlan | None
    drafts: dict[str, int]
    probes: dict[str, Probe]
    may_use_scratch: bool = False
    laid_out: bool = False
    layers_observed: int = 0
    chunks: list[ObservedChunk] = field(default_factory=list)
    keeps_log_sums: bool = False
    log_sums: torch.Tensor | None = None
    jobs: list[PackJob] = field(default_factory=list)
    additions: list[tuple[AttentionAddition, int]] = field(default_factory=list)
    prompt_sums: list[tuple[torch.Tensor, PrefillState]] = field(default_factory=list)
