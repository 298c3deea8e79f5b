"""Two pipeline stages: each packs its own layers into the same blocks, the last reports for both.

vLLM's V1 runner makes the buffer for what comes from the stage before while it captures graphs,
which a CPU does not do: `BUFFERS` makes it, or vLLM alone dies there too.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import engines
import test_yielding as yielding
from broken_sites import broken, write_site
from checkpoints import make, tokens
from configuring import configure
from engines import Engine, engine, leave_async_scheduling, settings, with_states
from forks import FORKS
from idling import wait_for
from own_workers import SLEEPY, workers_with
from vllm_kvcompress.commands.plan import ask
from vllm_kvcompress.commands.plan_options import PlanOptions
from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.engine.worker.footprint import device_bytes
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.allocators.pyramid import Pyramid
from vllm_kvcompress.methods.budgets import round_to_pages
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.settings.config import CompressionConfig

pytestmark = [pytest.mark.engine, pytest.mark.slow]

_BUFFERS = """
start = module.CPUWorker.initialize_from_config
def starting(self, kv_cache_config):
    start(self, kv_cache_config)
    from vllm.distributed import get_pp_group
    runner = self.model_runner
    if not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
module.CPUWorker.initialize_from_config = starting
"""
BUFFERS = broken("vllm.v1.worker.cpu_worker", f"exec({_BUFFERS!r}, {{'module': module}})")
FAILING = "streamingllm"  # the method of the round that ends the engine, its last
# An earlier stage raises where nobody hears: vLLM asks the last one alone.
FIRST_FAILS = broken(
    "vllm_kvcompress.engine.compression.packer",
    "run = module.Packer.run; module.Packer.run = lambda self, jobs: ("
    f"any(job.todo.settings.compress == {FAILING!r} for job in jobs)"
    " and module.torch.distributed.get_rank() == 0 and module.torch.empty(2**60),"
    " run(self, jobs))[1]",
)
# Whole blocks and a budget in tokens: what a layer keeps does not depend on how many there are.
# Of the last prompt it does: each stage rounds for itself.
LENGTHS = (320, 704, 90, 417)
ALIKE = slice(3)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
LONG = 110  # tokens of an answer that is packed again as it grows
SETTINGS = settings(
    "snapkv",
    128,
    log_requests=True,
    allow_override=f"off,tova,h2o,pyramidkv,cake,d2o,{FAILING}",
    decode_budget=128,
    decode_interval=32,
    max_whole=512,  # the longest prompt goes in pieces
    piece=256,
    lookahead=12,  # of long answers: short ones ask for none
)
ROUNDS = [
    *[(method, 12) for method in ("snapkv", "tova", "h2o", "off", "pyramidkv", "cake")],
    ("snapkv", LONG),
    ("d2o", LONG),
]


def asks(method: str, new: int) -> dict[str, Any]:
    """What a request for `new` tokens asks for."""
    ahead = {"kv_lookahead": 0} if new < LONG and method != "off" else {}
    return {"kv_compress": method, **ahead}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("llama-gqa", tmp_path_factory.mktemp("stages"))


Kept = list[dict[str, Any] | None]


@contextmanager
def ranks(
    model: str, stages: int, each: int, own: dict[str, Any] = SETTINGS, **more: Any
) -> Iterator[Engine]:
    """An engine in this process; its stages, of so many ranks each, are processes."""
    options = dict(pipeline_parallel_size=stages, tensor_parallel_size=each, blocks=129)
    usage = {"kvcompress": {**own["kvcompress"], "usage": True}}
    with pytest.MonkeyPatch.context() as patch:
        leave_async_scheduling(patch)
        with engine(
            model, additional_config=usage, max_model_len=2048,
            distributed_executor_backend="mp", **options, **more,
        ) as llm:  # fmt: skip
            yield llm


def told(llm: Engine, method: str, new: int) -> tuple[list[list[int]], Kept]:
    """What is answered to all prompts, and what was kept of them; all blocks come back."""
    free = llm.free_blocks
    done = llm.outputs(PROMPTS, new, extra_args=asks(method, new))
    assert llm.free_blocks == free, method
    answers = [list(output.outputs[0].token_ids) for output in done]
    return answers, json.loads(json.dumps([getattr(x, "kv_compress", None) for x in done]))


@dataclass(frozen=True, slots=True)
class Stages:
    """What two stages did.

    Args:
        answers: by round, what they answered and kept.
        log: what they said until the last answer.
        ended: what they said of the round that ends the engine.
    """

    answers: dict[tuple[str, int], tuple[list[list[int]], Kept]]
    log: str
    ended: str


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """What the ranks of all engines say. The first one cannot pack the prompts of one method."""
    with workers_with(tmp_path_factory.mktemp("ranks"), BUFFERS + FIRST_FAILS) as log:
        yield log


@pytest.fixture(scope="module")
def on_two(model, log):
    """One engine of two stages, whose first one cannot pack the last round's prompts."""
    with ranks(model, 2, 1) as llm:
        answers = {(method, new): told(llm, method, new) for method, new in ROUNDS}
        until = len(log.read_text())
        stages = [worker.proc for worker in llm.core.model_executor.workers]
        assert all(stage.is_alive() for stage in stages)
        with pytest.raises(Exception):  # noqa: B017, PT011
            told(llm, FAILING, 12)
        wait_for(lambda: not any(stage.is_alive() for stage in stages))
    said = log.read_text()
    return Stages(answers, said[:until], said[until:])


@pytest.fixture(scope="module")
def on_one(model):
    """By round, what all layers on one rank answer."""
    with engine(model, additional_config=SETTINGS, max_model_len=2048) as llm:
        return {
            (method, new): llm.generate(PROMPTS, new, extra_args=asks(method, new))
            for method, new in ROUNDS
        }


SAME = ["snapkv", "tova", "h2o", "off"]


@pytest.mark.parametrize("method", SAME)
def test_two_stages_answer_as_one(method, on_two, on_one):
    """A layer's choice is its own; where it is, makes no difference. In pieces too."""
    alike = slice(None) if method == "off" else ALIKE
    assert on_two.answers[method, 12][0][alike] == on_one[method, 12][alike]


def test_two_stages_pack_an_answer_again_as_one(on_two, on_one):
    assert on_two.answers["snapkv", LONG][0][ALIKE] == on_one["snapkv", LONG][ALIKE]


def test_the_last_stage_reports_the_layers_of_both(on_two):
    """By their places in the model; each stage shares out a budget, from its first layer on."""
    answers, log = on_two.answers, on_two.log
    _, kept = answers["snapkv", 12]
    of_one = CompressionConfig.parse(SETTINGS["kvcompress"]).prompt(2, LENGTHS[-1])
    # 7 pages, whose 4 blocks have 8 on each stage
    assert page_plan(of_one, 32).pages == 4 + 4
    rounded = [4 * 32 + 1] * 4
    told = [each and each["layer_tokens"] for each in kept]
    assert told == [[128] * 4, [128] * 4, None, rounded]
    _, kept = answers["pyramidkv", 12]
    own = CompressionConfig.parse({**SETTINGS["kvcompress"], "compress": "pyramidkv"})
    plan = page_plan(own.prompt(2, LENGTHS[0]), 32)
    stage = round_to_pages(Pyramid().allocate(plan.prompt, None) + plan.window, plan) * 32
    assert kept[0]["layer_tokens"] == [*stage.tolist()] * 2
    assert stage[0] > stage[1]
    _, kept = answers["cake", 12]
    for each in kept[:2]:
        assert sum(each["layer_tokens"][:2]) == sum(each["layer_tokens"][2:]) == 256
    lines = [line for line in log.splitlines() if "kv-compress: request=" in line]
    # one line for each prompt that was compressed, of the last stage
    assert len(lines) == 3 * 7
    assert all("PP1" in line for line in lines)


def test_plan_counts_a_stages_layers(model, on_two):
    """Its blocks are those that each stage packs into, its bytes those that one takes."""
    own = {**SETTINGS["kvcompress"], "lookahead": 0}  # as short answers ask for
    options = dict(everything=json.dumps(own), length=LENGTHS[0], output=12,
                   block_size=32, dtype="float32", ranks=1, longest=2048, requests=64, device="cpu",
                   model=model)  # fmt: skip
    found = ask(PlanOptions(**options, stages=2)).forecast
    assert (
        f"blocks_after={found.on.decoding} layer_tokens={[128] * 4}".replace(", ", ",")
        in on_two.log
    )
    assert found.kept_tokens == 128
    assert 2 * found.block_bytes == ask(PlanOptions(**options)).forecast.block_bytes
    config = configure(
        model, pipeline_parallel_size=2, distributed_executor_backend="mp", dtype="float32",
        max_model_len=2048, block_size=32, max_num_seqs=64, additional_config={"kvcompress": own},
    )  # fmt: skip
    extra = device_bytes(config, active_settings(config.additional_config))
    assert found.extra_bytes == extra < ask(PlanOptions(**options)).forecast.extra_bytes
    for stages in (3, 8):
        with pytest.raises(ConfigError, match=f"must divide the model's 4 layers.*got {stages}"):
            ask(PlanOptions(**options, stages=stages))


def test_what_is_shared_out_anew_keeps_the_first_token(on_two, on_one):
    for method in ("pyramidkv", "cake"):
        mine, theirs = on_two.answers[method, 12][0], on_one[method, 12]
        # the second prompt goes in pieces: its last chunk reads what the first one left
        assert mine[0][0] == theirs[0][0]
        assert mine[2] == theirs[2]


@pytest.mark.usefixtures("log")
def test_two_stages_of_two_ranks_answer_so_too(model, on_one):
    with ranks(model, 2, 2) as llm:
        for method, new in (("snapkv", 12), ("snapkv", LONG)):
            answers, kept = told(llm, method, new)
            assert answers[ALIKE] == on_one[method, new][ALIKE]
            assert kept[0]["layer_tokens"] == [128 + kept[0].get("lookahead", 0)] * 4


@pytest.mark.usefixtures("log")
def test_windows_and_sinks_on_two_ranks_answer_as_one(tmp_path_factory):
    """One stage: each rank has the sinks of its own heads, and a pool that both groups share."""
    model = make("gpt-oss", tmp_path_factory.mktemp("windows"))
    rounds = [("snapkv", 12), ("h2o", 12), ("off", 12), ("snapkv", LONG)]
    with engine(model, additional_config=SETTINGS, max_model_len=2048) as llm:
        alone = [llm.generate(PROMPTS, new, extra_args=asks(method, new)) for method, new in rounds]
    with ranks(model, 1, 2) as llm:
        assert [told(llm, *each)[0] for each in rounds] == alone


@with_states
@pytest.mark.usefixtures("log")
def test_states_on_two_ranks_answer_as_one(tmp_path_factory):
    """Each rank has the states of its own heads, in pages as long as its own keys and values."""
    model = make("granite", tmp_path_factory.mktemp("states"))
    own = {"kvcompress": {**SETTINGS["kvcompress"], "probe": 0}}
    rounds = [("off", 12), ("snapkv", LONG)]
    plain = {"enable_prefix_caching": False}
    with engine(model, additional_config=own, max_model_len=2048, **plain) as llm:
        alone = [llm.generate(PROMPTS, new, extra_args=asks(method, new)) for method, new in rounds]
    with ranks(model, 1, 2, own, **plain) as llm:
        assert [told(llm, *each)[0] for each in rounds] == alone


@pytest.mark.usefixtures("log")
def test_no_request_is_preempted_while_another_looks_ahead(tmp_path_factory):
    """Nor for one that was admitted while the other's step was under way: seed 6 has such a one."""
    kind, seeds = yielding.KINDS["sync"], (6, 8)
    model = make(kind.model, tmp_path_factory.mktemp("yielding"))
    options = dict(pipeline_parallel_size=2, max_num_seqs=16, max_num_batched_tokens=256)
    with pytest.MonkeyPatch.context() as patch:
        leave_async_scheduling(patch)
        with engine(
            model, additional_config=yielding.config(), blocks=1 + kind.pool, max_model_len=512,
            distributed_executor_backend="mp", **options,
        ) as llm:  # fmt: skip
            watched = yielding.Watched(llm)
            for seed in seeds:
                done = yielding.run(llm, kind, seed)
                assert len(done) == len(list(yielding.requests(seed)))
    assert watched.preempted, "pools were meant to be too small"
    assert watched.cuts, "look-aheads were meant to give way"
    assert not watched.left


def test_a_stage_that_cannot_pack_ends_the_engine(on_two):
    """It must not go on: its blocks are free, and the last stage knows of nothing."""
    assert "a rank that could not compress a prompt must not go on" in on_two.ended


# -- on what CUDA runs -----------------------------------------------------------------------------

# The workers are forks of it.
SCRIPT = """
import json, sys
import pytest
from engines import leave_async_scheduling, prepare_model_runner
prepare_model_runner()
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, settings, rounds, prompts = json.loads(sys.argv[1])
    leave_async_scheduling(pytest.MonkeyPatch())
    llm = LLM(
        model, pipeline_parallel_size=2, skip_tokenizer_init=True, enforce_eager=True,
        dtype="float32", max_model_len=2048, block_size=32, additional_config=settings,
        num_gpu_blocks_override=129, distributed_executor_backend="mp", async_scheduling=True,
    )
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    for method, tokens, asks in rounds:
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=asks
        )
        inputs = [{"prompt_token_ids": p} for p in prompts]
        done = llm.generate(inputs, params, use_tqdm=False)
        assert pool.get_num_free_blocks() == free, method
        kept = [getattr(o, "kv_compress", None) for o in done]
        answers = [list(o.outputs[0].token_ids) for o in done]
        print("ANSWERS", json.dumps([answers, kept]), flush=True)
"""


def test_two_stages_on_model_runner_v2_answer_so_too(model, on_one, tmp_path):
    """Steps that overlap included: vLLM's own runner, in Triton's interpreter."""
    rounds = [("h2o", 12), ("snapkv", LONG)]
    write_site(tmp_path, SLEEPY)
    script = tmp_path / "script.py"
    script.write_text(FORKS + SCRIPT)
    asked = [model, {"kvcompress": {**SETTINGS["kvcompress"], "usage": True}}]
    asked += [[(method, new, asks(method, new)) for method, new in rounds], PROMPTS]
    paths = [tmp_path, Path(__file__).parent, Path(engines.__file__).parent]
    more = os.environ.get("PYTHONPATH")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, paths), more])),
            "VLLM_LOGGING_LEVEL": "INFO",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [x for x in done.stdout.splitlines() if x.startswith("ANSWERS ")]
    for (method, new), line in zip(rounds, lines, strict=True):
        answers, kept = json.loads(line.removeprefix("ANSWERS "))
        assert answers[ALIKE] == on_one[method, new][ALIKE]
        ahead = kept[0].get("lookahead", 0)
        assert ahead == (12 if new == LONG else 0)
        assert kept[0]["layer_tokens"] == [128 + ahead] * 4
    log = done.stdout + done.stderr
    assert "Using V2 Model Runner" in log
    assert "CompressingAsyncScheduler" in log


# -- what is refused ------------------------------------------------------------------------------


def test_stages_that_cannot_be(model, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"divisor of 4, got 3 with \[1, 2, 1\]"):
        configure(model, pipeline_parallel_size=3, distributed_executor_backend="mp")
    with pytest.raises(
        ConfigError, match="stages of models with sliding windows or states are not tested"
    ):
        configure(
            make("gpt-oss", tmp_path), pipeline_parallel_size=2, distributed_executor_backend="mp"
        )
    configure(model, pipeline_parallel_size=4, distributed_executor_backend="mp")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    uneven = r"unset VLLM_PP_LAYER_PARTITION, got 2 with \[3, 1\]"
    with pytest.raises(ConfigError, match=uneven):
        configure(model, pipeline_parallel_size=2, distributed_executor_backend="mp")
