"""Runs one prompt through an engine in this process and counts its blocks at every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_kvcompress.doctor.checks import Check
from vllm_kvcompress.doctor.kept import KeptMap
from vllm_kvcompress.doctor.probe_prompt import Limits
from vllm_kvcompress.engine.doctor.kept_recorder import record, recorded, repacked
from vllm_kvcompress.engine.doctor.trial_prompt import TrialPrompt
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.spans import Spans, token_count
from vllm_kvcompress.planning.request import PlannedRequest


@dataclass(slots=True)
class Outcome:
    """Measurements from one request.

    Args:
        free_before, free_after: free blocks in the pool before and after the request.
        output_tokens: tokens that the request generated.
        blocks_held: for each decode step, the tokens computed by then and the blocks in use,
            without the blocks of uncompressed layers.
        packed: for each rank, the prompts that its worker packed.
        records: for each rank, the recorded prompts (`recorded`).
        repacked: for each rank, how often it packed output tokens.
    """

    free_before: int
    free_after: int = 0
    output_tokens: int = 0
    blocks_held: list[tuple[int, int]] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)
    records: list[list[dict[str, Any]]] = field(default_factory=list)
    repacked: list[int] = field(default_factory=list)


def run(engine: LLMEngine, prompt: TrialPrompt, limits: Limits, *, buckets: int) -> Outcome:
    """Run one prompt alone and measure the blocks that it holds in vLLM's block pool.

    Args:
        engine: an engine whose core runs in this process.
        prompt: the prompt.
        limits: the number of output tokens and the request's arguments.
        buckets: as in `record`.
    """
    core = engine.engine_core.engine_core
    scheduler, executor = core.scheduler, core.model_executor
    pool = scheduler.kv_cache_manager.block_pool
    before = executor.collective_rpc(_packed)
    executor.collective_rpc(record, args=(buckets, dict(prompt.parts)))
    outcome = Outcome(free_before=pool.get_num_free_blocks())
    engine.add_request(
        "kvcompress-doctor",
        prompt.rendered,
        SamplingParams(
            temperature=0,
            max_tokens=limits.output_tokens,
            ignore_eos=True,
            extra_args=dict(limits.request_args) or None,
        ),
    )
    while engine.has_unfinished_requests():
        for output in engine.step():
            outcome.output_tokens = max(outcome.output_tokens, len(output.outputs[0].token_ids))
        for request in scheduler.running:
            if request.num_computed_tokens >= len(prompt.ids):
                blocks = outcome.free_before - pool.get_num_free_blocks()
                blocks -= scheduler.groups.other_layer_blocks(request.request_id)
                outcome.blocks_held.append((request.num_computed_tokens, blocks))
    # With async scheduling, steps are still in flight.
    for _ in range(3):
        engine.step()
    outcome.free_after = pool.get_num_free_blocks()
    after = executor.collective_rpc(_packed)
    outcome.packed = [b - a for a, b in zip(before, after, strict=True)]
    outcome.records = executor.collective_rpc(recorded)
    outcome.repacked = executor.collective_rpc(repacked)
    return outcome


def _packed(wrapper: Any) -> int:
    """Return the number of prompts that a worker has packed."""
    compressor = wrapper.worker.compressor
    return 0 if compressor is None else int(compressor.compressed)


def check_outcome(
    outcome: Outcome, request: PlannedRequest, plan: PagePlan, draft_slots: int
) -> list[Check]:
    """Return checks that the measurements match the page plan.

    Args:
        outcome: the measurements.
        request: the request as planned.
        plan: the page plan of its prompt.
        draft_slots: slots that drafts may take behind the request's tokens.
    """
    checks = [
        _worker(outcome, request, plan),
        _blocks(outcome, request, plan, draft_slots),
        _pool(outcome),
    ]
    if request.settings.decode.budget is not None:
        checks.insert(1, _output(outcome, request))
    return checks


def _worker(outcome: Outcome, request: PlannedRequest, plan: PagePlan) -> Check:
    """Check that every rank packed the prompt into the planned number of pages."""
    pages = [sum(record["pages"] for record in records) for records in outcome.records]
    ok = all(prompts == 1 for prompts in outcome.packed) and all(
        packed_pages == plan.pages for packed_pages in pages
    )
    if ok:
        detail = (
            f"{len(pages)} of {len(pages)} ranks packed the prompt of {request.prompt} tokens into"
            f" {plan.pages} pages"
        )
        if request.draft_layers:
            detail += (
                f", and {plan.draft_pages} pages for all tokens of the draft model's layers. Not"
                " checked: what those pages hold, and how many drafts are accepted"
            )
    else:
        detail = (
            f"the ranks packed {outcome.packed} prompts into {pages} pages, but each must pack 1"
            f" into {plan.pages}: compression is on but does not run; look for another plugin or"
            " patch that replaces vLLM's worker or its attention"
        )
    return Check(name="worker", ok=ok, detail=detail)


def _output(outcome: Outcome, request: PlannedRequest) -> Check:
    """Check that every rank packed the output as often as planned."""
    planned, ranks = request.times_repacked, len(outcome.repacked)
    if ok := planned > 0 and all(times == planned for times in outcome.repacked):
        detail = f"{ranks} of {ranks} ranks packed the output as it grew"
    else:
        detail = (
            f"the ranks packed the output {outcome.repacked} times, but each must pack it"
            f" {planned} times: --kv-decode-budget is on but does not limit the output's tokens"
        )
    return Check(name="answer", ok=ok, detail=detail)


def _blocks(outcome: Outcome, request: PlannedRequest, plan: PagePlan, draft_slots: int) -> Check:
    """Check that the request held the planned number of blocks at every step, drafts included."""
    uncompressed = -(-plan.tokens // plan.block_size)
    wrong = [
        (n, blocks)
        for n, blocks in outcome.blocks_held
        if not 0 <= blocks - request.blocks_held(n) <= request.added_blocks(n, draft_slots)
    ]
    packed = [blocks for tokens, blocks in outcome.blocks_held if tokens >= plan.tokens]
    if not packed:
        detail = "the request ended before it was packed, so no blocks were counted"
    elif wrong:
        tokens, blocks = wrong[0]
        detail = (
            f"{blocks} blocks held after {tokens} tokens, but {request.blocks_held(tokens)}"
            f" planned ({uncompressed} without compression): blocks were not freed; look for"
            " another plugin or patch that replaces vLLM's scheduler or its KV cache manager"
        )
    else:
        detail = (
            f"{packed[0]} held while decoding, as planned, instead of {uncompressed}, at each of"
            f" {len(packed)} steps"
        )
        if lookahead := request.lookahead_tokens:
            detail += f" after a look-ahead of {lookahead} tokens"
    return Check(name="blocks", ok=bool(packed) and not wrong, detail=detail)


def _pool(outcome: Outcome) -> Check:
    """Check that the request freed all its blocks."""
    ok = outcome.free_after == outcome.free_before and outcome.output_tokens > 0
    detail = f"{outcome.free_after} blocks free afterwards, {outcome.free_before} before"
    if outcome.output_tokens == 0:
        detail += "; the request generated no tokens"
    return Check(name="pool", ok=ok, detail=detail)


def kept_map(
    outcome: Outcome,
    request: PlannedRequest,
    model: str,
    *,
    parts: Mapping[str, Spans] | None = None,
    numbers: Sequence[int] = (),
    stages: int = 1,
) -> KeptMap | None:
    """Return the map of kept tokens over the KV heads of all ranks; None if nothing was packed.

    Args:
        outcome: measurements of the request, with its recorded tokens.
        request: the request as planned.
        model: name of the model.
        parts: spans of the prompt that were counted separately, by name.
        numbers: model-wide indices of the layers; empty if all layers are compressed.
        stages: number of pipeline stages; the ranks are in the order of their stages.
    """
    ranks = [records[-1] for records in outcome.records if records]
    if not ranks:
        return None
    stage_size = len(ranks) // stages
    stage_ranks = [ranks[i : i + stage_size] for i in range(0, len(ranks), stage_size)]

    kept_tokens, share = (
        np.concatenate([np.mean([rank[key] for rank in stage], axis=0) for stage in stage_ranks])
        for key in ("kept_tokens", "share")
    )
    return KeptMap(
        model=model,
        method=request.settings.compress,
        budget=request.settings.budget,
        packed_dtype=request.settings.resolved_packed_dtype,
        prompt_tokens=request.prompt,
        kv_heads=sum(rank["kv_heads"] for rank in stage_ranks[0]),
        kept_tokens=kept_tokens.tolist(),
        share=share.tolist(),
        numbers=tuple(numbers),
        parts={
            name: (token_count(spans), fmean(rank["parts"][name] for rank in ranks))
            for name, spans in (parts or {}).items()
        },
    )
