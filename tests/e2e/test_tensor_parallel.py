"""Two ranks: each packs its own heads, and both hold the same number of pages and blocks."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from broken_sites import broken
from checkpoints import make, tokens
from engines import engine, settings

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = (300, 700, 90)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
METHODS = ("snapkv", "cake")
ROUNDS = [(method, 12) for method in METHODS]
Done = subprocess.CompletedProcess[str]
LONG = 150  # tokens of an answer that is packed again as it grows
SETTINGS = settings(
    "snapkv",
    0.2,
    log_requests=True,
    allow_override="off,cake",
    decode_budget=96,
    decode_interval=32,
    max_whole=512,  # the longest prompt goes in pieces
    piece=256,
)
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, settings, rounds, prompts = json.loads(sys.argv[1])
    llm = LLM(
        model, tensor_parallel_size=2, skip_tokenizer_init=True, enforce_eager=True,
        dtype="float32", max_model_len=2048, block_size=32, additional_config=settings,
        num_gpu_blocks_override=129,
    )
    for method, tokens in rounds:
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, extra_args={"kv_compress": method}
        )
        inputs = [{"prompt_token_ids": p} for p in prompts]
        done = llm.generate(inputs, params, use_tqdm=False)
        print("ANSWERS", json.dumps([list(o.outputs[0].token_ids) for o in done]))
"""


# What the second rank raises, nobody hears: vLLM asks the first one alone.
SECOND_FAILS = broken(
    "vllm_kvcompress.engine.compression.packer",
    "pack = module.Packer.pack; module.Packer.pack = lambda self, finished: ("
    "module.torch.distributed.get_rank() == 1 and module.torch.empty(2**60), pack(self, finished)"
    ")[1]",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("llama-gqa", tmp_path_factory.mktemp("ranks"))


def start(model: str, rounds: Sequence[tuple[str, int]], **environment: str) -> Done:
    """Run the script: one engine of two ranks."""
    script = Path(model).with_name("script.py")
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, str(script), json.dumps([model, SETTINGS, rounds, PROMPTS])],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=script.parent,
        env={
            **os.environ,
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            **environment,
        },
    )


@pytest.fixture(scope="module")
def on_two(model):
    """By method, the answers of one engine of two ranks; and what its ranks logged."""
    done = start(model, [*ROUNDS, ("snapkv", LONG)])
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [x for x in done.stdout.splitlines() if x.startswith("ANSWERS ")]
    answers = [json.loads(line.removeprefix("ANSWERS ")) for line in lines]
    return dict(zip((*METHODS, "long"), answers, strict=True)), done.stdout + done.stderr


@pytest.fixture(scope="module")
def on_one(model):
    """By method, and uncompressed as ``off``, the answers of one rank, in this process."""
    with engine(model, additional_config=SETTINGS, max_model_len=2048) as llm:
        answers = {
            method: llm.generate(PROMPTS, 12, extra_args={"kv_compress": method})
            for method in (*METHODS, "off")
        }
        again = llm.watch_repacking()
        answers["long"] = llm.generate(PROMPTS, LONG)
        assert len(again) >= 3 * len(PROMPTS)
        return answers


def test_two_ranks_answer_as_one(on_two, on_one):
    """SnapKV chooses per KV head: which rank a head is on makes no difference."""
    answers, _ = on_two
    assert answers["snapkv"] == on_one["snapkv"]


def test_two_ranks_pack_an_answer_again_as_one(on_two, on_one):
    """Each its own heads, to the same number of pages: the whole answers are the same."""
    answers, _ = on_two
    assert answers["long"] == on_one["long"]


def test_trap_15_cake_on_two_ranks_keeps_the_first_token_and_as_many_blocks(on_two, on_one):
    """CAKE's layer budgets come from each rank's own heads, so later tokens may differ.

    What the scheduler counts may not: every rank keeps as many pages and blocks.
    """
    (answers, log), whole = on_two, on_one["off"]
    # what goes in pieces reads what earlier ones kept, already before its first token
    stand = [index for index, length in enumerate(LENGTHS) if length <= 512]
    assert [answers["cake"][i][0] for i in stand] == [whole[i][0] for i in stand]
    assert answers["cake"][2] == whole[2]
    line = r"request=(\S+) prompt_tokens=(\d+) kept_tokens=(\S+) .*blocks_after=(\d+)"
    kept = Counter(re.findall(line, log))
    long = [length for length in LENGTHS if length >= 128]
    assert sorted(int(tokens) for _, tokens, *_ in kept) == sorted(long * (len(METHODS) + 1))
    assert set(kept.values()) == {2}, kept  # both ranks say the same


def test_a_rank_that_could_not_pack_is_not_believed_by_the_others(model, tmp_path):
    """Its layers would read what was never packed: it ends, and with it the engine."""
    (tmp_path / "sitecustomize.py").write_text(SECOND_FAILS)
    done = start(model, ROUNDS[:1], PYTHONPATH=str(tmp_path))
    log = done.stdout + done.stderr
    assert done.returncode != 0
    assert "ANSWERS" not in log
    assert "a rank that could not compress a prompt must not go on" in log
    assert "died unexpectedly" in log  # vLLM did not wait in vain, which takes it 300 s
