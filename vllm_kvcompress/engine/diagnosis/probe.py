"""One prompt through a real engine in this process, with its blocks counted at every step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_kvcompress.doctor.checks import Check
from vllm_kvcompress.doctor.kept import KeptMap
from vllm_kvcompress.doctor.probe_prompt import Limits
from vllm_kvcompress.engine.diagnosis.recording import record, recorded, repacked
from vllm_kvcompress.engine.diagnosis.trial_prompt import TrialPrompt
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.methods.spans import Spans, token_count


@dataclass(slots=True)
class Outcome:
    """What happened to the prompt.

    Args:
        blocks_held: per step in which it decoded: tokens computed by then, and blocks out of the
            pool, those of layers with a sliding window aside.
        free_before, free_after: the pool's free blocks around it.
        answered: tokens of the answer.
        packed: per rank, prompts that its worker says it has packed meanwhile.
        records: per rank, what its packer moved.
        repacked: per rank, how often it packed an answer again.
    """

    free_before: int
    free_after: int = 0
    answered: int = 0
    blocks_held: list[tuple[int, int]] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)
    records: list[list[dict[str, Any]]] = field(default_factory=list)
    repacked: list[int] = field(default_factory=list)


def run(engine: LLMEngine, prompt: TrialPrompt, limits: Limits, *, buckets: int) -> Outcome:
    """Answer one prompt alone, and watch vLLM's own pool of blocks meanwhile.

    Args:
        engine: its core runs in this process.
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
            max_tokens=limits.answer,
            ignore_eos=True,
            extra_args=dict(limits.asks) or None,
        ),
    )
    while engine.has_unfinished_requests():
        done = engine.step()
        outcome.answered = max([outcome.answered, *(len(o.outputs[0].token_ids) for o in done)])
        for request in scheduler.running:
            if request.num_computed_tokens >= len(prompt.ids):
                blocks = outcome.free_before - pool.get_num_free_blocks()
                blocks -= scheduler.coordination.other_blocks_held(request.request_id)
                outcome.blocks_held.append((request.num_computed_tokens, blocks))
    # Async scheduling still has steps in flight.
    for _ in range(3):
        engine.step()
    outcome.free_after = pool.get_num_free_blocks()
    after = executor.collective_rpc(_packed)
    outcome.packed = [b - a for a, b in zip(before, after, strict=True)]
    outcome.records = executor.collective_rpc(recorded)
    outcome.repacked = executor.collective_rpc(repacked)
    return outcome


def _packed(wrapper: Any) -> int:
    compressor = wrapper.worker.compressor
    return 0 if compressor is None else int(compressor.compressed)


def judge(outcome: Outcome, plan: PagePlan, limits: Limits) -> list[Check]:
    """What `outcome` says about whether compression works."""
    checks = [_worker(outcome, plan, limits), _blocks(outcome, plan, limits), _pool(outcome)]
    if limits.settings.decode_budget is not None:
        checks.insert(1, _answer(outcome, plan, limits))
    return checks


def _prompt(plan: PagePlan, limits: Limits) -> int:
    """Tokens of the prompt that was packed, perhaps with those of a look-ahead."""
    return plan.tokens - limits.settings.resolved_lookahead


def _worker(outcome: Outcome, plan: PagePlan, limits: Limits) -> Check:
    pages = [sum(record["pages"] for record in records) for records in outcome.records]
    ok = all(prompts == 1 for prompts in outcome.packed) and all(
        packed_pages == plan.pages for packed_pages in pages
    )
    if ok:
        detail = (
            f"{len(pages)} of {len(pages)} ranks packed the prompt of {_prompt(plan, limits)}"
            f" tokens into {plan.pages} pages"
        )
    else:
        detail = (
            f"the ranks packed {outcome.packed} prompts into {pages} pages, each must pack 1 into"
            f" {plan.pages}: compression is on and does not run; look for another plugin or patch"
            " that replaces vLLM's worker or its attention"
        )
    return Check(name="worker", ok=ok, detail=detail)


def _answer(outcome: Outcome, plan: PagePlan, limits: Limits) -> Check:
    planned, ranks = limits.times_repacked(plan), len(outcome.repacked)
    if ok := planned > 0 and all(times == planned for times in outcome.repacked):
        detail = f"{ranks} of {ranks} ranks packed the answer again as it grew"
    else:
        detail = (
            f"the ranks packed the answer again {outcome.repacked} times, each must do so {planned}"
            " times: --kv-decode-budget is on and does not bound it"
        )
    return Check(name="answer", ok=ok, detail=detail)


def _blocks(outcome: Outcome, plan: PagePlan, limits: Limits) -> Check:
    whole = -(-plan.tokens // plan.block_size)
    wrong = [
        (n, blocks) for n, blocks in outcome.blocks_held if blocks != limits.blocks_held(plan, n)
    ]
    packed = [blocks for tokens, blocks in outcome.blocks_held if tokens >= plan.tokens]
    if not packed:
        detail = "the request never decoded so far that it was packed and its blocks counted"
    elif wrong:
        tokens, blocks = wrong[0]
        detail = (
            f"{blocks} blocks were held with {tokens} tokens computed,"
            f" {limits.blocks_held(plan, tokens)} are planned ({whole} without compression): blocks"
            " did not come back; look for"
            " another plugin or patch that replaces vLLM's scheduler or its KV cache manager"
        )
    else:
        detail = (
            f"{packed[0]} held while decoding, as planned, instead of {whole}, at each of"
            f" {len(packed)} steps"
        )
        if ahead := limits.settings.resolved_lookahead:
            detail += f" after a look-ahead of {ahead} tokens"
    return Check(name="blocks", ok=bool(packed) and not wrong, detail=detail)


def _pool(outcome: Outcome) -> Check:
    ok = outcome.free_after == outcome.free_before and outcome.answered > 0
    detail = f"{outcome.free_after} blocks free afterwards, {outcome.free_before} before"
    if outcome.answered == 0:
        detail += "; the request was not answered"
    return Check(name="pool", ok=ok, detail=detail)


def kept_map(
    outcome: Outcome,
    plan: PagePlan,
    limits: Limits,
    model: str,
    *,
    parts: Mapping[str, Spans] | None = None,
    numbers: Sequence[int] = (),
    stages: int = 1,
) -> KeptMap | None:
    """Where the kept tokens lie, over the heads of all ranks; None when nothing was packed.

    Args:
        parts: spans of the prompt that were counted for themselves, by name.
        numbers: the layers' places in the model; empty where all are compressed.
        stages: of the pipeline, which the ranks come in the order of.
    """
    ranks = [records[-1] for records in outcome.records if records]
    if not ranks:
        return None
    beside = len(ranks) // stages
    each_stage = [ranks[at : at + beside] for at in range(0, len(ranks), beside)]

    def mean(rows: list[list[float]]) -> list[float]:
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    share = [
        mean(list(rows))
        for stage in each_stage
        for rows in zip(*(rank["share"] for rank in stage), strict=True)
    ]
    kept = [mean([rank["kept_tokens"] for rank in stage]) for stage in each_stage]
    return KeptMap(
        model=model,
        method=limits.settings.compress,
        budget=limits.settings.budget,
        prompt_tokens=_prompt(plan, limits),
        kv_heads=sum(rank["kv_heads"] for rank in each_stage[0]),
        kept_tokens=[tokens for stage in kept for tokens in stage],
        share=share,
        numbers=tuple(numbers),
        parts={
            name: (token_count(spans), _mean(rank["parts"][name] for rank in ranks))
            for name, spans in (parts or {}).items()
        },
    )


def _mean(shares: Iterable[float]) -> float:
    every = list(shares)
    return sum(every) / len(every)
