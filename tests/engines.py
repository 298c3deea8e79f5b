"""Start small float32 engines in the test process, and record what happens inside them.

CUDA uses Model Runner V2. On the CPU it runs in Triton's interpreter: start the test process with
``VLLM_USE_V2_MODEL_RUNNER=1``, and `prepare_model_runner` does the rest.
"""

import atexit
import dataclasses
import functools
import gc
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
# Marks a test that does not depend on the model runner, so that it runs on V1 only.
model_runner_v1_only = pytest.mark.skipif(V2, reason="nothing in it depends on the model runner")
# Marks a test of models with state-space layers, which not every vLLM version supports.
with_states = pytest.mark.usefixtures("states_are_served")
BLOCK = 32
# Default number of KV blocks, the null block included. vLLM's default would zero a gigabyte.
BLOCKS = 1 + 1024


def serves_states() -> bool:
    """Return True if the plugin accepts this vLLM version for models with state-space layers."""
    import vllm

    from vllm_kvcompress.refusals.tested import STATE_VLLM

    return STATE_VLLM.contains(vllm.__version__, prereleases=True)


def prepare_model_runner() -> None:
    """Let Model Runner V2 use Triton's interpreter; call this before vLLM is first imported."""
    if not V2:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter

    interpreter.install_driver()
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    import faster_interpreter

    sampler.HAS_TRITON = False  # the interpreter cannot run that kernel; torch replaces it
    # The interpreter repeats each integer addition in 64 bits to detect overflow, as compiled
    # kernels do in debug builds. tests/kernels checks our kernels that way; here it costs time.
    from triton.runtime.interpreter import interpreter_builder as builder

    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    faster_interpreter.install_caches()


def v2_drafts() -> bool:
    """Return True if this vLLM's Model Runner V2 has n-gram drafts, as it does since 0.32."""
    return find_spec("vllm.v1.worker.gpu.spec_decode.ngram") is not None


def allow_async_scheduling(monkeypatch: Any) -> None:
    """Keep the configured `async_scheduling`, which vLLM disables on a CPU."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keeping(config: Any) -> None:
        configured = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = configured

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keeping))


def settings(compress: str = "cake", budget: float | int = 0.2, **options: Any) -> dict[str, Any]:
    """Return the ``additional_config`` of an engine that compresses prompts of 128 tokens or more.

    Prompts are compressed at the end of prefill, unless `options` set a look-ahead.
    """
    defaults = {"min_prompt": 128, "lookahead": 0}
    return {"kvcompress": {"compress": compress, "budget": budget, **defaults, **options}}


def slots_in_use(scheduler: Any) -> int:
    """Return how many look-aheads have a query slot."""
    num_slots = scheduler.groups.compressed.kv_cache_spec.ring_slots
    in_use = num_slots - scheduler.lookaheads.num_free_slots
    assert in_use == sum(state.has_lookahead_slot for state in scheduler.states)
    return int(in_use)


class Engine:
    """An LLM with access to its scheduler and, if it runs in this process, its worker."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        # with sliding windows there are several managers: take that of the compressed layers
        groups = getattr(self.scheduler, "groups", None)
        self.manager = managers[0] if groups is None else groups.compressed
        executor = self.core.model_executor
        if not hasattr(executor, "driver_worker"):
            return  # the workers are in other processes
        self.worker = executor.driver_worker.worker
        on_v2 = hasattr(self.worker.model_runner, "req_states")
        assert on_v2 == V2, "vLLM did not use the requested model runner"

    @property
    def compressor(self) -> Any:
        return self.worker.compressor

    @property
    def free_blocks(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def generate(
        self, prompts: Sequence[list[int]], tokens: int = 12, **params: Any
    ) -> list[list[int]]:
        """Return the greedy output tokens of each prompt; all prompts are submitted together."""
        return [
            list(output.outputs[0].token_ids) for output in self.outputs(prompts, tokens, **params)
        ]

    def outputs(self, prompts: Sequence[list[int]], tokens: int = 12, **params: Any) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            **{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **params}
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        results: list[Any] = self.llm.generate(inputs, sampling, use_tqdm=False)
        return results

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        tokens: int = 12,
        priority: int = 0,
        adapter: Any = None,
        **params: Any,
    ) -> str:
        from vllm import SamplingParams

        sampling = SamplingParams(
            **{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **params}
        )
        inputs = {"prompt_token_ids": list(prompt)}
        self.llm.llm_engine.add_request(
            request_id, inputs, sampling, lora_request=adapter, priority=priority
        )
        return request_id

    def step(self) -> dict[str, Any]:
        """Run one engine step; return the finished outputs by request id."""
        if not self.scheduler.running:
            # A prompt may be pulled from another server. On a busy machine, leave it a core:
            # vLLM gives the servers' handshake 5 seconds.
            time.sleep(0.001)
        return {o.request_id: o for o in self.llm.llm_engine.step() if o.finished}

    def drain(self, limit: int = 100_000) -> dict[str, list[int]]:
        """Step until no request is left; return output token ids by request id."""
        outputs: dict[str, list[int]] = {}
        for _ in range(limit):
            if not self.llm.llm_engine.has_unfinished_requests():
                return outputs
            for request_id, output in self.step().items():
                outputs[request_id] = list(output.outputs[0].token_ids)
        raise AssertionError(f"requests were lost after {limit} steps: {self.scheduler.requests}")

    def generate_each(
        self, requests: Sequence[tuple[list[int], dict[str, Any]]], tokens: int
    ) -> list[list[int]]:
        """Return the output tokens of requests ``(prompt, extra_args)`` submitted together."""
        for number, (prompt, extra_args) in enumerate(requests):
            self.submit(str(number), prompt, tokens, extra_args=extra_args)
        outputs = self.drain()
        return [outputs[str(number)] for number in range(len(requests))]

    @contextmanager
    def lent(self) -> Iterator["Engine"]:
        """Lend this engine to one test, with an empty prefix cache and a count of 0 packings.

        After the test, remove its recorders and check that no block is held.
        """
        assert self.llm.reset_prefix_cache()
        self.compressor.compressed, free = 0, self.free_blocks
        context = self.worker.vllm_config.compilation_config.static_forward_context
        attention = [layer.impl for layer in context.values() if hasattr(layer, "impl")]
        owners = [self.scheduler, *attention]
        names = [set(vars(owner)) for owner in owners]
        num_observers = len(self.compressor.packer.observers)
        try:
            yield self
        finally:
            for owner, before in zip(owners, names, strict=True):
                added = [name for name in set(vars(owner)) - before if callable(vars(owner)[name])]
                for name in added:
                    delattr(owner, name)
            del self.compressor.packer.observers[num_observers:]
            self.llm.llm_engine.abort_request([*self.scheduler.requests], internal=True)
            self.finish_in_flight_steps()
        assert self.free_blocks == free

    def in_smaller_pools(self, sizes: Sequence[int]) -> Iterator[int]:
        """Yield each size after taking all other blocks out of the pool and emptying the cache."""
        for size in sizes:
            assert self.llm.reset_prefix_cache()
            taken = self.pool.get_new_blocks(self.free_blocks - size)
            yield size
            assert self.free_blocks == size
            self.pool.free_blocks(taken)

    def finish_in_flight_steps(self) -> None:
        """Run empty steps until the steps that async scheduling has in flight are processed."""
        for _ in range(3):
            self.llm.llm_engine.step()

    def record_attention(self, all_layers: bool = False) -> dict[int, dict[str, list[Any]]]:
        """Record the inputs and outputs of attention in later steps; return them by layer.

        Layers are numbered among the compressed layers, or among all attention layers if
        `all_layers` is True.

        Returns:
            For each layer, lists with one tensor ``[n, heads * dim]`` per step of n tokens: "q",
            "k", "v" and "out"; and "sinks": the sink logits of the query heads, or None.
        """
        seen: dict[int, dict[str, list[Any]]] = {}
        context = self.worker.vllm_config.compilation_config.static_forward_context
        attention = [layer for layer in context.values() if hasattr(layer, "impl")]
        for index, layer in enumerate(attention):
            if not all_layers and (layer.impl._compressor is None or layer.impl._is_draft):
                continue  # a layer with a sliding window, or of a draft model
            forward = layer.impl.forward

            def recording(
                lay: Any,
                q: Any,
                k: Any,
                v: Any,
                *rest: Any,
                forward: Any = forward,
                impl: Any = layer.impl,
                index: int = index,
                **named: Any,
            ) -> Any:
                sinks, number = getattr(impl, "sinks", None), index if all_layers else impl._layer
                recorded = seen.setdefault(number, {"q": [], "k": [], "v": [], "out": []})
                recorded["sinks"] = None if sinks is None else sinks.detach().double()
                for name, part in (("q", q), ("k", k), ("v", v)):
                    recorded[name].append(part.clone())
                out = forward(lay, q, k, v, *rest, **named)
                recorded["out"].append(out[: len(q)].clone())
                return out

            layer.impl.forward = recording
        return seen

    def watch_packing(
        self, summarize: Callable[[Any], Any], after: Callable[[Any, Any], Any] = lambda *_: None
    ) -> list[Any]:
        """Record `summarize` of each prompt whose packing completes in later steps, in order.

        Args:
            summarize: called with an object that has the `pack_request`, and the `kept` slots and
                page `counts` that `Packer.observers` receive.
            after: called with the same object and the pages that each layer keeps.
        """
        seen: list[Any] = []

        def packed(pack_request: Any, kept: Any, counts: Any) -> None:
            if pack_request.prefill and pack_request.completes_prompt:
                result = SimpleNamespace(pack_request=pack_request, kept=kept, counts=counts)
                seen.append(summarize(result))
                after(result, counts)

        self.compressor.packer.observers.append(packed)
        return seen

    def footprints(self) -> list[Any]:
        """Return the footprints of requests with a decode budget whose prefill has ended."""
        return [
            state.schedule.footprint
            for state in self.scheduler.states
            if state.has_prefilled and state.schedule.output is not None
        ]

    def packed_blocks(self, request_id: str) -> list[Any]:
        """Return the blocks that hold a request's packed pages."""
        state = self.scheduler.states.get(request_id)
        return [] if state is None else list(state.packed_blocks)

    def num_blocks_held(self, request_id: str) -> int:
        """Return the number of blocks that a request holds, including shared blocks."""
        blocks = self.manager.req_to_blocks.get(request_id, ())
        return sum(not block.is_null for block in blocks) + len(self.packed_blocks(request_id))

    def use_settings(self, settings: Any) -> None:
        """Set the engine's settings, while no request holds blocks."""
        states = self.scheduler.states
        assert not any(state.blocks for state in states), len(states)
        self.scheduler.admissions.settings = settings
        states._states.clear()
        states.ids_without_packing.clear()

    @property
    def lookahead_slots_in_use(self) -> int:
        """Return how many look-aheads have a query slot."""
        return slots_in_use(self.scheduler)

    def watch_repacking(self) -> list[str]:
        """Record the request id of each later packing of an output or a piece, in order."""
        seen: list[str] = []
        self.compressor.packer.observers.append(
            lambda pack_request, kept, counts: (
                seen.append(pack_request.request_id) if pack_request.reads_page_tables else None
            )
        )
        return seen

    def watch_preemptions(self) -> dict[str, list[int]]:
        """Record each request's number of output tokens whenever it resumes after a preemption.

        Request ids are those passed to `submit`. The tokens are counted when the request is
        scheduled again, because async scheduling still delivers the tokens that were in flight.
        Parked requests do not count: they go on as if they had not been preempted.
        """
        seen: dict[str, list[int]] = {}
        waiting: dict[str, Any] = {}
        preempt, schedule = self.scheduler._preempt_request, self.scheduler.schedule

        def preempting(request: Any, *args: Any, **kwargs: Any) -> None:
            waiting[request.request_id] = request
            preempt(request, *args, **kwargs)
            states = getattr(self.scheduler, "states", None)
            state = None if states is None else states.get(request.request_id)
            if state is not None and state.parked is not None:
                del waiting[request.request_id]

        def scheduling(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for request_id in waiting.keys() & output.num_scheduled_tokens.keys():
                name = request_id.split("-")[0]  # vLLM adds a suffix to request ids
                seen.setdefault(name, []).append(waiting.pop(request_id).num_output_tokens)
            return output

        self.scheduler._preempt_request, self.scheduler.schedule = preempting, scheduling
        return seen

    def assert_match_solo_runs(
        self,
        requests: Iterable[tuple[list[int], list[int], list[int], dict[str, Any] | None]],
        num_output: int | None = None,
        at_once: int = 24,
        **params: Any,
    ) -> None:
        """Assert that without preemptions, requests produce the same outputs.

        Args:
            requests: prompt, output, number of output tokens at each preemption, and extra_args of
                each. After each preemption, a request continues like one that prefills the prompt
                and these output tokens.
            num_output: tokens of each output; None if they differ.
            at_once: how many run together; 1 where more would be preempted.
        """
        requests = [*requests]
        assert num_output is None or all(len(output) == num_output for _, output, *_ in requests)
        runs = [
            (prompt + output[:start], output[start:stop], extra_args)
            for prompt, output, cuts, extra_args in requests
            for start, stop in pairwise([0, *cuts, len(output)])
            if stop > start
        ]
        preemptions = self.watch_preemptions()
        waiting, outputs = [*enumerate(runs)], {}
        while waiting or self.llm.llm_engine.has_unfinished_requests():
            while waiting and len(self.scheduler.requests) < at_once:
                number, (prompt, output, extra_args) = waiting.pop(0)
                self.submit(str(number), prompt, len(output), extra_args=extra_args, **params)
            outputs |= self.step()
        assert not preemptions, "a request was preempted: the pool is too small"
        for number, (prompt, output, extra_args) in enumerate(runs):
            actual = list(outputs[str(number)].outputs[0].token_ids)
            assert actual == output, (len(prompt), extra_args)

    def running(self) -> list[Any]:
        return list(self.scheduler.running)

    def preempt(self, request: Any) -> None:
        """Preempt a running request and free its blocks, as vLLM does when the pool is full."""
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)


@functools.cache
def inspect_models_here() -> None:
    """Let vLLM inspect model classes in this process, and list this machine's cores only once.

    By default vLLM starts a subprocess for each new architecture so that this process does not
    initialise CUDA; a CPU has none. Each engine would start `lscpu` twice.
    """
    from vllm.model_executor.models import registry
    from vllm.utils import cpu_resource_utils

    registry._run_in_subprocess = lambda inspect: inspect()
    cpu_resource_utils._get_cpu_list = functools.cache(cpu_resource_utils._get_cpu_list)


_freeze_heap = gc.freeze


@functools.cache
def keep_heap_frozen() -> None:
    """Stop vLLM from freezing and unfreezing the heap whenever an engine starts.

    After an unfreeze, each garbage collection walks over a million long-lived objects of torch and
    vLLM. In this process, which starts many engines, they stay frozen.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise extension modules report leaked objects at exit
    gc.freeze = gc.unfreeze = lambda: None


_engine_starts = itertools.count()


def collect_and_freeze() -> None:
    """Delete engines that have ended, and freeze all objects that stay, unless an engine does.

    The next collection then skips the modules and types that were imported since the last freeze.
    A frozen engine would never be deleted. A test's variable may keep one that has ended. A
    collection takes about as long as a small engine's start, so only each third start collects.
    """
    if next(_engine_starts) % 3:
        return
    gc.collect()
    if not _engines:
        _freeze_heap()


@functools.cache
def replace_kernels_once() -> None:
    """Let vLLM replace its Triton kernels on a CPU only once in this process.

    By default it searches all modules whenever an engine starts, finds its own replacements and
    fails on the compiler of its n-gram drafter.
    """
    from vllm.platforms.cpu import CpuPlatform

    once = functools.cache(CpuPlatform.register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = staticmethod(once)


_open_engines: list[str] = []
_engines: weakref.WeakSet[Any] = weakref.WeakSet()


@contextmanager
def engine(model: str, *, blocks: int = BLOCKS, **kwargs: Any) -> Iterator[Engine]:
    """Run an engine with `blocks` KV blocks of 32 tokens (null block included).

    After the first engine, starting and stopping takes less than a second (see CONTRIBUTING.md).
    Engines may be nested: vLLM's distributed groups stay until the last one ends.
    """
    from vllm import LLM
    from vllm.v1.engine import core

    options: dict[str, Any] = dict(
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=8192 if not V2 else 2048,
        distributed_executor_backend="uni",
        block_size=BLOCK,
        disable_log_stats=False,
        seed=0,
        num_gpu_blocks_override=blocks,
    )
    replace_kernels_once()
    collect_and_freeze()
    keep_heap_frozen()
    llm = LLM(model, **{**options, **kwargs})
    _engines.add(llm)
    _open_engines.append(model)
    try:
        yield Engine(llm)
    finally:
        _open_engines.pop()
        with pytest.MonkeyPatch.context() as patch:
            if _open_engines:
                patch.setattr(core, "cleanup_dist_env_and_memory", lambda: None)
            llm.llm_engine.engine_core.shutdown()
        del llm
