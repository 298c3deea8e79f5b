"""A vLLM engine in a process of its own that answers questions, one JSON line each.

Two engines that are to be compared stay up side by side on one GPU and take turns: what else the
machine does falls on both, and both start, compile and capture at the same time.
"""

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu.vllm_log import OURS, Lines, counted_syncs, graph_modes, graph_table

TokenIds = list[int]
NEVER = 1_000_000  # tokens: no prompt is as long
PATIENCE = 20  # seconds that an engine has to end by itself


class EngineProcess:
    """The asking side.

    Args:
        settings: the plugin's; None is vLLM without it.
        options: of vLLM's `LLM`.
    """

    def __init__(self, model: str, settings: dict[str, Any] | None, **options: Any) -> None:
        spec = {"model": model, "settings": settings, "options": options}
        self.name = f"{'plugin' if settings else 'vLLM'} {options}"
        # engines that compile at the same time must not share vLLM's cache
        self._cache = tempfile.TemporaryDirectory(prefix="engine-")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.engine_process", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ}
            | {"VLLM_CACHE_ROOT": self._cache.name},
        )

    def ready(self) -> dict[str, Any]:
        """Wait for the engine to be up."""
        told: dict[str, Any] = self._answer()
        return told

    def ask(self, method: str, **named: Any) -> Any:
        """Call a method of `Engine`.

        Raises:
            RuntimeError: it raised, or the process died.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, named]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: ended with {self.process.wait()}; see the log")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End it, by force if it does not; safe to call twice."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._cache.cleanup()


@contextmanager
def both(
    model: str, settings: dict[str, Any], **options: Any
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """vLLM without the plugin and with it, started together; both end with the block."""
    engines = EngineProcess(model, None, **options), EngineProcess(model, settings, **options)
    try:
        for engine in engines:
            engine.ready()
        yield engines
    finally:
        for engine in engines:
            engine.close()


class Engine:
    """The answering side: every public method is a question, its arguments and result JSON."""

    def __init__(self, model: str, settings: dict[str, Any] | None, options: Any) -> None:
        from vllm import LLM

        plugin = {"additional_config": {"kvcompress": settings}} if settings else {}
        self.llm: Any = LLM(model, seed=0, enable_prefix_caching=False, **options, **plugin)
        self._steps = self.llm.llm_engine
        core = self._steps.engine_core.engine_core
        self._scheduler = core.scheduler
        self._worker = core.model_executor.driver_worker.worker
        self._manager = core.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self._begun: set[str] = set()  # requests that have a token
        self._alive: list[str] = []
        self._submitted = 0
        self._packings = {"pieces packed": 0, "judged by answers": 0, "answers packed again": 0}
        if settings:
            self._manager.compression_stats = self._noting()

    def _noting(self) -> Any:
        """Counts what is packed, for the plugin as before and for `packings`."""
        from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats

        found = self._packings

        class Noting(CompressionStats):
            def pack(self, pack: Any, returned: int, **more: Any) -> None:
                found["answers packed again"] += not pack.prefill
                found["judged by answers"] += pack.prefill and bool(pack.answered)
                found["pieces packed"] += pack.prefill and not (pack.ends or pack.cut)
                super().pack(pack, returned, **more)

        return Noting()

    def about(self) -> dict[str, Any]:
        """Which parts of vLLM are at work."""
        config = self._steps.vllm_config
        pool = self._scheduler.kv_cache_manager.block_pool
        groups = getattr(self._worker.model_runner, "attn_groups", [[]])
        return {
            "runner": type(self._worker.model_runner).__module__,
            "worker": type(self._worker).__name__,
            "backend": sorted({g.backend.__name__ for group in groups for g in group}),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "blocks": int(pool.num_gpu_blocks),
            "block_size": int(config.cache_config.block_size),
        }

    def configure(self, settings: dict[str, Any]) -> None:
        """From now on new requests are compressed by `settings`."""
        from vllm_kvcompress.settings.config import CompressionConfig

        self._manager.replace_settings(CompressionConfig.parse(settings))

    def compressed(self) -> int:
        """Requests compressed so far."""
        return int(getattr(getattr(self._worker, "compressor", None), "compressed", 0))

    def packings(self) -> dict[str, int]:
        """How often prompts were packed inside, or once answers had judged them, and answers."""
        return dict(self._packings)

    # -- texts ---------------------------------------------------------------------------------

    def answer(self, prompts: Sequence[TokenIds], tokens: int, alone: bool) -> list[Any]:
        """Greedy answers to prompts, all at once or one after the other.

        Returns:
            Of each its token ids, its text, and by how many nats each token was likelier than the
            next best one.
        """
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
        batches = [[prompt] for prompt in prompts] if alone else [list(prompts)]
        answers: list[Any] = []
        for batch in batches:
            inputs = [{"prompt_token_ids": prompt} for prompt in batch]
            outputs = self.llm.generate(inputs, params, use_tqdm=False)
            answers += [output.outputs[0] for output in outputs]
        return [
            {"ids": list(x.token_ids), "text": x.text, "ahead": leads(x.logprobs)} for x in answers
        ]

    # -- times ---------------------------------------------------------------------------------

    def decode(self, count: int, length: int, steps: int, seed: int) -> dict[str, Any]:
        """Prefill random prompts at once, then time `steps` decode steps of all of them.

        Returns:
            Seconds until every request had its first token; the median decode step and its
            spread in milliseconds; blocks in use in the end.
        """
        self._submit(count, length, steps + 64 + 4 * count, seed)
        start = time.perf_counter()
        while len(self._begun) < count:
            self._step()
        first = time.perf_counter() - start
        for _ in range(4):  # what async scheduling still has in flight
            self._step()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self._step()
            times.append(1e3 * (time.perf_counter() - start))
        pool = self._scheduler.kv_cache_manager.block_pool
        used = int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        self._clear()
        tenths = statistics.quantiles(times, n=10)
        return {
            "first_token_s": first,
            "step_ms": statistics.median(times),
            "step_ms_10": tenths[0],
            "step_ms_90": tenths[-1],
            "blocks_in_use": used,
        }

    def serve(self, count: int, length: int, new: int, seed: int) -> dict[str, Any]:
        """Many requests at once: how many decode together, and how fast tokens come.

        Returns:
            Most requests that decoded in one step; tokens a second over all, prefills included,
            and in the steps that only decoded at least nine tenths of that many requests.
        """
        self._submit(count, length, new, seed)
        start = time.perf_counter()
        steps: list[tuple[int, bool, float]] = []
        while self._steps.has_unfinished_requests():
            running = list(self._scheduler.running)
            decoding = sum(request.num_output_tokens > 0 for request in running)
            began = time.perf_counter()
            self._step()
            seconds = time.perf_counter() - began
            steps.append((decoding, decoding == len(running), seconds))
        whole = time.perf_counter() - start
        self._clear()
        peak = max(decoding for decoding, _, _ in steps)
        full = [(n, s) for n, alone, s in steps if alone and n >= 0.9 * peak]
        seconds = sum(s for _, s in full)
        return {
            "most_at_once": peak,
            "tokens_per_s": count * new / whole,
            "decode_tokens_per_s": sum(n for n, _ in full) / seconds if full else 0.0,
            "decode_steps": len(full),
            "seconds": whole,
        }

    # -- what vLLM says of itself --------------------------------------------------------------

    def graphs(self, prompts: Sequence[TokenIds], steps: int) -> dict[str, Any]:
        """Decode steps by the graphs that vLLM's log says they ran in (`cudagraph_metrics`)."""
        self._submit_prompts(prompts, steps + 64)
        while len(self._begun) < len(prompts):
            self._step()
        for _ in range(4):
            self._step()
        self._steps.do_log_stats()  # what came before
        lines = Lines()
        logging.getLogger("vllm").addHandler(lines)
        for _ in range(steps):
            self._step()
        self._steps.do_log_stats()
        logging.getLogger("vllm").removeHandler(lines)
        self._clear()
        table = [", ".join(row) for row in graph_table(lines.lines)]
        return {"modes": graph_modes(lines.lines), "log": table}

    def syncs(self, prompts: Sequence[TokenIds], tokens: int) -> dict[str, Any]:
        """What prefilling, compressing and decoding these prompts made the host wait for."""
        before = self.compressed()
        with counted_syncs(self._worker) as seen:
            self.answer(prompts, tokens, False)
        return {
            "all": seen.total(),
            "ours": sum(n for where, n in seen.items() if where.startswith(OURS)),
            "by": dict(seen.most_common(12)),
            "compressed": self.compressed() - before,
        }

    # -- steps ---------------------------------------------------------------------------------

    def _submit(self, count: int, length: int, new: int, seed: int) -> None:
        import torch

        vocabulary = self._steps.vllm_config.model_config.get_vocab_size()
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, vocabulary, (count, length), generator=random)
        self._submit_prompts(ids.tolist(), new)

    def _submit_prompts(self, prompts: Sequence[TokenIds], new: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            name = f"prompt{self._submitted}"
            self._submitted += 1
            self._alive.append(name)
            self._steps.add_request(name, {"prompt_token_ids": prompt}, params)

    def _step(self) -> None:
        for output in self._steps.step():
            if output.outputs and output.outputs[0].token_ids:
                self._begun.add(output.request_id)

    def _clear(self) -> None:
        """Abort what is left, and take what is still in flight."""
        self._steps.abort_request(self._alive)
        for _ in range(4):
            self._steps.step()
        self._begun.clear()
        self._alive.clear()


def leads(logprobs: Sequence[Mapping[int, Any]]) -> list[float]:
    """By how much the best token of each step is ahead of the second best."""
    best = [sorted((x.logprob for x in step.values()), reverse=True) for step in logprobs]
    return [first - second for first, second, *_ in best]


def main(spec: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to the log

    def answer(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        engine = Engine(**json.loads(spec))
        answer(result=engine.about())
    except Exception as e:  # told to the asking side, which goes on without this engine
        traceback.print_exc()
        answer(error=f"{type(e).__name__}: {e}")
        return
    for line in sys.stdin:
        method, named = json.loads(line)
        try:
            answer(result=getattr(engine, method)(**named))
        except Exception as e:
            traceback.print_exc()
            answer(error=f"{method}: {type(e).__name__}: {e}")
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    os.environ.update(VLLM_NO_USAGE_STATS="1", TOKENIZERS_PARALLELISM="false")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    # one process alone, on a machine that may have no network
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1])
