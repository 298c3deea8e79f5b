"""Soak test: seeded random requests in a pool that is too small lose and leak nothing.

Requests choose their own methods, budgets and decode budgets. They are aborted, preempted and
recomputed. Each output must equal the output in a large pool, which shows that no request reads
another one's tokens. There, requests run a few at a time, because concurrent requests do not change
outputs in a large pool (test_invariance, test_methods, test_overrides).
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
from draft_checkpoints import make_eagle
from drafting import FOUR_TOKENS, limit_drafts, speculative, watch_drafts
from engines import BLOCK, Engine, engine, settings
from processor import needs_avx512
from test_metrics import samples
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of one engine.

    Args:
        count: number of requests.
        max_prompt: tokens of the longest prompt.
        pool: blocks of the pool. The longest prompt needs most of them.
        chunk: maximum tokens per step.
        long_output_rate: share of the requests with a long output.
        long_output: maximum tokens of a long output.
        overrides_method: whether requests choose their method and budget.
        bounded: whether there is a decode budget, and requests choose its size.
        lookahead: whether there is a look-ahead, and requests choose its length.
        packed: whether prompts are packed in k4v3, and requests choose their format.
        packs_outputs: whether outputs are packed in k4v3 too.
        park: GiB of host memory for preempted requests; None without.
        model: name of a test checkpoint with two compressed layers.
        window_blocks: further blocks of the pool for layers with a sliding window.
        options: more engine options.
        eagle: whether an EAGLE head drafts. Outputs use four tokens then, or none is accepted.
        cache_dtype: dtype of keys and values, in the large pool too.
        seed: seed of the random requests.
    """

    count: int
    max_prompt: int
    pool: int
    chunk: int = 512
    long_output_rate: float = 0.4
    long_output: int = 220
    overrides_method: bool = False
    bounded: bool = False
    lookahead: bool = False
    packed: bool = False
    packs_outputs: bool = False
    park: float | None = None
    model: str = "llama-two-layers"
    window_blocks: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    eagle: bool = False
    cache_dtype: str = "auto"
    seed: int = 17

    @property
    def overrides(self) -> list[dict[str, Any] | None]:
        """Return the overrides that requests may send. A quantised cache cannot be merged."""
        overrides: list[dict[str, Any] | None] = [None]
        if self.lookahead:
            overrides = LOOKAHEAD_OVERRIDES
        elif self.bounded:
            overrides = BOUNDED_OVERRIDES
        elif self.packed:
            overrides = PACKED_OVERRIDES
        elif self.overrides_method:
            overrides = OVERRIDES
        merging = {"kv_compress": "d2o"}.items()
        return [
            override
            for override in overrides
            if self.cache_dtype == "auto" or not merging <= (override or {}).items()
        ]

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters of all requests."""
        return {"allowed_token_ids": list(FOUR_TOKENS)} if self.eagle else {}

    @property
    def may_protect(self) -> bool:
        """Return whether requests may protect more tokens than their budget holds."""
        return bool(self.config["kvcompress"].get("allow_override"))

    @property
    def config(self) -> dict[str, Any]:
        """Return the engine's settings."""
        if self.bounded:
            return BOUNDED
        if self.lookahead:
            return LOOKAHEAD
        if self.park is not None:
            return settings(**FREE["kvcompress"], park=self.park)
        if self.packed:
            return PACKED_OUTPUTS if self.packs_outputs else PACKED
        if self.cache_dtype == "auto":
            return FREE
        return settings("cake", 0.3, allow_override=NOT_MERGING)


@dataclass(slots=True)
class Request:
    """One request.

    Args:
        prompt: token ids.
        num_output: output tokens.
        wait: steps to run before the next request is sent.
        abort: steps until it is aborted, None if it is not.
        priority: vLLM's priority.
        override: settings of the request, None without.
    """

    prompt: list[int]
    num_output: int
    wait: int
    abort: int | None
    priority: int
    override: dict[str, Any] | None


OVERRIDES: list[dict[str, Any] | None] = [
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
BOUNDED_OVERRIDES: list[dict[str, Any] | None] = [
    None,
    {"kv_compress": "off"},
    {"kv_budget": 40, "kv_decode_budget": 40},
    {"kv_compress": "snapkv"},
    {"kv_compress": "streamingllm", "kv_budget": 64, "kv_decode_budget": 64},
    {"kv_compress": "d2o"},
]
LOOKAHEAD_OVERRIDES: list[dict[str, Any] | None] = [
    None,
    {"kv_compress": "off"},
    {"kv_lookahead": 0},
    {"kv_lookahead": 3, "kv_budget": 0.15},
    {"kv_compress": "snapkv"},
    {"kv_compress": "streamingllm"},
]
PACKED_OVERRIDES: list[dict[str, Any] | None] = [
    None,
    None,
    {"kv_compress": "off"},
    {"kv_packed_dtype": "auto"},
    {"kv_budget": 1.0},
    {"kv_compress": "snapkv", "kv_budget": 0.15, "kv_packed_dtype": "auto"},
    {"kv_compress": "h2o", "kv_packed_dtype": "k4v3"},
    {"kv_compress": "d2o", "kv_budget": 0.4},
]
SMALL = dict(max_prompt=450, pool=22, chunk=256, long_output_rate=0.8, long_output=140)
LONG = {**SMALL, "long_output": 220}
HYBRID = {**SMALL, "chunk": 128, "model": "gpt-oss-d64", "window_blocks": 12}
WIDE = dict(max_prompt=450, chunk=256, packed=True, model="llama-two-layers-d64")
DRAFTS = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
LOADS = {
    "plain": Load(count=50, max_prompt=2200, pool=70, long_output_rate=0.2, overrides_method=True),
    "bounded": Load(count=12, max_prompt=500, pool=24, long_output_rate=0.8, bounded=True),
    "async": Load(**SMALL, count=10, bounded=True, options={"async_scheduling": True}),
    "priority": Load(**SMALL, count=12, park=0.001, options={"scheduling_policy": "priority"}),
    "hybrid": Load(**HYBRID, count=16, packed=True, seed=18),
    "hybrid, bounded": Load(**HYBRID, count=10, bounded=True),
    "drafts": Load(**LONG, count=12, overrides_method=True, options={"speculative_config": DRAFTS}),
    "fp8": Load(**SMALL, count=24, overrides_method=True, cache_dtype="fp8"),
    "packed": Load(**WIDE, pool=22, count=24, options={"async_scheduling": True}),
    "packed outputs": Load(
        **WIDE, pool=36, count=30, packs_outputs=True, long_output_rate=0.5, long_output=560
    ),
    "ahead": Load(**LONG, count=14, lookahead=True, options={"async_scheduling": True}),
    "eagle": Load(**LONG, count=14, lookahead=True, eagle=True, options={"async_scheduling": True}),
}

# `make soak` sets this to run many more requests.
TIMES = int(os.environ.get("SOAK_TIMES", "1"))
LAYERS = 2
FREE = settings("cake", 0.3, allow_override="all")
PACKED = settings("cake", 0.5, packed_dtype="k4v3", allow_override="all")
PACKED_OUTPUTS = settings(
    "cake", 0.5, packed_dtype="k4v3", allow_override="all", decode_interval=128
)
LOOKAHEAD = settings("cake", 0.3, lookahead=8, allow_override="off,snapkv,streamingllm")
NOT_MERGING = "off,snapkv,h2o,streamingllm"
# Prompt budget and decode budget are equal numbers of tokens. So a recomputed request keeps as much
# as before, and so does a long output of a short prompt. Many prompts are longer than a piece.
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
    """Resources of this process: open files by kind, threads, and memory in bytes."""

    files: Counter[str]
    threads: int
    memory: int


def resources() -> Resources:
    gc.collect()
    process = psutil.Process(os.getpid())
    files: Counter[str] = Counter()
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the file descriptor that listed the folder
            # Remove the numbers of sockets and pipes.
            files[re.sub(r"\[\d+\]", "", os.readlink(f"/proc/self/fd/{file}"))] += 1
    return Resources(files, process.num_threads(), process.memory_info().rss)


def random_requests(load: Load, seed: int):
    """Yield requests with mostly short and some very long prompts. Half of them share a prefix."""
    rng = random.Random(seed)
    stems = [tokens(load.max_prompt, seed=100 + i) for i in range(3)]
    for index in range(load.count):
        is_long = index % 25 == 0 or load.max_prompt < 1000
        length = rng.randint(1, load.max_prompt if is_long else load.max_prompt // 6)
        shared = rng.randint(0, length) if rng.random() < 0.5 else 0
        request = Request(
            prompt=rng.choice(stems)[:shared] + tokens(length - shared, seed=index),
            num_output=(
                rng.randint(60, load.long_output)
                if rng.random() < load.long_output_rate
                else rng.randint(1, 24)
            ),
            wait=rng.randint(0, 1),
            abort=rng.randint(1, 12) if rng.random() < 0.15 else None,
            priority=rng.randint(0, 3),
            override=rng.choice(load.overrides),
        )
        # A decode budget below the server's may be too small for protected tokens.
        sets_decode_budget = "kv_decode_budget" in (request.override or {})
        if rng.random() < 0.3 and length > 40 and load.may_protect and not sets_decode_budget:
            protect = [[rng.randint(0, 9), 20], [length - 12, length - rng.randint(1, 6)]]
            request.override = {**(request.override or {}), "kv_protect": protect}
        yield request


def is_compressed(request: Request, config: CompressionConfig) -> bool:
    """Return whether this request's prompt should be compressed."""
    request_settings = RequestOptions.parse(config, request.override).settings
    if request_settings is None:
        return False
    if request.num_output < request_settings.resolved_lookahead + 2:
        return False
    spans = tuple(map(tuple, (request.override or {}).get("kv_protect", ())))
    # the test models are float32
    page_tokens = packed_page_tokens(request_settings, BLOCK, itemsize=4)
    tokens = len(request.prompt)
    return request_settings.page_plan(LAYERS, tokens, BLOCK, spans, page_tokens) is not None


def run_requests(
    llm: Engine, load_requests: Sequence[Request], **sampling: Any
) -> tuple[dict[str, list[int]], set[str]]:
    """Send all requests with steps in between, and run until all have ended.

    Returns:
        The outputs by request id, and the ids of the aborted requests.
    """
    outputs: dict[str, list[int]] = {}
    aborted: set[str] = set()
    planned_aborts: list[tuple[int, str]] = []
    num_steps = 0
    for index, request in enumerate(load_requests):
        llm.submit(
            str(index),
            request.prompt,
            request.num_output,
            priority=request.priority,
            extra_args=request.override,
            **sampling,
        )
        if request.abort is not None:
            planned_aborts.append((num_steps + request.wait + request.abort, str(index)))
        for _ in range(request.wait):
            outputs.update({k: list(v.outputs[0].token_ids) for k, v in llm.step().items()})
            num_steps += 1
            for abort in [abort for abort in planned_aborts if abort[0] <= num_steps]:
                planned_aborts.remove(abort)
                aborted.add(abort[1])
                llm.llm.llm_engine.abort_request([abort[1]])
    outputs.update(llm.drain())
    llm.finish_in_flight_steps()
    return outputs, aborted


def watch_early(llm: Engine) -> dict[str, list[int]]:
    """Record, by request, the number of output tokens at each of its early compressions."""
    seen: dict[str, list[int]] = {}

    def packed(pack_request: Any, kept: Any, counts: Any) -> None:
        if pack_request.early_target:
            seen.setdefault(pack_request.request_id.split("-")[0], []).append(
                pack_request.output_tokens + 1
            )

    llm.compressor.packer.observers.append(packed)
    return seen


@pytest.mark.slow
@pytest.mark.timeout(2400 * TIMES)
@pytest.mark.filterwarnings("ignore:(?s).*reflected list")  # from the compiler of V1's drafter
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_avx512 if load.cache_dtype == "fp8" else ())
        for name, load in LOADS.items()
    ],
)
def test_soak(name, checkpoints_folder, async_scheduling_allowed):
    load = replace(LOADS[name], count=LOADS[name].count * TIMES)
    model = make(load.model, checkpoints_folder)
    config = CompressionConfig.parse(load.config["kvcompress"])
    options = dict(
        additional_config=load.config,
        max_model_len=load.pool * BLOCK,
        max_num_seqs=96,
        kv_cache_dtype=load.cache_dtype,
    )
    load_requests = list(random_requests(load, load.seed))
    drafting = speculative(make_eagle(model)) if load.eagle else {}
    with engine(
        model,
        blocks=1 + load.pool + load.window_blocks,
        max_num_batched_tokens=load.chunk,
        **options,
        **load.options,
        **drafting,
    ) as llm:
        if load.eagle:
            limit_drafts(llm)
        free_before, drafts = llm.free_blocks, watch_drafts(llm)
        preemptions = llm.watch_preemptions()
        packed_ids = llm.watch_packing(lambda done: done.pack_request.request_id.split("-")[0])
        early = watch_early(llm)
        outputs, aborted = run_requests(llm, load_requests, **load.sampling)
        assert not load.eagle or 0 < drafts.accepted < drafts.verified
        packed = set(packed_ids)
        assert llm.free_blocks == free_before
        scheduler, compressor = llm.scheduler, llm.compressor
        leftovers = [
            len(scheduler.states),
            scheduler.states.ids_without_packing,
            scheduler.states.limited_ids,
            scheduler.step_builder._states_with_entry,
            scheduler.step_builder._states_with_probe,
            scheduler.step_builder._deferred_free.zero_blocks,
            scheduler.step_builder._deferred_free._unfreed,
            len(scheduler.lookaheads),
            llm.lookahead_slots_in_use,
            len(compressor.packer.protected),
            compressor._prefills,
            compressor._step,
            compressor.pool._slots,
            compressor.pool._slots_with_groups,
            compressor.pool.ring and compressor.pool.ring._slots,
            compressor.reports._pending,
            scheduler.step_builder.stats.packed,
            llm.scheduler.requests,
            scheduler.step_builder.stats._repeats,
            scheduler.parking.copies,
            compressor.host_pages and len(compressor.host_pages),
        ]
        assert not any(leftovers), leftovers
        if load.park is not None:
            assert scheduler.parking.num_free_slots == len(compressor.host_pages._host)
            assert samples()["resumed_requests_total",] > 1
        assert not load.packed or compressor.pool.pages.isfinite().all()
        resumed_at = {request_id: list(times) for request_id, times in preemptions.items()}
        num_repacked, num_pieces = (
            samples()[f"{name}_total",] for name in ("repacked_answers", "packed_pieces")
        )
        # vLLM's own memory grows until every code path has run once, and must not grow later.
        rounds = [resources()]
        for _ in range(2):
            run_requests(llm, load_requests[: load.count // 4], **load.sampling)
            assert llm.free_blocks == free_before
            rounds.append(resources())
    first, before, after = rounds
    # A leak opens files in every round. Once, a process of another test may connect to a port here.
    new_files = (before.files - first.files) & (after.files - before.files)
    new_threads, growth = after.threads - before.threads, after.memory - before.memory
    completed = {str(i) for i in range(load.count)} - aborted
    assert aborted
    assert completed <= outputs.keys()
    compressible = {
        str(i) for i, request in enumerate(load_requests) if is_compressed(request, config)
    }
    assert compressible - aborted <= packed <= compressible | early.keys()
    assert bool(early) is load.lookahead
    assert len(packed) > load.count // 10
    assert (num_repacked > load.count) is load.bounded
    assert (num_repacked > load.count // 10) is (load.bounded or load.packs_outputs)
    assert (num_pieces > load.count // 2) is load.bounded
    assert resumed_at or load.park, "no request was preempted: the pool is too large"
    print(  # noqa: T201
        f"{load.count} requests, {len(aborted)} aborted, {len(packed)} compressed,"
        f" {len(resumed_at)} preempted, {num_repacked:.0f} packed during decoding; then in"
        f" {load.count // 4} requests: {new_files.total()} new files, {new_threads} new threads,"
        f" {growth / 2**20:.1f} MiB more memory"
    )
    assert not new_files
    assert new_threads == 0
    assert growth < 5 * 2**20 * TIMES, "memory grows with every request"
    with engine(model, enable_prefix_caching=False, **options) as llm:
        large_pool_preemptions = llm.watch_preemptions()
        # Outputs of requests that are never packed do not depend on preemption. With a decode
        # budget, recomputed prompts stay uncompressed unless prompt and output exceed `max_whole`.
        # With packed outputs they do too, and are packed while they go on.
        packable = completed if load.bounded or load.packs_outputs else compressible
        uncompressed_prompts = CompressionConfig.parse(
            {**config.to_additional_config(), "min_prompt": config.pieces.max_whole or 10**6}
        )
        runs: dict[bool, list[Any]] = {True: [], False: []}
        for request_id in sorted(completed, key=int):
            request, output = load_requests[int(request_id)], outputs[request_id]
            is_packable = request_id in packable
            times = resumed_at.get(request_id, []) if is_packable else []
            if load.lookahead:
                # A preemption before the packing changes nothing. After a later one, or an early
                # compression, the kept tokens were scored by other queries than in a new request,
                # so only the output up to there is compared.
                request_settings = RequestOptions.parse(config, request.override).settings
                times = [
                    time
                    for time in times
                    if request_settings is None or time >= request_settings.resolved_lookahead
                ]
                times += early.get(request_id, [])
                output, times = output[: min(times, default=len(output))], []
            override = request.override if is_packable else {"kv_compress": "off"}
            runs[request_id in compressible].append((request.prompt, output, times, override))
        for is_compressible, engine_settings in ((True, config), (False, uncompressed_prompts)):
            llm.use_settings(engine_settings)
            llm.assert_match_solo_runs(runs[is_compressible], **load.sampling)
        assert not large_pool_preemptions, "a request was preempted in the large pool"
