"""Seeded random requests in a pool that is too small: nothing lost, nothing leaked.

Requests choose their own methods and budgets, of answers too, are given up, preempted and computed
again; each answer is the same request's where there is room for all, so nobody sees another's
tokens. What was preempted, and a tenth of the others, is asked again alone, the rest a few at a
time: in a roomy engine company changes nothing (test_invariance, test_methods, test_overrides).
"""

import gc
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import pytest

from checkpoints import make, tokens
from engines import BLOCK, V2, Engine, engine, settings
from processor import needs_avx512
from test_metrics import samples
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import settings_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of one engine.

    Args:
        count: requests.
        longest: tokens of the longest prompt.
        pool: blocks; the longest prompt needs most of them.
        chunk: tokens a step may compute.
        talkative: share of the requests that want a long answer.
        choosy: whether requests choose their method and budget.
        bounded: whether answers are, and requests choose how much.
        ahead: whether answers judge their prompts, and requests choose after how many tokens.
        model: two layers of it are compressed.
        beside: blocks of the pool for layers with a sliding window.
        options: of the engine.
        cache: what keys and values are stored in; of the roomy engine too.
    """

    count: int
    longest: int
    pool: int
    chunk: int = 512
    talkative: float = 0.4
    choosy: bool = False
    bounded: bool = False
    ahead: bool = False
    model: str = "llama-two-layers"
    beside: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    cache: str = "auto"

    @property
    def asks(self) -> list[dict[str, Any] | None]:
        """What requests may ask for: what is quantised is not merged."""
        asks = ASKS_BOUNDED if self.bounded else ASKS if self.choosy else [None]
        asks = ASKS_AHEAD if self.ahead else asks
        merging = {"kv_compress": "d2o"}.items()
        return [x for x in asks if self.cache == "auto" or not merging <= (x or {}).items()]

    @property
    def free(self) -> bool:
        """Whether requests may protect more than their budget holds."""
        return bool(self.allowed["kvcompress"].get("allow_override"))

    @property
    def allowed(self) -> dict[str, Any]:
        """The engine's settings."""
        if self.bounded:
            return BOUNDED
        if self.ahead:
            return AHEAD
        return FREE if self.cache == "auto" else settings("cake", 0.3, allow_override=UNMERGED)


@dataclass(slots=True)
class Request:
    """One request, and when it is sent and given up, in steps."""

    prompt: list[int]
    new: int
    wait: int
    abort: int | None
    priority: int
    asks: dict[str, Any] | None


ASKS: list[dict[str, Any] | None] = [
    None,
    None,
    {"kv_compress": "off"},
    {"kv_budget": 0.15},
    {"kv_budget": 0.6},
    {"kv_budget": 200},
    {"kv_compress": "snapkv"},
    {"kv_compress": "h2o", "kv_budget": 0.4},
    {"kv_compress": "d2o", "kv_budget": 0.4},
    {"kv_compress": "streamingllm", "kv_budget": 0.2},
]
ASKS_BOUNDED: list[dict[str, Any] | None] = [
    None,
    {"kv_compress": "off"},
    {"kv_budget": 40, "kv_decode_budget": 40},
    {"kv_compress": "snapkv"},
    {"kv_compress": "streamingllm", "kv_budget": 64, "kv_decode_budget": 64},
    {"kv_compress": "d2o"},
]
ASKS_AHEAD: list[dict[str, Any] | None] = [
    None,
    {"kv_compress": "off"},
    {"kv_lookahead": 0},
    {"kv_lookahead": 3, "kv_budget": 0.15},
    {"kv_compress": "snapkv"},
    {"kv_compress": "streamingllm"},
]
SMALL = dict(longest=450, pool=22, chunk=256, talkative=0.8)
HYBRID = {**SMALL, "chunk": 128, "model": "gpt-oss", "beside": 12}
DRAFTS = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
LOADS = {
    "plain": Load(count=160, longest=2200, pool=70, talkative=0.2, choosy=True),
    "bounded": Load(count=24, longest=500, pool=24, talkative=0.8, bounded=True),
    "async": Load(**SMALL, count=16, bounded=True, options={"async_scheduling": True}),
    "priority": Load(**SMALL, count=20, options={"scheduling_policy": "priority"}),
    "hybrid": Load(**HYBRID, count=24, choosy=True),
    "hybrid, bounded": Load(**HYBRID, count=16, bounded=True),
    "drafts": Load(**SMALL, count=20, choosy=True, options={"speculative_config": DRAFTS}),
    "fp8": Load(**SMALL, count=24, choosy=True, cache="fp8"),
    "ahead": Load(**SMALL, count=24, ahead=True, options={"async_scheduling": True}),
}
if V2:
    LOADS = {"plain": Load(count=12, longest=400, pool=24, choosy=True)}

# `make soak` asks for many times as many requests
TIMES = int(os.environ.get("SOAK_TIMES", "1"))
LAYERS, TOGETHER = 2, 24
FREE = settings("cake", 0.3, allow_override="all")
AHEAD = settings("cake", 0.3, lookahead=8, allow_override="off,snapkv,streamingllm")
UNMERGED = "off,snapkv,h2o,streamingllm"
# In tokens, and the same of a prompt and of an answer: what is computed again keeps what it was
# granted, and a long answer to a short prompt what it held. Many prompts are longer than a piece.
BOUNDED = settings(
    "cake",
    96,
    allow_override="off,snapkv,streamingllm,d2o",
    decode_budget=96,
    decode_interval=32,
    max_whole=224,
    piece=64,
    probe=16,
    probe_first=16,
)


@dataclass(frozen=True, slots=True)
class Resources:
    """What this process holds: open files by what they are, threads, and bytes of memory."""

    files: Counter[str]
    threads: int
    memory: int


def resources() -> Resources:
    gc.collect()
    process = psutil.Process(os.getpid())
    files: Counter[str] = Counter()
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            # each socket and pipe has a number of its own
            files[re.sub(r"\[\d+\]", "", os.readlink(f"/proc/self/fd/{file}"))] += 1
    return Resources(files, process.num_threads(), process.memory_info().rss)


def requests(load: Load, seed: int):
    """Mostly short, some very long; half of them begin alike."""
    rng = random.Random(seed)
    stems = [tokens(load.longest, seed=100 + i) for i in range(3)]
    for index in range(load.count):
        long = index % 25 == 0 or load.longest < 1000
        length = rng.randint(1, load.longest if long else load.longest // 6)
        shared = rng.randint(0, length) if rng.random() < 0.5 else 0
        made = Request(
            prompt=rng.choice(stems)[:shared] + tokens(length - shared, seed=index),
            new=rng.randint(60, 220) if rng.random() < load.talkative else rng.randint(1, 24),
            wait=rng.randint(0, 1),
            abort=rng.randint(1, 12) if rng.random() < 0.15 else None,
            priority=rng.randint(0, 3),
            asks=rng.choice(load.asks),
        )
        # a smaller decode budget than the server's may not hold it
        bound = "kv_decode_budget" in (made.asks or {})
        if rng.random() < 0.3 and length > 40 and load.free and not bound:
            protect = [[rng.randint(0, 9), 20], [length - 12, length - rng.randint(1, 6)]]
            made.asks = {**(made.asks or {}), "kv_protect": protect}
        yield made


def is_compressed(request: Request, config: CompressionConfig) -> bool:
    """Whether this request's prompt is to be compressed, from what it says alone."""
    own = settings_for(config, request.asks)
    if own is None or len(request.prompt) < own.min_prompt:
        return False
    if request.new < own.resolved_lookahead + 2:
        return False
    spans = tuple(map(tuple, (request.asks or {}).get("kv_protect", ())))
    return page_plan(own.prompt(LAYERS, len(request.prompt)), BLOCK, spans) is not None


def send(llm: Engine, todo: Sequence[Request]) -> tuple[dict[str, list[int]], set[str]]:
    """Send everything, stepping in between, until nothing is left: answers, and who was aborted."""
    done: dict[str, list[int]] = {}
    aborted: set[str] = set()
    due: list[tuple[int, str]] = []
    steps = 0
    for index, request in enumerate(todo):
        llm.submit(
            str(index),
            request.prompt,
            request.new,
            priority=request.priority,
            extra_args=request.asks,
        )
        if request.abort is not None:
            due.append((steps + request.wait + request.abort, str(index)))
        for _ in range(request.wait):
            done.update({k: list(v.outputs[0].token_ids) for k, v in llm.step().items()})
            steps += 1
            for when, request_id in [item for item in due if item[0] <= steps]:
                due.remove((when, request_id))
                aborted.add(request_id)
                llm.llm.llm_engine.abort_request([request_id])
    done.update(llm.drain())
    llm.settle()
    return done, aborted


def watch_early(llm: Engine) -> dict[str, list[int]]:
    """From now on: per request how many tokens it had when its look-ahead was cut short."""
    seen: dict[str, list[int]] = {}

    def packed(todo: Any, kept: Any, counts: Any) -> None:
        if todo.cut:
            seen.setdefault(todo.request_id.split("-")[0], []).append(todo.answered + 1)

    llm.compressor.packer.observers.append(packed)
    return seen


@pytest.mark.slow
@pytest.mark.timeout(2400 * TIMES)
@pytest.mark.filterwarnings("ignore:(?s).*reflected list")  # of V1's drafter, by its compiler
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_avx512 if load.cache == "fp8" else ())
        for name, load in LOADS.items()
    ],
)
def test_soak(name, checkpoints_folder, keep_async_scheduling):
    load = replace(LOADS[name], count=LOADS[name].count * TIMES)
    model = make(load.model, checkpoints_folder)
    chosen = load.allowed
    config = CompressionConfig.parse(chosen["kvcompress"])
    options = dict(
        additional_config=chosen,
        max_model_len=load.pool * BLOCK,
        max_num_seqs=96,
        kv_cache_dtype=load.cache,
    )
    todo = list(requests(load, seed=17))
    with engine(
        model,
        blocks=1 + load.pool + load.beside,
        max_num_batched_tokens=load.chunk,
        **options,
        **load.options,
    ) as llm:
        free = llm.free_blocks
        resumed = llm.watch_preemptions()
        ids = llm.watch_packing(lambda finished: finished.todo.request_id.split("-")[0])
        early = watch_early(llm)
        done, aborted = send(llm, todo)
        packed = set(ids)
        assert llm.free_blocks == free
        manager, compressor = llm.manager, llm.compressor
        left = [
            *(manager.planner.schedules, manager._packed, manager._cacheable, manager._pending),
            *(manager._observe, manager._grow, manager._keep, manager._add),
            *(manager.lookaheads, manager.planner._looking, compressor.pool.protected),
            *(compressor._prefills, compressor._step, compressor.pool._slots),
            compressor.pool.ring and compressor.pool.ring._slots,
            *(compressor.reports._pending, manager.tally.packed, llm.scheduler.requests),
            manager.tally._repeats,
        ]
        assert not any(left), left
        gc.collect()
        assert not manager.planner.admissions._decisions
        cuts = {request_id: list(at) for request_id, at in resumed.items()}
        again, pieces = (
            samples()[f"{what}_total",] for what in ("repacked_answers", "packed_pieces")
        )
        # vLLM itself grows until everything was used once; from then on nothing may
        for _ in range(2):
            before = resources()
            send(llm, todo[: load.count // 4])
            assert llm.free_blocks == free
        after = resources()
    more = after.files - before.files  # fewer may be open: those of what ran before, and ended
    threads, grown = after.threads - before.threads, after.memory - before.memory
    expected = {str(i) for i in range(load.count)} - aborted
    assert aborted
    assert expected <= done.keys()
    meant = {str(i) for i, request in enumerate(todo) if is_compressed(request, config)}
    assert meant - aborted <= packed <= meant | early.keys()
    assert bool(early) is load.ahead
    assert len(packed) > load.count // 10
    assert (again > load.count) is load.bounded
    assert (pieces > load.count // 2) is load.bounded
    if not V2:
        assert cuts, "the pool was meant to force preemption"
    print(  # noqa: T201
        f"{load.count} requests, {len(aborted)} aborted, {len(packed)} compressed, {len(cuts)}"
        f" preempted, answers packed {again:.0f} times; then in {load.count // 4}:"
        f" {more.total()} files, {threads} threads, {grown / 2**20:.1f} MiB more"
    )
    assert not more
    assert threads == 0
    assert grown < 5 * 2**20 * TIMES, "memory is lost with every request"
    with engine(model, enable_prefix_caching=False, **options) as llm:
        crowded = llm.watch_preemptions()
        asked = {request_id: todo[int(request_id)] for request_id in sorted(expected, key=int)}
        # What is never packed is the same whatever happens to it. An answer that is computed again
        # is bounded as before, but its prompt stays whole unless both are longer than may be.
        packing = asked.keys() if load.bounded else meant
        asks = {
            request_id: request.asks if request_id in packing else {"kv_compress": "off"}
            for request_id, request in asked.items()
        }
        whole = {"min_prompt": config.max_whole or 10**6}
        left_whole = CompressionConfig.parse({**config.to_additional_config(), **whole})
        single = (cuts.keys() & packing) | {i for i in asked if int(i) % 10 == 0} | early.keys()
        for request_id in sorted(single & asked.keys(), key=int):
            request, at = asked[request_id], cuts.get(request_id, [])
            at = at if request_id in packing else []
            llm.manager.replace_settings(config if request_id in meant else left_whole)
            answer = done[request_id]
            if load.ahead:
                # Before it is packed a preemption changes nothing. Behind it no fresh request is
                # judged as the rest is: by queries of its own answer, of a prompt with its answer.
                # Nor is one that was judged early, since the pool was short.
                own = settings_for(config, request.asks)
                at = [cut for cut in at if own is None or cut >= own.resolved_lookahead]
                at += early.get(request_id, [])
                answer, at = answer[: min(at, default=len(answer))], []
            llm.alone(request.prompt, len(answer), answer, at, extra_args=asks[request_id])
        llm.manager.replace_settings(config)
        # those that answer as long go together, or all would wait for one
        others = sorted(asked.keys() - single, key=lambda name: (asked[name].new, int(name)))
        for start in range(0, len(others), TOGETHER):
            few = others[start : start + TOGETHER]
            for request_id in few:
                request = asked[request_id]
                llm.submit(request_id, request.prompt, request.new, extra_args=asks[request_id])
            got = {key.split("-")[0]: answer for key, answer in llm.drain().items()}
            assert got == {request_id: done[request_id] for request_id in few}
        assert not crowded, "there was meant to be room for all"
