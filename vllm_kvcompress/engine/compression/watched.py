"""What a worker's step knows of the prefills that it watches, and of what it packs."""

from dataclasses import dataclass, field
from typing import Self

import torch

from vllm_kvcompress.engine.compression.packer import PackJob
from vllm_kvcompress.engine.compression.reports import Stopwatch
from vllm_kvcompress.engine.messages.step import Addition, PackRequest, StepPlan
from vllm_kvcompress.methods.method import Method


@dataclass(slots=True)
class Prefill:
    """What a request's earlier chunks leave for its last one.

    Args:
        method: what will pack it.
        window: its observation window w.
        stopwatch: what packing it takes.
        tokens: tokens computed so far.
        queries: per layer, the last ``[<= w, Hq, D]`` queries.
        probe: per layer, queries ``[t, Hq, D]`` of the latest probe; empty before the first.
        sums: per layer, column sums ``[Hq, tokens]`` of the chunks so far, while all tokens stand.
        held: tokens that no layer held when it was packed for the last time, and how many were
            computed then; None while all tokens stand.
    """

    method: Method
    window: int
    stopwatch: Stopwatch
    tokens: int = 0
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    probe: dict[int, torch.Tensor] = field(default_factory=dict)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    source: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Rows behind a piece that judge it: so many of the prompt's first tokens, then its last."""

    first: int
    last: int

    @classmethod
    def of(cls, pack_request: PackRequest) -> Self:
        first = pack_request.settings.first_of_probe(pack_request.plan.probe)
        return cls(first, pack_request.plan.probe - first)

    @property
    def rows(self) -> int:
        return self.first + self.last


@dataclass(slots=True)
class Span:
    """One watched request's tokens in this step's batch.

    Args:
        row: of the batch.
        start, stop: rows of the batch.
        probe: rows behind them that judge them.
        blocks: ``[ceil(tokens / bs)]`` int64, vLLM block ids of all its tokens so far.
    """

    row: int
    start: int
    stop: int
    probe: int
    blocks: torch.Tensor
    prefill: Prefill


@dataclass(slots=True)
class Step:
    """What lives for one step.

    Args:
        plan: the scheduler's; None where this step has none.
        drafts: rows behind the last token of a prompt, which vLLM fills up to those of a decode
            step.
        probes: what judges a piece behind its last token.
        laid_out: whether the batch is known.
        layers_watched: layers that ran.
        spans: the prefills that are watched.
        jobs: the requests that are packed after it.
        additions: attention to add up after it, each with its row.
        remembered: prompts whose column sums are kept beside their pages after it.
    """

    plan: StepPlan | None
    drafts: dict[str, int]
    probes: dict[str, Probe]
    laid_out: bool = False
    layers_watched: int = 0
    spans: list[Span] = field(default_factory=list)
    jobs: list[PackJob] = field(default_factory=list)
    additions: list[tuple[Addition, int]] = field(default_factory=list)
    remembered: list[tuple[torch.Tensor, Prefill]] = field(default_factory=list)
