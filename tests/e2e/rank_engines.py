"""Engines whose ranks are other processes: requests, results, and engines in scripts."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forks import FORKS

# The engine, or its ranks, are forks of this script's process.
_SCRIPT = """
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    import json, sys
    model, options, rounds, prompts = json.loads(sys.argv[1])
    llm = LLM(
        model, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=2048,
        block_size=32, num_gpu_blocks_override=129, **options,
    )
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)  # None in another process
    pool = core and core.scheduler.kv_cache_manager.block_pool
    free = pool and pool.get_num_free_blocks()
    for method, tokens, extra_args in rounds:
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra_args
        )
        inputs = [{"prompt_token_ids": p} for p in prompts]
        done = llm.generate(inputs, params, use_tqdm=False)
        assert pool is None or pool.get_num_free_blocks() == free, method
        outputs = [list(o.outputs[0].token_ids) for o in done]
        print("OUTPUTS", json.dumps([outputs, [getattr(o, "kv_compress", None) for o in done]]))
        sys.stdout.flush()
"""


def extra_args(method: str, new: int, long: int) -> dict[str, Any]:
    """Return the extra arguments of a request for `new` output tokens.

    Args:
        long: output tokens of requests with a look-ahead, whose output is compressed as well.
    """
    lookahead = {"kv_lookahead": 0} if new < long and method != "off" else {}
    return {"kv_compress": method, **lookahead}


@dataclass(frozen=True, slots=True)
class RankResults:
    """Results of an engine with several ranks.

    Args:
        outputs: results by round.
        log: the ranks' output up to the last successful round.
        failure: the ranks' output, perhaps with the engine's error, in the round that ends the
            engine.
    """

    outputs: dict[Any, Any]
    log: str
    failure: str


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """A script's exit status, its output, and for each round the output tokens and the reports."""

    status: int
    log: str
    rounds: list[tuple[list[list[int]], list[dict[str, Any] | None]]]


def run_script(
    folder: Path,
    model: str,
    options: dict[str, Any],
    rounds: Sequence[tuple[str, int, dict[str, Any]]],
    prompts: Sequence[list[int]],
    before: str = "",
    **environment: str,
) -> ScriptResult:
    """Run an engine in a script of its own process.

    Args:
        folder: receives the script.
        options: arguments of vLLM's `LLM`.
        rounds: method, output tokens and extra arguments of each round.
        before: code that runs before vLLM is imported.
    """
    script = folder / "script.py"
    script.write_text(FORKS + before + _SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps([model, options, rounds, prompts])],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=folder,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **environment},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("OUTPUTS ")]
    found = [json.loads(line.removeprefix("OUTPUTS ")) for line in lines]
    return ScriptResult(done.returncode, done.stdout + done.stderr, [(a, b) for a, b in found])
