"""Engines for tests: small, float32, greedy, in this process; and what can be seen inside them.

Model Runner V2 is what CUDA uses. On the CPU it runs under Triton's interpreter: start the test
process with ``VLLM_USE_V2_MODEL_RUNNER=1`` and `prepare_model_runner` does the rest.
"""

import atexit
import dataclasses
import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
# Marks a test that would show nothing more on Model Runner V2.
first_runner = pytest.mark.skipif(V2, reason="nothing in it depends on the model runner")
# Marks a test of models whose layers keep a state, which `serves_states` is about.
with_states = pytest.mark.usefixtures("states_are_served")
BLOCK = 32
# KV blocks of an engine that asks for no other number. vLLM would fill a gigabyte with zeros.
BLOCKS = 1 + 1024


def serves_states() -> bool:
    """Whether this vLLM is accepted for models whose layers keep a state; any other is refused."""
    import vllm

    from vllm_kvcompress.engine.startup.state_refusals import TESTED

    return TESTED.contains(vllm.__version__, prereleases=True)


def prepare_model_runner() -> None:
    """Before the first import of vLLM: give V2 an interpreter in place of a Triton driver."""
    if not V2:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    driver = type("InterpreterDriver", (), {"is_active": staticmethod(lambda: True)})
    triton.backends.backends.setdefault("cpu", SimpleNamespace(driver=driver, compiler=None))
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    import faster_interpreter

    sampler.HAS_TRITON = False  # that kernel does not interpret; torch does the same
    # The interpreter does each sum of integers again in 64 bits, which compiled kernels do in debug
    # builds only. tests/kernels has ours checked so; what an engine's step runs here is vLLM's.
    from triton.runtime.interpreter import interpreter_builder as builder

    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    faster_interpreter.remember()


def v2_drafts() -> bool:
    """Whether this vLLM's Model Runner V2 drafts out of the prompt: since 0.32."""
    return find_spec("vllm.v1.worker.gpu.spec_decode.ngram") is not None


def leave_async_scheduling(monkeypatch: Any) -> None:
    """vLLM switches async scheduling off on a CPU, which does not need it: leave it as asked."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keeping(config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = asked

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keeping))


def settings(compress: str = "cake", budget: float | int = 0.2, **more: Any) -> dict[str, Any]:
    """``additional_config`` for a compressed test engine: every prompt from 128 tokens on.

    Packed at the end of their prefill, whatever the method's own look-ahead, unless one is given.
    """
    usual = {"min_prompt": 128, "lookahead": 0}
    return {"kvcompress": {"compress": compress, "budget": budget, **usual, **more}}


class Engine:
    """An LLM with handles on its scheduler and, where that is in this process, its worker."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        # of a model with sliding windows, that of the layers which are compressed
        self.manager = next((each for each in managers if hasattr(each, "planner")), managers[0])
        executor = self.core.model_executor
        if not hasattr(executor, "driver_worker"):
            return  # its workers are in other processes
        self.worker = executor.driver_worker.worker
        on_v2 = hasattr(self.worker.model_runner, "req_states")
        assert on_v2 == V2, "vLLM did not take the model runner that was asked for"

    @property
    def compressor(self) -> Any:
        return self.worker.compressor

    @property
    def free_blocks(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def generate(
        self, prompts: Sequence[list[int]], tokens: int = 12, **params: Any
    ) -> list[list[int]]:
        """Greedy continuations of token prompts, all at once."""
        return [
            list(output.outputs[0].token_ids) for output in self.outputs(prompts, tokens, **params)
        ]

    def outputs(self, prompts: Sequence[list[int]], tokens: int = 12, **params: Any) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            **{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **params}
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        done: list[Any] = self.llm.generate(inputs, sampling, use_tqdm=False)
        return done

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        tokens: int = 12,
        priority: int = 0,
        **params: Any,
    ) -> str:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **params)
        inputs = {"prompt_token_ids": list(prompt)}
        self.llm.llm_engine.add_request(request_id, inputs, sampling, priority=priority)
        return request_id

    def step(self) -> dict[str, Any]:
        """One engine step; the finished outputs by request id."""
        return {o.request_id: o for o in self.llm.llm_engine.step() if o.finished}

    def drain(self, limit: int = 100_000) -> dict[str, list[int]]:
        """Step until nothing is left; token ids by request id."""
        done: dict[str, list[int]] = {}
        for _ in range(limit):
            if not self.llm.llm_engine.has_unfinished_requests():
                return done
            for request_id, output in self.step().items():
                done[request_id] = list(output.outputs[0].token_ids)
        raise AssertionError(f"requests were lost after {limit} steps: {self.scheduler.requests}")

    def answers(
        self, asked: Sequence[tuple[list[int], dict[str, Any]]], tokens: int
    ) -> list[list[int]]:
        """Answers to prompts, each with what it asks for, that are submitted together."""
        for number, (prompt, extra_args) in enumerate(asked):
            self.submit(str(number), prompt, tokens, extra_args=extra_args)
        # vLLM adds a suffix
        done = {key.split("-")[0]: answer for key, answer in self.drain().items()}
        return [done[str(number)] for number in range(len(asked))]

    def settle(self) -> None:
        """Let what async scheduling still has in flight come back."""
        for _ in range(3):
            self.llm.llm_engine.step()

    def record_attention(self, all_layers: bool = False) -> dict[int, dict[str, list[Any]]]:
        """From now on: per layer, what its attention was called with and gave, step by step.

        By the layer's number among those that are compressed; where `all_layers` are recorded, by
        its number in the model.

        Of each step's tokens ``[n, heads * dim]``: "q", "k", "v" and "out"; and "sinks", logits of
        the query heads' sinks or None.
        """
        seen: dict[int, dict[str, list[Any]]] = {}
        context = self.worker.vllm_config.compilation_config.static_forward_context
        attention = [layer for layer in context.values() if hasattr(layer, "impl")]
        for at, layer in enumerate(attention):
            if not all_layers and layer.impl._compressor is None:
                continue  # one with a sliding window
            forward = layer.impl.forward

            def recording(
                lay: Any,
                q: Any,
                k: Any,
                v: Any,
                *rest: Any,
                forward: Any = forward,
                impl: Any = layer.impl,
                at: int = at,
                **named: Any,
            ) -> Any:
                sinks, number = getattr(impl, "sinks", None), at if all_layers else impl._layer
                kept = seen.setdefault(number, {"q": [], "k": [], "v": [], "out": []})
                kept["sinks"] = None if sinks is None else sinks.detach().double()
                for name, part in (("q", q), ("k", k), ("v", v)):
                    kept[name].append(part.clone())
                out = forward(lay, q, k, v, *rest, **named)
                kept["out"].append(out[: len(q)].clone())
                return out

            layer.impl.forward = recording
        return seen

    def watch_packing(
        self, look: Callable[[Any], Any], after: Callable[[Any, Any], Any] = lambda *_: None
    ) -> list[Any]:
        """From now on: what `look` makes of each prompt that was packed to its end, in order.

        Args:
            look: called with the `PackRequest` and with what `Packer.observers` receive: the slots
                `kept` and the pages `counts`.
            after: called with the same and the pages that each layer keeps.
        """
        seen: list[Any] = []

        def packed(pack_request: Any, kept: Any, counts: Any) -> None:
            if pack_request.prefill and pack_request.ends:
                done = SimpleNamespace(pack_request=pack_request, kept=kept, counts=counts)
                seen.append(look(done))
                after(done, counts)

        self.compressor.packer.observers.append(packed)
        return seen

    def holdings(self) -> list[Any]:
        """What each request holds whose answer is bounded, once its prefill has ended."""
        schedules = self.manager.planner.schedules.values()
        return [each.footprint for each in schedules if each.prefilled and each.answer is not None]

    def watch_repacking(self) -> list[str]:
        """From now on: the request of each answer, and piece, that is packed, in order."""
        seen: list[str] = []
        self.compressor.packer.observers.append(
            lambda pack_request, kept, counts: (
                None if pack_request.whole else seen.append(pack_request.request_id)
            )
        )
        return seen

    def watch_preemptions(self) -> dict[str, list[int]]:
        """From now on: per request (as submitted), how many tokens it had each time it resumed.

        Counted when it is scheduled again: with async scheduling, what was in flight at the
        preemption is still delivered before.
        """
        seen: dict[str, list[int]] = {}
        waiting: dict[str, Any] = {}
        preempt, schedule = self.scheduler._preempt_request, self.scheduler.schedule

        def preempting(request: Any, *args: Any, **kwargs: Any) -> None:
            waiting[request.request_id] = request
            preempt(request, *args, **kwargs)

        def scheduling(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            for request_id in waiting.keys() & output.num_scheduled_tokens.keys():
                name = request_id.split("-")[0]  # vLLM adds a suffix
                seen.setdefault(name, []).append(waiting.pop(request_id).num_output_tokens)
            return output

        self.scheduler._preempt_request, self.scheduler.schedule = preempting, scheduling
        return seen

    def alone(
        self,
        prompt: list[int],
        tokens: int,
        answer: list[int],
        cuts: list[int],
        **params: Any,
    ) -> None:
        """Assert that `answer` is this request's, alone in this engine.

        Args:
            cuts: how many tokens it had at each preemption: from each it went on as a request
                that prefills the prompt and what was answered by then.
        """
        assert len(answer) == tokens
        start = 0
        for stop in [*cuts, tokens]:
            if stop > start:
                got = self.generate([prompt + answer[:start]], stop - start, **params)[0]
                assert got == answer[start:stop], (len(prompt), start, cuts, params)
            start = stop

    def running(self) -> list[Any]:
        return list(self.scheduler.running)

    def preempt(self, request: Any) -> None:
        """Take all that a running request holds, as vLLM does where the pool is short."""
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, 0.0)


@functools.cache
def inspect_models_here() -> None:
    """Let vLLM look at a model's class in this process.

    It starts one for each architecture that it has not seen on this machine, lest CUDA be
    initialised, which is not there.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


@functools.cache
def spare_repetitions() -> None:
    """What vLLM does at each start of an engine is done once in this process, which starts many.

    It unfreezes the heap: what is collected then walks over a million objects of torch and vLLM
    that are never garbage. They stay frozen.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # or extension modules end by listing what they think is lost
    gc.freeze = gc.unfreeze = lambda: None


@functools.cache
def replace_kernels_once() -> None:
    """On a CPU vLLM looks for kernels to replace in all modules, whenever an engine starts.

    It would find its replacements, and stumbles over the compiler of its own drafter.
    """
    from vllm.platforms.cpu import CpuPlatform

    once = functools.cache(CpuPlatform.register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = staticmethod(once)


@contextmanager
def engine(model: str, *, blocks: int = BLOCKS, **kwargs: Any) -> Iterator[Engine]:
    """An engine with `blocks` KV blocks of 32 tokens (null block included).

    It starts and ends in less than a second once a first one has (see CONTRIBUTING.md).
    """
    from vllm import LLM

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
    gc.freeze()  # what was imported, before the first engine looks through it
    llm = LLM(model, **{**options, **kwargs})
    try:
        yield Engine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        spare_repetitions()
