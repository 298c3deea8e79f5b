"""Two ranks: each packs its own heads, and both hold the same number of pages and blocks."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from checkpoints import make, tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = (300, 700, 90)
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, ranks, settings, prompts = json.loads(sys.argv[1])
    llm = LLM(
        model, tensor_parallel_size=ranks, skip_tokenizer_init=True, enforce_eager=True,
        dtype="float32", max_model_len=2048, block_size=32, additional_config=settings,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    done = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    print("ANSWERS", json.dumps([list(o.outputs[0].token_ids) for o in done]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    model, script = make("llama-gqa", folder), folder / "script.py"
    script.write_text(SCRIPT)
    prompts = [tokens(length, seed=length) for length in LENGTHS]

    def run(ranks: int, method: str) -> tuple[list[list[int]], str]:
        settings = {"compress": method, "budget": 0.2, "min_prompt": 128, "log_requests": True}
        done = subprocess.run(
            [
                sys.executable,
                str(script),
                json.dumps([model, ranks, {"kvcompress": settings}, prompts]),
            ],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            cwd=Path(folder),
            env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        line = next(x for x in done.stdout.splitlines() if x.startswith("ANSWERS "))
        return json.loads(line.removeprefix("ANSWERS ")), done.stdout + done.stderr

    return run


def test_two_ranks_answer_as_one(answers):
    """SnapKV chooses per KV head: which rank a head is on makes no difference."""
    one, _ = answers(1, "snapkv")
    two, log = answers(2, "snapkv")
    assert two == one
    assert log.count("kv-compress: request=") == 2 * 2  # prompts x ranks


def test_trap_15_cake_on_two_ranks_keeps_the_first_token_and_as_many_blocks(answers):
    """CAKE's layer budgets come from each rank's own heads, so later tokens may differ.

    What the scheduler counts may not: every rank keeps as many pages and blocks.
    """
    whole, _ = answers(2, "off")
    two, log = answers(2, "cake")
    assert [answer[0] for answer in two] == [answer[0] for answer in whole]
    assert two[2] == whole[2]
    assert log.count("kv-compress: request=") == 2 * 2
    line = r"request=(\S+) prompt_tokens=(\d+) kept_tokens=(\S+) .*blocks_after=(\d+)"
    kept = Counter(re.findall(line, log))
    assert sorted(int(tokens) for _, tokens, *_ in kept) == sorted(LENGTHS[:2])
    assert set(kept.values()) == {2}, kept
