"""Two ranks each pack their own heads and keep the same number of pages and blocks.

The ranks are two processes on one machine, or two Ray actors on two Ray nodes.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rank_engines
import test_offloading as offloading
import test_reuse as reuse
from added_methods import installed, write_package
from benchmarks import late_offloading
from checkpoints import make, tokens
from engines import Engine, engine, settings
from forked_workers import SLEEP_SITE, sleeping, workers_with
from local_ray import DEVICE, local_ray
from rank_engines import RankResults, ScriptResult, run_script
from server_metrics import wait_for
from site_patches import patch_on_import
from vllm_kvcompress.errors import VllmHookError
from vllm_kvcompress.serving.process import compressed_requests

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = (300, 700, 90)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
METHODS = ("snapkv", "cake")
ADDED = "evens"  # the preset of another package
ROUNDS = [(method, 12) for method in METHODS]
FAILING = "tova"  # the method of the last round, which ends the engine
LONG = 150  # output tokens of requests whose output is compressed as well
SETTINGS = settings(
    "snapkv",
    0.2,
    log_requests=True,
    allow_override=f"off,cake,{FAILING}",
    decode_budget=96,
    decode_interval=32,
    max_whole=512,  # the longest prompt is prefilled in pieces
    piece=256,
    lookahead=12,  # requests with short outputs set it to 0
)


def extra_args(method: str, new: int) -> dict[str, Any]:
    return rank_engines.extra_args(method, new, LONG)


# vLLM reads results only from the first rank, so an error on the second one must end the engine.
# CANNOT_PACK, which also reaches Ray actors, names the method whose prompts fail to pack: at the
# end of prefill, or with the suffix " ahead" after the look-ahead.
SECOND_FAILS = patch_on_import(
    "vllm_kvcompress.engine.compression.packer",
    "run = module.Packer.run; module.Packer.run = lambda self, jobs: ("
    "any(x.pack_request.settings.compress + ' ahead' * (x.pack_request.output_tokens is not None)"
    " == __import__('os').environ.get('CANNOT_PACK') for x in jobs)"
    " and module.torch.distributed.get_rank() == 1 and module.torch.empty(2**60),"
    " run(self, jobs))[1]",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("llama-gqa", tmp_path_factory.mktemp("ranks"))


def with_added_method() -> dict[str, Any]:
    """Return `SETTINGS`, with which requests may choose `ADDED` as well."""
    values = SETTINGS["kvcompress"]
    return {"kvcompress": {**values, "allow_override": f"{values['allow_override']},{ADDED}"}}


@contextmanager
def two_rank_engine(
    model: str, executor: str, config: dict[str, Any] = SETTINGS
) -> Iterator[Engine]:
    """Run an engine in this process with two ranks in other processes."""
    options = dict(tensor_parallel_size=2, distributed_executor_backend=executor, blocks=129)
    with engine(model, additional_config=config, max_model_len=2048, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def on_two(model, tmp_path_factory):
    """Run all rounds on two ranks, of which the second one fails to pack the last round.

    The failure happens after a look-ahead.
    """
    folder = write_package(tmp_path_factory.mktemp("two"))
    with (
        installed(folder),
        workers_with(folder, SECOND_FAILS, CANNOT_PACK=f"{FAILING} ahead") as log,
        two_rank_engine(model, "mp", with_added_method()) as llm,
    ):
        rounds = {method: (method, new) for method, new in [*ROUNDS, (ADDED, 12)]}
        rounds["long"] = ("snapkv", LONG)
        outputs = {
            name: llm.generate(PROMPTS, new, extra_args=extra_args(method, new))
            for name, (method, new) in rounds.items()
        }
        rounds_end = len(log.read_text())
        ranks = [worker.proc for worker in llm.core.model_executor.workers]
        assert all(rank.is_alive() for rank in ranks)
        with pytest.raises(Exception) as failure:  # noqa: PT011
            llm.generate(PROMPTS, LONG, extra_args=extra_args(FAILING, LONG))
        wait_for(lambda: not any(rank.is_alive() for rank in ranks))
    full_log = log.read_text()
    failure = f"{full_log[rounds_end:]}{failure.value}"
    return RankResults(outputs, full_log[:rounds_end], failure)


@pytest.fixture(scope="module")
def on_one(model, tmp_path_factory):
    """Return the output tokens of one rank in this process, by method, ``off`` and ``long``."""
    with (
        installed(write_package(tmp_path_factory.mktemp("one"))),
        engine(model, additional_config=with_added_method(), max_model_len=2048) as llm,
    ):
        outputs = {
            method: llm.generate(PROMPTS, 12, extra_args=extra_args(method, 12))
            for method in (*METHODS, ADDED, "off")
        }
        repacked = llm.watch_repacking()
        outputs["long"] = llm.generate(PROMPTS, LONG)
        assert len(repacked) >= 3 * len(PROMPTS)
        return outputs


def test_two_ranks_match_one_rank(on_two, on_one):
    """SnapKV chooses per KV head, so a head's rank makes no difference."""
    assert on_two.outputs["snapkv"] == on_one["snapkv"]


def test_both_ranks_load_the_method_of_another_package(on_two, on_one):
    """Each rank scores with it in its own process, and the outputs are those of one rank."""
    processes = set(re.findall(r"evens scores in process (\d+)", on_two.log))
    assert len(processes - {str(os.getpid())}) == 2
    assert on_two.outputs[ADDED] == on_one[ADDED]
    assert on_one[ADDED] != on_one["off"]


def test_two_ranks_with_a_decode_budget_match_one_rank(on_two, on_one):
    """Each rank compresses the outputs of its own heads to the same number of pages."""
    assert on_two.outputs["long"] == on_one["long"]


def test_trap_15_cake_on_two_ranks_keeps_the_first_token_and_equal_block_counts(on_two, on_one):
    """CAKE derives layer budgets from each rank's own heads, so later tokens may differ.

    The scheduler's counts may not differ: all ranks keep the same number of pages and blocks.
    """
    outputs, uncompressed = on_two.outputs, on_one["off"]
    # a prompt in pieces reads compressed pieces even before its first output token
    in_one_piece = [index for index, length in enumerate(LENGTHS) if length <= 512]
    assert [outputs["cake"][i][0] for i in in_one_piece] == [
        uncompressed[i][0] for i in in_one_piece
    ]
    assert outputs["cake"][2] == uncompressed[2]
    line = r"request=(\S+) prompt_tokens=(\d+) kept_tokens=(\S+) .*blocks_after=(\d+)"
    reports = Counter(re.findall(line, on_two.log))
    compressed_lengths = [length for length in LENGTHS if length >= 128]
    assert sorted(int(tokens) for _, tokens, *_ in reports) == sorted(
        compressed_lengths * (len({*METHODS, ADDED}) + 1)
    )
    assert set(reports.values()) == {2}, reports  # both ranks report the same
    lines = compressed_requests(on_two.log)
    assert {line.lookahead for line in lines} == {0, 12}
    for line in lines:
        mean = sum(line.layer_tokens) / len(line.layer_tokens)
        assert line.kept_tokens == pytest.approx(mean, abs=0.05)


def test_a_rank_that_fails_to_pack_ends_the_engine(on_two):
    """A rank that fails to pack exits, and the other rank and the engine exit with it.

    Otherwise its layers would read pages that were never packed. The round returns no output; the
    tests above check the earlier rounds.
    """
    assert_engine_ended_with_the_rank(on_two.failure)


def assert_engine_ended_with_the_rank(log: str) -> None:
    assert "this rank failed to compress a request" in log
    # The engine must notice the exit instead of timing out after 300 s. The message depends on what
    # notices first: the process monitor, the shared memory or a socket.
    assert "timed out" not in log


LATE_COPIES = patch_on_import(
    "vllm.v1.kv_offload.factory",
    "module.OffloadingSpecFactory._registry['CPUOffloadingSpec'] = lambda:"
    " __import__('benchmarks.late_offloading').late_offloading.LateSpec",
) + patch_on_import(
    "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector",
    "module.SimpleCPUOffloadWorker ="
    " __import__('benchmarks.late_offloading').late_offloading.LateSimpleWorker",
)


def test_two_ranks_store_and_load_prompts(model, tmp_path, monkeypatch):
    """In a small pool, each rank stores its own heads whole, before it packs them.

    With `OffloadingConnector` and `SimpleCPUOffloadConnector`.
    """
    late_offloading.install(monkeypatch, seed=0)
    options = {"blocks": offloading.SMALL, "additional_config": offloading.SNAPKV}
    prompts, options = offloading.PROMPTS[:8], options | offloading.OPTIONS
    with engine(model, **options) as llm:
        expected = llm.generate(prompts, 24)
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with workers_with(tmp_path, LATE_COPIES):
        for connector in (late_offloading.transfer(), offloading.lazy()):
            with engine(model, **options, **two, **connector) as llm:
                assert llm.generate(prompts, 24) == expected
                offloading.finish(llm)
                assert llm.llm.reset_prefix_cache()
                assert llm.generate(prompts, 24) == expected
                assert offloading.metric(llm, offloading.HITS) > 32 * 60


# -- Ray actors ------------------------------------------------------------------------------------


def start(model: str, rounds: Sequence[tuple[str, int]], **environment: str) -> ScriptResult:
    """Run an engine with two Ray actors in a new process."""
    options = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "ray",
        "additional_config": SETTINGS,
    }
    with_args = [(*each, extra_args(*each)) for each in rounds]
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    return run_script(Path(model).parent, model, options, with_args, PROMPTS, **environment)


@pytest.fixture(scope="module")
def package_missing(tmp_path_factory):
    """Return a path: while the file exists, new processes of the second node lack this package."""
    return tmp_path_factory.mktemp("nodes") / "gone"


@pytest.fixture(scope="module")
def two_nodes(package_missing):
    hide_package = f"import os, sys\nif os.path.exists({str(package_missing)!r}):\n"
    hide_package += "    sys.modules['vllm_kvcompress'] = None\n"
    tests_path = f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n"
    site = tests_path + SLEEP_SITE + SECOND_FAILS
    with local_ray([site, site + hide_package]) as environment:
        yield environment


def test_an_actor_that_fails_to_pack_ends_the_engine(model, two_nodes, on_two):
    """The engine runs in a separate process, as deployed; the earlier round's outputs are right.

    This test must precede those that use `on_ray`, whose actors hold both devices.
    """
    result = start(model, ROUNDS, **two_nodes, CANNOT_PACK="cake")
    assert result.status != 0
    assert_engine_ended_with_the_rank(result.log)
    assert [outputs for outputs, _ in result.rounds] == [on_two.outputs["snapkv"]]


def test_a_node_without_this_package_stops_the_engine_at_startup(model, two_nodes, package_missing):
    """This test must precede those that use `on_ray`, whose actors hold both devices."""
    package_missing.touch()
    result = start(model, ROUNDS[:1], **two_nodes)
    package_missing.unlink()
    assert result.status != 0
    assert not result.rounds
    assert "ModuleNotFoundError: import of vllm_kvcompress halted" in result.log


@pytest.fixture(scope="module")
def on_ray(model, two_nodes):
    """Run an engine in this process whose two workers are Ray actors, one on each node."""
    import ray
    from vllm.platforms.cpu import CpuPlatform

    with pytest.MonkeyPatch.context() as patch:
        for name in two_nodes.keys() & {"RAY_ADDRESS", "RAY_TMPDIR"}:
            patch.setenv(name, two_nodes[name])
        patch.setattr(CpuPlatform, "ray_device_key", DEVICE)
        try:
            with sleeping(), two_rank_engine(model, "ray") as llm:
                yield llm
        finally:
            ray.shutdown()


def on_each_worker(llm, function):
    """Return ``function(worker)`` for each rank's worker, evaluated in its actor."""
    return llm.core.model_executor.collective_rpc(lambda wrapper: function(wrapper.worker))


def step_to_the_end(llm, outputs):
    while llm.llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm.llm_engine.step()


def test_each_rank_is_an_actor_on_a_different_node(on_ray):
    executor = on_ray.core.model_executor
    assert type(executor).__name__ == "RayExecutorV2"
    assert len({handle.node_id for handle in executor.ray_worker_handles}) == 2
    names = on_each_worker(on_ray, lambda worker: type(worker).__name__)
    assert names == ["CompressingCPUWorker"] * 2
    numbers = on_each_worker(on_ray, lambda _: __import__("os").getpid())
    assert len({*numbers, os.getpid()}) == 3


def test_actors_match_processes(on_ray, on_two):
    """CAKE matches too, because each rank has the same heads."""
    outputs = {
        method: on_ray.generate(PROMPTS, 12, extra_args=extra_args(method, 12))
        for method in METHODS
    }
    assert outputs == {method: on_two.outputs[method] for method in METHODS}
    assert outputs["snapkv"] != outputs["cake"]


def test_actors_acknowledge_all_plans_and_all_blocks_return(on_ray, on_two):
    """Actors acknowledge all plans while they compress outputs, and match processes."""
    scheduler, free = on_ray.scheduler, on_ray.free_blocks
    plans_and_acknowledgements, reported, used_blocks, update = (
        [],
        [],
        [],
        scheduler.update_from_output,
    )

    def updating(scheduler_output, output):
        plan, report = scheduler_output.kvcompress, getattr(output, "kvcompress", None)
        plans_and_acknowledgements.append((plan, report and report.executed_plan))
        reported.extend(report.packed if report else ())
        used_blocks.append(free - on_ray.free_blocks)
        return update(scheduler_output, output)

    before = on_each_worker(on_ray, lambda worker: worker.compressor.compressed)
    scheduler.update_from_output = updating
    assert on_ray.generate(PROMPTS, LONG) == on_two.outputs["long"]
    scheduler.update_from_output = update
    after = on_each_worker(on_ray, lambda worker: worker.compressor.compressed)
    plans = [plan for plan, _ in plans_and_acknowledgements if plan is not None]
    assert (
        sum(any(not pack_request.prefill for pack_request in plan.pack) for plan in plans)
        >= LONG // 32
    )
    assert all(
        acknowledged == (plan and plan.number) for plan, acknowledged in plans_and_acknowledgements
    )
    assert not scheduler._steps_in_flight
    compressed_lengths = [length for length in LENGTHS if length >= 128]
    assert sorted(packed.tokens for packed in reported) == compressed_lengths
    assert [
        count_after - count_before for count_after, count_before in zip(after, before, strict=True)
    ] == [len(compressed_lengths)] * 2
    uncompressed_blocks = sum(-(-(length + LONG) // 32) for length in LENGTHS)
    assert 0 < max(used_blocks[-LONG // 2 :]) < uncompressed_blocks / 2
    assert on_ray.free_blocks == free


def test_an_executor_that_bypasses_the_workers_returns_no_output(on_ray):
    """An executor that calls the model runner directly, as Ray's older one does, fails the step.

    The engine stops, so this is the last test that uses it.
    """
    executor, outputs = on_ray.core.model_executor, []
    run = executor.collective_rpc

    def rpc(method, args=(), **how):
        if method in ("execute_model", "sample_tokens"):
            name = method
            return run(
                lambda w, *given: getattr(w.worker.model_runner, name)(*given), args=args, **how
            )
        return run(method, args=args, **how)

    executor.collective_rpc = rpc
    on_ray.submit("long", PROMPTS[0], 8)
    with pytest.raises(VllmHookError, match=r"\['long-.*'\], came back with no plan acknowledged"):
        step_to_the_end(on_ray, outputs)
    assert not outputs


def test_packed_groups_on_two_ranks_match_one_rank(tmp_path):
    """Each rank quantises its own heads, and with --kv-reuse adopts its pages of an earlier turn.

    Outputs are short: sums differ in their last bits between numbers of ranks, and a code that
    rounds differently changes later tokens.
    """
    model = make(reuse.MODEL, tmp_path)
    config = reuse.reuse_settings(allow_override="all")
    options = dict(additional_config=config, max_model_len=2048)
    evicting = {"kv_compress": "snapkv", "kv_budget": 0.5}
    prompts = [tokens(length, seed=length) for length in (700, 1300)]
    with engine(model, **options) as llm:
        expected = llm.generate(prompts, 12, extra_args=evicting)
        assert llm.compressor.compressed
    ranks = dict(tensor_parallel_size=2, distributed_executor_backend="mp", blocks=129)
    with workers_with(tmp_path), engine(model, **options, **ranks) as llm:
        assert llm.generate(prompts, 12, extra_args=evicting) == expected
        free = llm.free_blocks
        record = reuse.conversation(llm, 7, 3, 40)
        assert [cached > 0 for *_, cached in record] == [False, True, True]
        reuse.assert_equal_cold(llm, record)
        llm.finish_in_flight_steps()
        assert llm.free_blocks == free
