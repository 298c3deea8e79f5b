"""Two ranks: each packs its own heads, and both hold the same number of pages and blocks.

As two processes of one machine, and as two Ray actors on two nodes of a Ray.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from broken_sites import broken
from checkpoints import make, tokens
from engines import Engine, engine, settings
from forks import FORKS
from idling import wait_for
from local_ray import DEVICE, local_ray
from own_workers import workers_with
from vllm_kvcompress.errors import VllmHookError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = (300, 700, 90)
PROMPTS = [tokens(length, seed=length) for length in LENGTHS]
METHODS = ("snapkv", "cake")
ROUNDS = [(method, 12) for method in METHODS]
Done = subprocess.CompletedProcess[str]
FAILING = "tova"  # the method of the round that ends the engine, its last
LONG = 150  # tokens of an answer that is packed again as it grows
SETTINGS = settings(
    "snapkv",
    0.2,
    log_requests=True,
    allow_override=f"off,cake,{FAILING}",
    decode_budget=96,
    decode_interval=32,
    max_whole=512,  # the longest prompt goes in pieces
    piece=256,
    lookahead=12,  # of long answers: short ones ask for none
)


def asks(method: str, new: int) -> dict[str, Any]:
    """What a request for `new` tokens asks for."""
    ahead = {"kv_lookahead": 0} if new < LONG and method != "off" else {}
    return {"kv_compress": method, **ahead}


# What the second rank raises, nobody hears: vLLM asks the first one alone. It cannot pack where the
# engine's own environment says so, which reaches Ray's actors too: prompts of one method, at the
# end of their prefill, or after their look-ahead.
SECOND_FAILS = broken(
    "vllm_kvcompress.engine.compression.packer",
    "run = module.Packer.run; module.Packer.run = lambda self, jobs: ("
    "any(job.pack_request.settings.compress + ' ahead' * (job.pack_request.answered is not None)"
    " == __import__('os').environ.get('CANNOT_PACK') for job in jobs)"
    " and module.torch.distributed.get_rank() == 1 and module.torch.empty(2**60),"
    " run(self, jobs))[1]",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("llama-gqa", tmp_path_factory.mktemp("ranks"))


@contextmanager
def two(model: str, executor: str) -> Iterator[Engine]:
    """An engine in this process, whose two ranks are not."""
    options = dict(tensor_parallel_size=2, distributed_executor_backend=executor, blocks=129)
    with engine(model, additional_config=SETTINGS, max_model_len=2048, **options) as llm:
        yield llm


@dataclass(frozen=True, slots=True)
class Ranks:
    """What two ranks did.

    Args:
        answers: by method, and ``long``.
        log: what both said until the last answer.
        ended: what they said, and the engine raised, of the round that ends it.
    """

    answers: dict[str, list[list[int]]]
    log: str
    ended: str


@pytest.fixture(scope="module")
def on_two(model, tmp_path_factory):
    """One engine of two ranks, the second of which cannot pack the last round's prompts.

    It is told so while answers are to judge them.
    """
    folder = tmp_path_factory.mktemp("two")
    with (
        workers_with(folder, SECOND_FAILS, CANNOT_PACK=f"{FAILING} ahead") as log,
        two(model, "mp") as llm,
    ):
        rounds = {method: (method, new) for method, new in ROUNDS} | {"long": ("snapkv", LONG)}
        answers = {
            name: llm.generate(PROMPTS, new, extra_args=asks(method, new))
            for name, (method, new) in rounds.items()
        }
        until = len(log.read_text())
        ranks = [worker.proc for worker in llm.core.model_executor.workers]
        assert all(rank.is_alive() for rank in ranks)
        with pytest.raises(Exception) as ended:  # noqa: PT011
            llm.generate(PROMPTS, LONG, extra_args=asks(FAILING, LONG))
        wait_for(lambda: not any(rank.is_alive() for rank in ranks))
    said = log.read_text()
    return Ranks(answers, said[:until], f"{said[until:]}{ended.value}")


@pytest.fixture(scope="module")
def on_one(model):
    """By method, and uncompressed as ``off``, the answers of one rank, in this process."""
    with engine(model, additional_config=SETTINGS, max_model_len=2048) as llm:
        answers = {
            method: llm.generate(PROMPTS, 12, extra_args=asks(method, 12))
            for method in (*METHODS, "off")
        }
        again = llm.watch_repacking()
        answers["long"] = llm.generate(PROMPTS, LONG)
        assert len(again) >= 3 * len(PROMPTS)
        return answers


def test_two_ranks_answer_as_one(on_two, on_one):
    """SnapKV chooses per KV head: which rank a head is on makes no difference."""
    assert on_two.answers["snapkv"] == on_one["snapkv"]


def test_two_ranks_pack_an_answer_again_as_one(on_two, on_one):
    """Each its own heads, to the same number of pages: the whole answers are the same."""
    assert on_two.answers["long"] == on_one["long"]


def test_trap_15_cake_on_two_ranks_keeps_the_first_token_and_as_many_blocks(on_two, on_one):
    """CAKE's layer budgets come from each rank's own heads, so later tokens may differ.

    What the scheduler counts may not: every rank keeps as many pages and blocks.
    """
    answers, whole = on_two.answers, on_one["off"]
    # what goes in pieces reads what earlier ones kept, already before its first token
    stand = [index for index, length in enumerate(LENGTHS) if length <= 512]
    assert [answers["cake"][i][0] for i in stand] == [whole[i][0] for i in stand]
    assert answers["cake"][2] == whole[2]
    line = r"request=(\S+) prompt_tokens=(\d+) kept_tokens=(\S+) .*blocks_after=(\d+)"
    kept = Counter(re.findall(line, on_two.log))
    long = [length for length in LENGTHS if length >= 128]
    assert sorted(int(tokens) for _, tokens, *_ in kept) == sorted(long * (len(METHODS) + 1))
    assert set(kept.values()) == {2}, kept  # both ranks say the same


def test_a_rank_that_could_not_pack_is_not_believed_by_the_others(on_two):
    """Its layers would read what was never packed: it ends, and with it the other and the engine.

    Nothing of that round is delivered, and what came before is right (the tests above).
    """
    ended_with_the_rank(on_two.ended)


def ended_with_the_rank(said: str) -> None:
    assert "a rank that could not compress a prompt must not go on" in said
    # The engine did not wait 300 s for the rank and then say that its call timed out. What it says
    # instead is whatever notices first: its monitor of the processes, shared memory, or a socket.
    assert "timed out" not in said


# -- as Ray's actors -------------------------------------------------------------------------------


# The engine is a fork of it.
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, settings, rounds, prompts = json.loads(sys.argv[1])
    llm = LLM(
        model, tensor_parallel_size=2, skip_tokenizer_init=True, enforce_eager=True,
        dtype="float32", max_model_len=2048, block_size=32, additional_config=settings,
        num_gpu_blocks_override=129, distributed_executor_backend="ray",
    )
    for method, tokens, asks in rounds:
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=asks
        )
        inputs = [{"prompt_token_ids": p} for p in prompts]
        done = llm.generate(inputs, params, use_tqdm=False)
        print("ANSWERS", json.dumps([list(o.outputs[0].token_ids) for o in done]), flush=True)
"""


def start(model: str, rounds: Sequence[tuple[str, int]], **environment: str) -> Done:
    """Run the script: one engine of two actors, and in a process of its own."""
    script = Path(model).with_name("script.py")
    script.write_text(FORKS + SCRIPT)
    asked = [(method, new, asks(method, new)) for method, new in rounds]
    return subprocess.run(
        [sys.executable, str(script), json.dumps([model, SETTINGS, asked, PROMPTS])],
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


def answers(done: Done) -> list[list[list[int]]]:
    """What was answered, round by round."""
    lines = [x for x in done.stdout.splitlines() if x.startswith("ANSWERS ")]
    return [json.loads(line.removeprefix("ANSWERS ")) for line in lines]


@pytest.fixture(scope="module")
def gone(tmp_path_factory):
    """As long as this file is there, the second node's new processes are without this package."""
    return tmp_path_factory.mktemp("nodes") / "gone"


@pytest.fixture(scope="module")
def two_nodes(gone):
    without = f"import os, sys\nif os.path.exists({str(gone)!r}):\n"
    without += "    sys.modules['vllm_kvcompress'] = None\n"
    with local_ray([SECOND_FAILS, SECOND_FAILS + without]) as environment:
        yield environment


def test_an_actor_that_could_not_pack_is_not_believed_by_the_others(model, two_nodes, on_two):
    """As it is deployed, with the engine in a process of its own. What came before is right.

    It stands before the tests of `on_ray`, whose actors hold both devices.
    """
    done = start(model, ROUNDS, **two_nodes, CANNOT_PACK="cake")
    assert done.returncode != 0
    ended_with_the_rank(done.stdout + done.stderr)
    assert answers(done) == [on_two.answers["snapkv"]]


def test_a_node_without_this_package_is_told_before_anything_is_served(model, two_nodes, gone):
    """It stands before the tests of `on_ray` too."""
    gone.touch()
    done = start(model, ROUNDS[:1], **two_nodes)
    gone.unlink()
    assert done.returncode != 0
    assert not answers(done)
    log = done.stdout + done.stderr
    assert "ModuleNotFoundError: import of vllm_kvcompress halted" in log


@pytest.fixture(scope="module")
def on_ray(model, two_nodes):
    """An engine in this process, whose two workers are actors: one on each node."""
    import ray
    from vllm.platforms.cpu import CpuPlatform

    with pytest.MonkeyPatch.context() as patch:
        for name in two_nodes.keys() & {"RAY_ADDRESS", "RAY_TMPDIR"}:
            patch.setenv(name, two_nodes[name])
        patch.setattr(CpuPlatform, "ray_device_key", DEVICE)
        try:
            with two(model, "ray") as llm:
                yield llm
        finally:
            ray.shutdown()


def on_each(llm, look):
    """What `look` makes of each rank's worker, in its actor."""
    return llm.core.model_executor.collective_rpc(lambda wrapper: look(wrapper.worker))


def step_to_the_end(llm, seen):
    while llm.llm.llm_engine.has_unfinished_requests():
        seen += llm.llm.llm_engine.step()


def test_each_rank_is_an_actor_on_a_node_of_its_own(on_ray):
    executor = on_ray.core.model_executor
    assert type(executor).__name__ == "RayExecutorV2"
    assert len({handle.node_id for handle in executor.ray_worker_handles}) == 2
    names = on_each(on_ray, lambda worker: type(worker).__name__)
    assert names == ["CompressingCPUWorker"] * 2
    numbers = on_each(on_ray, lambda _: __import__("os").getpid())
    assert len({*numbers, os.getpid()}) == 3


def test_actors_answer_as_processes_do(on_ray, on_two):
    """CAKE's too: each rank has the same heads there as here."""
    given = {
        method: on_ray.generate(PROMPTS, 12, extra_args=asks(method, 12)) for method in METHODS
    }
    assert given == {method: on_two.answers[method] for method in METHODS}
    assert given["snapkv"] != given["cake"]


def test_actors_acknowledge_every_plan_and_every_block_returns(on_ray, on_two):
    """While they pack answers again as they grow, and answer as processes do."""
    scheduler, free = on_ray.scheduler, on_ray.free_blocks
    heard, reported, held, update = [], [], [], scheduler.update_from_output

    def updating(scheduler_output, output):
        plan, report = scheduler_output.kvcompress, getattr(output, "kvcompress", None)
        heard.append((plan, report and report.carried_out))
        reported.extend(report.packed if report else ())
        held.append(free - on_ray.free_blocks)
        return update(scheduler_output, output)

    before = on_each(on_ray, lambda worker: worker.compressor.compressed)
    scheduler.update_from_output = updating
    assert on_ray.generate(PROMPTS, LONG) == on_two.answers["long"]
    scheduler.update_from_output = update
    after = on_each(on_ray, lambda worker: worker.compressor.compressed)
    plans = [plan for plan, _ in heard if plan is not None]
    assert (
        sum(any(not pack_request.prefill for pack_request in plan.pack) for plan in plans)
        >= LONG // 32
    )
    assert all(told == (plan and plan.number) for plan, told in heard)
    assert not scheduler._handed_out
    long = [length for length in LENGTHS if length >= 128]
    assert sorted(packed.tokens for packed in reported) == long
    assert [now - then for now, then in zip(after, before, strict=True)] == [len(long)] * 2
    whole = sum(-(-(length + LONG) // 32) for length in LENGTHS)
    assert 0 < max(held[-LONG // 2 :]) < whole / 2
    assert on_ray.free_blocks == free


def test_an_executor_that_passes_the_actors_workers_by_delivers_nothing(on_ray):
    """The last test of this engine: it stops. As Ray's older executor does it, in the actors."""
    executor, seen = on_ray.core.model_executor, []
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
    with pytest.raises(VllmHookError, match=r"\['long-.*'\], came back with none acknowledged"):
        step_to_the_end(on_ray, seen)
    assert not seen
