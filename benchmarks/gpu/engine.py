"""The server side of `engine_process`: a vLLM engine whose methods take and return JSON values."""

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.gpu.switches import switch
from benchmarks.gpu.vllm_log import OUR_PACKAGES, LogLines, counted_syncs, graph_modes, graph_table

TokenIds = list[int]


class Engine:
    """An engine with or without the plugin; `EngineProcess` calls its public methods."""

    def __init__(self, model: str, settings: dict[str, Any] | None, options: Any) -> None:
        from vllm import LLM

        plugin = {"additional_config": {"kvcompress": settings}} if settings else {}
        self.llm: Any = LLM(model, seed=0, enable_prefix_caching=False, **options, **plugin)
        self._llm_engine = self.llm.llm_engine
        core = self._llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._worker = core.model_executor.driver_worker.worker
        self._started: set[str] = set()  # requests with at least one output token
        self._request_ids: list[str] = []
        self._submitted = 0
        self._packings = {
            "pieces packed": 0,
            "prompts scored by output": 0,
            "outputs packed again": 0,
        }
        self._drafts = {"verified": 0, "accepted": 0}
        self._count_drafts()
        if settings:
            self._scheduler.step_builder.stats = self._counting_stats()

    def _count_drafts(self) -> None:
        """Count the draft tokens of later steps in `drafts`."""
        counts, inner = self._drafts, self._scheduler.make_spec_decoding_stats

        def counting(
            stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any
        ) -> Any:
            counts["verified"] += num_draft_tokens
            counts["accepted"] += num_accepted_tokens
            return inner(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

        self._scheduler.make_spec_decoding_stats = counting

    def _counting_stats(self) -> Any:
        """Return the plugin's statistics object, extended to count packings for `packings`."""
        from vllm_kvcompress.engine.scheduling.compression_stats import CompressionStats

        counts = self._packings

        class CountingStats(CompressionStats):
            def pack(self, state: Any, pack: Any, returned_blocks: int, **details: Any) -> None:
                counts["outputs packed again"] += not pack.prefill
                counts["prompts scored by output"] += pack.prefill and bool(pack.output_tokens)
                counts["pieces packed"] += pack.prefill and not (
                    pack.completes_prompt or pack.early_target
                )
                super().pack(state, pack, returned_blocks, **details)

        return CountingStats()

    def about(self) -> dict[str, Any]:
        """Return the parts of vLLM in use and the KV pool size."""
        config = self._llm_engine.vllm_config
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
        """Compress new requests with `settings` from now on."""
        from vllm_kvcompress.settings.config import CompressionConfig

        assert not self._scheduler.states, "configure while no request runs"
        self._scheduler.admissions.settings = CompressionConfig.parse(settings)

    def switch(self, name: str, on: bool) -> bool:
        """Turn a change of the plugin on or off; return False if this commit has no such switch."""
        return switch(name, on=on)

    def compressed(self) -> int:
        """Return the number of requests compressed so far."""
        return int(getattr(getattr(self._worker, "compressor", None), "compressed", 0))

    def packings(self) -> dict[str, int]:
        """Return how often prompt pieces, prompts after a look-ahead, and outputs were packed."""
        return dict(self._packings)

    # -- outputs -------------------------------------------------------------------------------

    def drafts(self) -> dict[str, int]:
        """Return how many draft tokens were verified and accepted so far."""
        return dict(self._drafts)

    def generate(
        self,
        prompts: Sequence[TokenIds],
        tokens: int,
        alone: bool,
        allowed: Sequence[int] | None = None,
    ) -> list[Any]:
        """Return greedy outputs of `tokens` tokens.

        Args:
            alone: run one request at a time instead of all at once.
            allowed: token ids that outputs may have; None for all.

        Returns:
            For each prompt the token ids, the text, and per token its margin: the difference in
            nats between the two most likely tokens.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=2,
            allowed_token_ids=None if allowed is None else list(allowed),
        )
        batches = [[prompt] for prompt in prompts] if alone else [list(prompts)]
        completions: list[Any] = []
        for batch in batches:
            inputs = [{"prompt_token_ids": prompt} for prompt in batch]
            outputs = self.llm.generate(inputs, params, use_tqdm=False)
            completions += [output.outputs[0] for output in outputs]
        return [
            {"ids": list(x.token_ids), "text": x.text, "margins": margins(x.logprobs)}
            for x in completions
        ]

    # -- times ---------------------------------------------------------------------------------

    def decode(self, count: int, length: int, steps: int, seed: int) -> dict[str, Any]:
        """Prefill random prompts at once, then time `steps` decode steps of all requests.

        Returns:
            Seconds until every request had its first token; median and first and last decile of
            the decode step in milliseconds; blocks in use at the end.
        """
        most = 1 + int(self._llm_engine.vllm_config.num_speculative_tokens)  # tokens of a step
        self._submit(count, length, most * (steps + 64 + 4 * count), seed)
        start = time.perf_counter()
        while len(self._started) < count:
            self._step()
        first_token_seconds = time.perf_counter() - start
        for _ in range(4):  # steps that async scheduling has in flight
            self._step()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self._step()
            times.append(1e3 * (time.perf_counter() - start))
        pool = self._scheduler.kv_cache_manager.block_pool
        used = int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        self._clear()
        deciles = statistics.quantiles(times, n=10)
        return {
            "first_token_s": first_token_seconds,
            "step_ms": statistics.median(times),
            "step_ms_10": deciles[0],
            "step_ms_90": deciles[-1],
            "blocks_in_use": used,
        }

    def gaps(self, count: int, length: int, output_tokens: int, seed: int) -> dict[str, Any]:
        """Submit random prompts at once, and measure the waits between their output tokens.

        Returns:
            The longest and the median wait in milliseconds after every request had its first
            token, and the number of the token that took longest, from 1.
        """
        self._submit(count, length, output_tokens, seed)
        times: dict[str, list[float]] = {}
        while self._llm_engine.has_unfinished_requests():
            outputs = self._llm_engine.step()
            now = time.perf_counter()
            for output in outputs:
                arrived = times.setdefault(output.request_id, [])
                tokens = len(output.outputs[0].token_ids) if output.outputs else 0
                arrived += [now] * (tokens - len(arrived))
        self._clear()
        all_started = max(arrived[0] for arrived in times.values())
        waits = [
            (1e3 * (later - earlier), token)
            for arrived in times.values()
            for token, (earlier, later) in enumerate(pairwise(arrived), 2)
            if earlier >= all_started
        ]
        longest, token = max(waits)
        return {
            "longest_gap_ms": longest,
            "longest_gap_token": token,
            "median_gap_ms": statistics.median(wait for wait, _ in waits),
        }

    def trace(self, length: int, path: str, seed: int) -> None:
        """Profile one random prompt and five output tokens; write a Chrome trace to `path`."""
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            self._submit(1, length, 64, seed)
            while not self._started:
                self._step()
            for _ in range(4):
                self._step()
        profile.export_chrome_trace(path)
        self._clear()

    def serve(self, count: int, length: int, output_tokens: int, seed: int) -> dict[str, Any]:
        """Submit many requests at once and measure concurrency and throughput.

        Returns:
            Maximum number of requests that decoded in one step (the peak); tokens per second over
            the complete run with prefills; and tokens per second over decode-only steps with at
            least 90 % of the peak.
        """
        self._submit(count, length, output_tokens, seed)
        start = time.perf_counter()
        steps: list[tuple[int, bool, float]] = []
        while self._llm_engine.has_unfinished_requests():
            running = list(self._scheduler.running)
            decoding = sum(request.num_output_tokens > 0 for request in running)
            step_start = time.perf_counter()
            self._step()
            seconds = time.perf_counter() - step_start
            steps.append((decoding, decoding == len(running), seconds))
        total = time.perf_counter() - start
        self._clear()
        peak = max(decoding for decoding, _, _ in steps)
        full = [(n, s) for n, only_decodes, s in steps if only_decodes and n >= 0.9 * peak]
        seconds = sum(s for _, s in full)
        return {
            "most_at_once": peak,
            "tokens_per_s": count * output_tokens / total,
            "decode_tokens_per_s": sum(n for n, _ in full) / seconds if full else 0.0,
            "decode_steps": len(full),
            "seconds": total,
        }

    # -- vLLM's own observations --------------------------------------------------------------

    def graphs(self, prompts: Sequence[TokenIds], steps: int) -> dict[str, Any]:
        """Return decode steps by CUDA graph mode, from vLLM's log (`cudagraph_metrics`)."""
        self._submit_prompts(prompts, steps + 64)
        while len(self._started) < len(prompts):
            self._step()
        for _ in range(4):
            self._step()
        self._llm_engine.do_log_stats()  # flush the counts so far
        lines = LogLines()
        logging.getLogger("vllm").addHandler(lines)
        for _ in range(steps):
            self._step()
        self._llm_engine.do_log_stats()
        logging.getLogger("vllm").removeHandler(lines)
        self._clear()
        table = [", ".join(row) for row in graph_table(lines.lines)]
        return {"modes": graph_modes(lines.lines), "log": table}

    def syncs(self, prompts: Sequence[TokenIds], tokens: int) -> dict[str, Any]:
        """Return the host syncs of prefilling, compressing and decoding these prompts."""
        before = self.compressed()
        with counted_syncs(self._worker) as counts:
            self.generate(prompts, tokens, False)
        return {
            "all": counts.total(),
            "ours": sum(n for where, n in counts.items() if where.startswith(OUR_PACKAGES)),
            "by": dict(counts.most_common(12)),
            "compressed": self.compressed() - before,
        }

    # -- steps ---------------------------------------------------------------------------------

    def _submit(self, count: int, length: int, output_tokens: int, seed: int) -> None:
        import torch

        vocabulary = self._llm_engine.vllm_config.model_config.get_vocab_size()
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, vocabulary, (count, length), generator=random)
        self._submit_prompts(ids.tolist(), output_tokens)

    def _submit_prompts(self, prompts: Sequence[TokenIds], output_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        for prompt in prompts:
            request_id = f"prompt{self._submitted}"
            self._submitted += 1
            self._request_ids.append(request_id)
            self._llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def _step(self) -> None:
        for output in self._llm_engine.step():
            if output.outputs and output.outputs[0].token_ids:
                self._started.add(output.request_id)

    def _clear(self) -> None:
        """Abort all requests and run the steps that are still in flight."""
        self._llm_engine.abort_request(self._request_ids)
        for _ in range(4):
            self._llm_engine.step()
        self._started.clear()
        self._request_ids.clear()


def margins(logprobs: Sequence[Mapping[int, Any]]) -> list[float]:
    """Return per step the log-probability difference of the two most likely tokens."""
    best = [sorted((x.logprob for x in step.values()), reverse=True) for step in logprobs]
    return [first - second for first, second, *_ in best]
