"""One prompt through a real engine in this process, with its blocks counted at every step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_kvcompress.checks import Check
from vllm_kvcompress.engine.diagnosis.recording import record, recorded
from vllm_kvcompress.kept import KeptMap
from vllm_kvcompress.plan import PagePlan
from vllm_kvcompress.probe_prompt import Limits


@dataclass(slots=True)
class Seen:
    """What happened to the prompt.

    Args:
        held: per step in which it decoded: tokens computed by then, and blocks out of the pool.
        free_before, free_after: the pool's free blocks around it.
        answered: tokens of the answer.
        packed: per rank, prompts that its worker says it has packed meanwhile.
        records: per rank, what its packer moved.
    """

    free_before: int
    free_after: int = 0
    answered: int = 0
    held: list[tuple[int, int]] = field(default_factory=list)
    packed: list[int] = field(default_factory=list)
    records: list[list[dict[str, Any]]] = field(default_factory=list)


def run(engine: LLMEngine, prompt: Sequence[int], limits: Limits, *, buckets: int) -> Seen:
    """Answer `prompt` alone, and watch vLLM's own pool of blocks meanwhile.

    Args:
        engine: its core runs in this process.
        buckets: as in `record`.
    """
    core = engine.engine_core.engine_core
    scheduler, executor = core.scheduler, core.model_executor
    pool = scheduler.kv_cache_manager.block_pool
    before = executor.collective_rpc(_packed)
    executor.collective_rpc(record, args=(buckets,))
    seen = Seen(free_before=pool.get_num_free_blocks())
    engine.add_request(
        "kvcompress-doctor",
        {"prompt_token_ids": list(prompt)},
        SamplingParams(
            temperature=0,
            max_tokens=limits.answer,
            ignore_eos=True,
            extra_args=dict(limits.asks) or None,
        ),
    )
    while engine.has_unfinished_requests():
        done = engine.step()
        seen.answered = max([seen.answered, *(len(o.outputs[0].token_ids) for o in done)])
        for request in scheduler.running:
            if request.num_computed_tokens >= len(prompt):
                held = seen.free_before - pool.get_num_free_blocks()
                seen.held.append((request.num_computed_tokens, held))
    for _ in range(3):  # what async scheduling still has in flight
        engine.step()
    seen.free_after = pool.get_num_free_blocks()
    after = executor.collective_rpc(_packed)
    seen.packed = [b - a for a, b in zip(before, after, strict=True)]
    seen.records = executor.collective_rpc(recorded)
    return seen


def _packed(wrapper: Any) -> int:
    compressor = wrapper.worker.compressor
    return 0 if compressor is None else int(compressor.compressed)


def judge(seen: Seen, plan: PagePlan, limits: Limits) -> list[Check]:
    """What `seen` says about whether compression works."""
    return [_worker(seen, plan), _blocks(seen, plan, limits), _back(seen)]


def _worker(seen: Seen, plan: PagePlan) -> Check:
    pages = [sum(one["pages"] for one in records) for records in seen.records]
    ok = all(count == 1 for count in seen.packed) and all(found == plan.pages for found in pages)
    if ok:
        detail = (
            f"{len(pages)} of {len(pages)} ranks packed the prompt of {plan.tokens} tokens into"
            f" {plan.pages} pages"
        )
    else:
        detail = (
            f"the ranks packed {seen.packed} prompts into {pages} pages, each must pack 1 into"
            f" {plan.pages}: compression is on and does not run; look for another plugin or patch"
            " that replaces vLLM's worker or its attention"
        )
    return Check(name="worker", ok=ok, detail=detail)


def _blocks(seen: Seen, plan: PagePlan, limits: Limits) -> Check:
    whole = -(-plan.tokens // plan.block_size)
    wrong = [(n, held) for n, held in seen.held if held != limits.held(plan, n)]
    if not seen.held:
        detail = "the request never decoded, so that its blocks could not be counted"
    elif wrong:
        tokens, held = wrong[0]
        detail = (
            f"{held} blocks were held with {tokens} tokens computed, {limits.held(plan, tokens)}"
            f" are planned ({whole} without compression): blocks did not come back; look for"
            " another plugin or patch that replaces vLLM's scheduler or its KV cache manager"
        )
    else:
        detail = (
            f"{seen.held[0][1]} held while decoding, as planned, instead of {whole}, at each of"
            f" {len(seen.held)} steps"
        )
    return Check(name="blocks", ok=bool(seen.held) and not wrong, detail=detail)


def _back(seen: Seen) -> Check:
    ok = seen.free_after == seen.free_before and seen.answered > 0
    detail = f"{seen.free_after} blocks free afterwards, {seen.free_before} before"
    if seen.answered == 0:
        detail += "; the request was not answered"
    return Check(name="pool", ok=ok, detail=detail)


def kept_map(seen: Seen, plan: PagePlan, limits: Limits, model: str) -> KeptMap | None:
    """Where the kept tokens lie, over the heads of all ranks; None when nothing was packed."""
    ranks = [records[-1] for records in seen.records if records]
    if not ranks:
        return None

    def mean(rows: list[list[float]]) -> list[float]:
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    share = [mean(list(rows)) for rows in zip(*(rank["share"] for rank in ranks), strict=True)]
    return KeptMap(
        model=model,
        method=limits.settings.compress,
        budget=limits.settings.budget,
        prompt_tokens=plan.tokens,
        kv_heads=sum(rank["kv_heads"] for rank in ranks),
        kept_tokens=mean([rank["kept_tokens"] for rank in ranks]),
        share=share,
    )
