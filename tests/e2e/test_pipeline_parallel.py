"""Two pipeline stages each pack their own layers into the same blocks; the last one reports.

vLLM's V1 runner allocates the buffer for the previous stage's output while it captures CUDA graphs.
A CPU captures none, so unmodified vLLM crashes there; `BUFFERS` allocates the buffer.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import engines
import rank_engines
import test_early_compression as early_compression
from checkpoints import make, tokens
from configuring import configure
from engines import Engine, allow_async_scheduling, engine, settings, with_states
from forked_workers import SLEEP_SITE, workers_with
from kvcompress_kernels.packed_attention.cpu import compile_for
from rank_engines import RankResults, run_script
from server_metrics import wait_for
from site_patches import patch_on_import, write_site
from vllm_kvcompress.commands.plan.command import make_plan
from vllm_kvcompress.commands.plan.options import PlanOptions
from vllm_kvcompress.engine.device_memory import device_bytes
from vllm_kvcompress.engine.messages.settings import active_settings
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.method import round_to_pages
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.methods.published.pyramidkv import Pyramid
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
BUFFERS = patch_on_import("vllm.v1.worker.cpu_worker", f"exec({_BUFFERS!r}, {{'module': module}})")
FAILING = "streamingllm"  # the method of the last round, which ends the engine
# vLLM reads results only from the last stage, so an error in an earlier stage must end the engine.
FIRST_FAILS = patch_on_import(
    "vllm_kvcompress.engine.compression.packer",
    "run = module.Packer.run; module.Packer.run = lambda self, jobs: ("
    f"any(job.pack_request.settings.compress == {FAILING!r} for job in jobs)"
    " and module.torch.distributed.get_rank() == 0 and module.torch.empty(2**60),"
    " run(self, jobs))[1]",
)
# Full blocks and a budget in tokens: what a layer keeps does not depend on the number of layers.
# For the last prompt it does, because each stage rounds its budget separately.
LENGTHS = (320, 704, 90, 417)
COMPARABLE = slice(3)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
LONG = 110  # output tokens of requests whose output is compressed as well
SETTINGS = settings(
    "snapkv",
    128,
    log_requests=True,
    allow_override=f"off,tova,h2o,pyramidkv,cake,d2o,{FAILING}",
    decode_budget=128,
    decode_interval=32,
    max_whole=512,  # the longest prompt is prefilled in pieces
    piece=256,
    lookahead=12,  # requests with short outputs set it to 0
)
ROUNDS = [
    *[(method, 12) for method in ("snapkv", "tova", "h2o", "off", "pyramidkv", "cake")],
    ("snapkv", LONG),
    ("d2o", LONG),
]


def extra_args(method: str, new: int) -> dict[str, Any]:
    return rank_engines.extra_args(method, new, LONG)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("llama-gqa", tmp_path_factory.mktemp("stages"))


Reports = list[dict[str, Any] | None]


@contextmanager
def ranks(
    model: str,
    stages: int,
    tensor_parallel_size: int,
    config: dict[str, Any] = SETTINGS,
    **engine_options: Any,
) -> Iterator[Engine]:
    """Run an engine in this process; its ``stages * tensor_parallel_size`` ranks are processes."""
    options = dict(
        pipeline_parallel_size=stages, tensor_parallel_size=tensor_parallel_size, blocks=129
    )
    usage = {"kvcompress": {**config["kvcompress"], "usage": True}}
    with pytest.MonkeyPatch.context() as patch:
        allow_async_scheduling(patch)
        with engine(
            model, additional_config=usage, max_model_len=2048,
            distributed_executor_backend="mp", **options, **engine_options,
        ) as llm:  # fmt: skip
            yield llm


def outputs_and_reports(llm: Engine, method: str, new: int) -> tuple[list[list[int]], Reports]:
    """Return each prompt's output tokens and compression report; all blocks must return."""
    free = llm.free_blocks
    results = llm.outputs(PROMPTS, new, extra_args=extra_args(method, new))
    assert llm.free_blocks == free, method
    outputs = [list(output.outputs[0].token_ids) for output in results]
    return outputs, json.loads(json.dumps([getattr(x, "kv_compress", None) for x in results]))


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Return the log of all ranks; the first stage fails to pack prompts of method `FAILING`."""
    with workers_with(tmp_path_factory.mktemp("ranks"), BUFFERS + FIRST_FAILS) as log:
        yield log


@pytest.fixture(scope="module")
def on_two(model, log):
    """Run all rounds on two stages, of which the first one fails to pack the last round."""
    with ranks(model, 2, 1) as llm:
        outputs = {(method, new): outputs_and_reports(llm, method, new) for method, new in ROUNDS}
        rounds_end = len(log.read_text())
        stages = [worker.proc for worker in llm.core.model_executor.workers]
        assert all(stage.is_alive() for stage in stages)
        with pytest.raises(Exception):  # noqa: B017, PT011
            outputs_and_reports(llm, FAILING, 12)
        wait_for(lambda: not any(stage.is_alive() for stage in stages))
    full_log = log.read_text()
    return RankResults(outputs, full_log[:rounds_end], full_log[rounds_end:])


@pytest.fixture(scope="module")
def on_one(model):
    """Return the output tokens of one rank with all layers, by round."""
    with engine(model, additional_config=SETTINGS, max_model_len=2048) as llm:
        return {
            (method, new): llm.generate(PROMPTS, new, extra_args=extra_args(method, new))
            for method, new in ROUNDS
        }


COMPARED_METHODS = ["snapkv", "tova", "h2o", "off"]


@pytest.mark.parametrize("method", COMPARED_METHODS)
def test_two_stages_match_one_rank(method, on_two, on_one):
    """Layers choose independently, so their stage makes no difference."""
    compared = slice(None) if method == "off" else COMPARABLE
    assert on_two.outputs[method, 12][0][compared] == on_one[method, 12][compared]


def test_two_stages_with_a_decode_budget_match_one_rank(on_two, on_one):
    assert on_two.outputs["snapkv", LONG][0][COMPARABLE] == on_one["snapkv", LONG][COMPARABLE]


def test_the_last_stage_reports_the_layers_of_both(on_two):
    """The report lists the model's layers in order; each stage allocates a budget to its layers."""
    outputs, log = on_two.outputs, on_two.log
    _, reports = outputs["snapkv", 12]
    budget_spec = CompressionConfig.parse(SETTINGS["kvcompress"]).budget_spec(2, LENGTHS[-1])
    # the budget is 7 pages; 4 blocks hold 8 pages on each stage
    assert page_plan(budget_spec, 32).pages == 4 + 4
    rounded = [4 * 32 + 1] * 4
    layer_tokens = [report and report["layer_tokens"] for report in reports]
    assert layer_tokens == [[128] * 4, [128] * 4, None, rounded]
    _, reports = outputs["pyramidkv", 12]
    pyramid = CompressionConfig.parse({**SETTINGS["kvcompress"], "compress": "pyramidkv"})
    plan = page_plan(pyramid.budget_spec(2, LENGTHS[0]), 32)
    stage_tokens = (
        round_to_pages(Pyramid().allocate(plan.budget_spec, None) + plan.window, plan) * 32
    )
    assert reports[0]["layer_tokens"] == [*stage_tokens.tolist()] * 2
    assert stage_tokens[0] > stage_tokens[1]
    _, reports = outputs["cake", 12]
    for report in reports[:2]:
        assert sum(report["layer_tokens"][:2]) == sum(report["layer_tokens"][2:]) == 256
    lines = [line for line in log.splitlines() if "kv-compress: request=" in line]
    # the last stage logs one line for each compressed prompt
    assert len(lines) == 3 * 7
    assert all("PP1" in line for line in lines)


def test_plan_counts_a_stages_layers(model, on_two):
    """The plan counts blocks that all stages share, and bytes of one stage."""
    config_dict = {
        **SETTINGS["kvcompress"],
        "lookahead": 0,
    }  # as requests with short outputs set it
    options = dict(compress_config=json.dumps(config_dict), length=LENGTHS[0], output=12,
                   block_size=32, dtype="float32", ranks=1, longest=2048, requests=64, device="cpu",
                   model=model)  # fmt: skip
    forecast = make_plan(PlanOptions(**options, stages=2)).forecast
    assert (
        f"blocks_after={forecast.on.decoding} layer_tokens={[128] * 4}".replace(", ", ",")
        in on_two.log
    )
    assert forecast.kept_tokens == 128
    assert 2 * forecast.block_bytes == make_plan(PlanOptions(**options)).forecast.block_bytes
    config = configure(
        model, pipeline_parallel_size=2, distributed_executor_backend="mp", dtype="float32",
        max_model_len=2048, block_size=32, max_num_seqs=64,
        additional_config={"kvcompress": config_dict},
    )  # fmt: skip
    extra = device_bytes(config, active_settings(config.additional_config))
    assert forecast.extra_bytes == extra < make_plan(PlanOptions(**options)).forecast.extra_bytes
    for stages in (3, 8):
        with pytest.raises(ConfigError, match=f"must divide the model's 4 layers.*got {stages}"):
            make_plan(PlanOptions(**options, stages=stages))


def test_methods_with_budgets_per_stage_keep_the_first_token(on_two, on_one):
    for method in ("pyramidkv", "cake"):
        two_stages, one_rank = on_two.outputs[method, 12][0], on_one[method, 12]
        # the second prompt is prefilled in pieces: its last chunk reads the compressed first piece
        assert two_stages[0][0] == one_rank[0][0]
        assert two_stages[2] == one_rank[2]


@pytest.mark.usefixtures("log")
def test_two_stages_of_two_ranks_match_one_rank(model, on_one):
    with ranks(model, 2, 2) as llm:
        for method, new in (("snapkv", 12), ("snapkv", LONG)):
            outputs, reports = outputs_and_reports(llm, method, new)
            assert outputs[COMPARABLE] == on_one[method, new][COMPARABLE]
            assert reports[0]["layer_tokens"] == [128] * 4


@pytest.mark.usefixtures("log")
def test_sliding_windows_and_sinks_on_two_ranks_match_one_rank(tmp_path_factory):
    """One stage of two ranks: each has the sinks of its heads; both layer groups share a pool."""
    model = make("gpt-oss", tmp_path_factory.mktemp("windows"))
    rounds = [("snapkv", 12), ("h2o", 12), ("off", 12), ("snapkv", LONG)]
    with engine(model, additional_config=SETTINGS, max_model_len=2048) as llm:
        expected = [
            llm.generate(PROMPTS, new, extra_args=extra_args(method, new)) for method, new in rounds
        ]
    with ranks(model, 1, 2) as llm:
        assert [outputs_and_reports(llm, *round_)[0] for round_ in rounds] == expected


@with_states
@pytest.mark.usefixtures("log")
def test_state_space_layers_on_two_ranks_match_one_rank(tmp_path_factory):
    """Each rank has the states of its heads, in pages of the size of its keys and values."""
    model = make("granite", tmp_path_factory.mktemp("states"))
    config = {"kvcompress": {**SETTINGS["kvcompress"], "probe": 0}}
    rounds = [("off", 12), ("snapkv", LONG)]
    options = {"enable_prefix_caching": False}
    with engine(model, additional_config=config, max_model_len=2048, **options) as llm:
        expected = [
            llm.generate(PROMPTS, new, extra_args=extra_args(method, new)) for method, new in rounds
        ]
    with ranks(model, 1, 2, config, **options) as llm:
        assert [outputs_and_reports(llm, *round_)[0] for round_ in rounds] == expected


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize(("kind_name", "seeds"), [("sync", (6, 8)), ("packed", (6,))])
def test_lookaheads_are_compressed_before_a_request_is_preempted(
    kind_name, seeds, tmp_path_factory
):
    """This includes a request admitted while a look-ahead's step is in flight, as in seed 6."""
    kind = early_compression.KINDS[kind_name]
    model = make(kind.model, tmp_path_factory.mktemp("early_compression"))
    options = dict(pipeline_parallel_size=2, max_num_seqs=16, max_num_batched_tokens=256)
    with pytest.MonkeyPatch.context() as patch:
        allow_async_scheduling(patch)
        with engine(
            model, additional_config=early_compression.pressure_config(**kind.more),
            blocks=1 + kind.pool, max_model_len=512,
            distributed_executor_backend="mp", **options,
        ) as llm:  # fmt: skip
            watch = early_compression.PressureWatch(llm)
            for seed in seeds:
                outputs = early_compression.run_load(llm, kind, seed)
                assert len(outputs) == len(list(early_compression.load_requests(seed)))
    assert watch.preempted, "no request was preempted: the pool is too large"
    assert watch.early_targets, "no prompt was compressed early: the pool is too large"
    assert not watch.not_compressed


def test_a_stage_that_cannot_pack_ends_the_engine(on_two):
    """The scheduler has freed the blocks and the last stage saw no error, so the rank must exit."""
    assert "this rank failed to compress a request" in on_two.failure


# -- Model Runner V2 -------------------------------------------------------------------------------

BEFORE = """
import pytest
from engines import allow_async_scheduling, prepare_model_runner
prepare_model_runner()
if __name__ == "__main__":
    allow_async_scheduling(pytest.MonkeyPatch())
"""


def test_two_stages_on_model_runner_v2_match_one_rank(model, on_one, tmp_path):
    """Model Runner V2 runs in Triton's interpreter, with async scheduling."""
    rounds = [("h2o", 12), ("snapkv", LONG)]
    write_site(tmp_path, SLEEP_SITE)
    options = {
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "async_scheduling": True,
        "additional_config": {"kvcompress": {**SETTINGS["kvcompress"], "usage": True}},
    }
    paths = [tmp_path, Path(__file__).parent, Path(engines.__file__).parent]
    python_path = os.pathsep.join(filter(None, [*map(str, paths), os.environ.get("PYTHONPATH")]))
    result = run_script(
        tmp_path, model, options, [(*each, extra_args(*each)) for each in rounds], PROMPTS,
        BEFORE, VLLM_USE_V2_MODEL_RUNNER="1", PYTHONPATH=python_path,
    )  # fmt: skip
    assert result.status == 0, result.log[-3000:]
    for (method, new), (outputs, reports) in zip(rounds, result.rounds, strict=True):
        assert outputs[COMPARABLE] == on_one[method, new][COMPARABLE]
        lookahead = reports[0].get("lookahead", 0)
        assert lookahead == (12 if new == LONG else 0)
        assert reports[0]["layer_tokens"] == [128] * 4
    assert "Using V2 Model Runner" in result.log
    assert "CompressingAsyncScheduler" in result.log


# -- refused configurations ------------------------------------------------------------------------


def test_unsupported_stages_are_refused(model, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"divisor of 4, got 3 with \[1, 2, 1\]"):
        configure(model, pipeline_parallel_size=3, distributed_executor_backend="mp")
    with pytest.raises(
        ConfigError, match="--pipeline-parallel-size and layers with a sliding window were not"
    ):
        configure(
            make("gpt-oss", tmp_path), pipeline_parallel_size=2, distributed_executor_backend="mp"
        )
    configure(model, pipeline_parallel_size=4, distributed_executor_backend="mp")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    uneven = r"unset VLLM_PP_LAYER_PARTITION, got 2 with \[3, 1\]"
    with pytest.raises(ConfigError, match=uneven):
        configure(model, pipeline_parallel_size=2, distributed_executor_backend="mp")


@pytest.mark.usefixtures("log")
def test_stages_read_the_packed_pages_of_an_earlier_turn(tmp_path):
    """With --kv-reuse; a request with a salt of its own finds nothing and has the same output."""
    from vllm import SamplingParams

    config = settings("cake", 1.0, packed_dtype="k4v3", reuse="grid")
    model, first = make("llama-two-layers-d64", tmp_path), tokens(900, seed=7)
    compile_for(64, torch.float32, torch.float32)  # once, and not in each rank
    with ranks(model, 2, 1, config) as llm:
        free = llm.free_blocks
        (turn,) = llm.outputs([first], 40)
        prompt = first + list(turn.outputs[0].token_ids) + tokens(70, seed=8)
        (warm,) = llm.outputs([prompt], 20)
        inputs = {"prompt_token_ids": prompt, "cache_salt": "cold"}
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        (cold,) = llm.llm.generate([inputs], params, use_tqdm=False)
        assert (warm.num_cached_tokens, cold.num_cached_tokens) == (928, 0)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
