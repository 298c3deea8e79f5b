"""What the GPU benchmark counts and judges, by hand: floors, goals, clocks, models."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import (
    correctness,
    kernels,
    machine,
    models,
    ops,
    prompt,
    report,
    serving,
    tokens,
    vllm_log,
)
from benchmarks.gpu.summary import failures, page, table

EIGHT_B = prompt.Shape(tokens=8192)
TINY = prompt.Shape(layers=2, tokens=90, heads=4, kv_heads=2, dim=8, window=4, budget=0.4)
CPU = torch.device("cpu")


def test_floors_by_hand():
    """Two layers of 8 KV heads of 128 bf16; 8192 tokens, of which 0.15 and 0.05 are kept."""
    shape = prompt.Shape(layers=2, tokens=8192)
    assert shape.counts == [1228 // 16, 409 // 16] == [76, 25]
    assert prompt.keys_once(shape) == 2 * 8192 * 8 * 128 * 2 == 32 << 20
    assert prompt.kept_twice(shape) == 2 * (76 + 25) * 65536
    assert prompt.scores_once(shape) == 2 * 8 * 8192 * 4
    assert prompt.tables_twice(shape) == 64 * (76 + 25) * (4 + 4)
    seen = sum(range(8192 - 2048 + 1, 8192 + 1))  # keys that the last 2048 rows see
    assert prompt.causal_product(shape) == 2 * 32 * 128 * 2 * seen
    pairs = 76 * 16 * (8192 - 76 * 16) + 25 * 16 * (8192 - 25 * 16)
    assert prompt.cosines(shape) == 8 * 128 * 2 * pairs
    assert shape.bytes == 65536 * (2 * 512 + 76 + 25)


def test_the_layers_keep_their_budget():
    assert len(EIGHT_B.counts) == 32
    assert sum(EIGHT_B.counts) * 16 == pytest.approx(32 * 0.1 * 8192, rel=0.02)


def test_every_op_has_a_floor_and_the_promised_goals():
    for op in ops.OPS:
        assert (op.floor_bytes(EIGHT_B) > 0) != (op.floor_flops(EIGHT_B) > 0), op.name
    goals = {op.name.split(",")[0]: op.goal for op in ops.OPS if op.goal}
    assert goals == {"window_scores": 0.8, "value_scores": 0.8, "move_kept": 0.8}


def test_launches_are_the_engines():
    """Of a prompt of a sixteenth of the longest, 16 layers share the launch of their scores."""
    launches = {op.name.split(",")[0]: len(op.launches(EIGHT_B)) for op in ops.OPS}
    assert launches == {
        "window_scores": 2,
        "value_scores": 32,
        "value_norms": 32,
        "key_cosines": 32,
        "lag_scores": 32,
        "column_sums": 32,
        "select": 1,
        "select_chunks": 1,
        "move_kept": 1,
        "merge_evicted": 32,
        "page_tables": 1,
    }
    uneven = replace(EIGHT_B, layers=5, tokens=60000)
    assert ops.OPS[0].launches(uneven) == [range(0, 2), range(2, 4), range(4, 5)]


def test_as_many_layers_as_the_memory_holds():
    assert kernels.fitting(EIGHT_B, EIGHT_B.bytes).layers == 32
    assert kernels.fitting(EIGHT_B, EIGHT_B.bytes - 1).layers == 16
    assert kernels.fitting(EIGHT_B, 1).layers == 1


@pytest.mark.parametrize("token_major", [True, False])
def test_what_no_op_may_read_is_nan(token_major):
    shape = replace(TINY, token_major=token_major)
    p = prompt.Prompt(shape, CPU, 0)
    assert int((~p.pool.isnan()).sum()) == 2 * 90 * 2 * 2 * 8
    for pages in p.pages:
        keys = p.keys[pages].permute(1, 0, 3, 2).flatten(1, 2)
        assert not keys[:, :90].isnan().any()
        assert keys[:, 90:].isnan().all()
    assert not set(p.targets.flatten().tolist()) & set(p.pages.flatten().tolist())
    assert p.scores[..., 90:].isnan().all()
    assert p.weights.sum(-1).tolist() == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("op", ops.OPS, ids=lambda op: op.name)
def test_a_wrong_output_is_seen(op):
    """Here the references run: what they give is right, and one element less is not."""
    work = op.of(TINY, CPU, 0)
    layers = op.launches(TINY)[-1]
    want = [x.clone() for x in op.plain(work, layers)]
    got = op.launch(work, layers)
    got = op.left(work) if op.left else got
    assert ops.wrong(op, got, want) == 0.0
    largest = max(range(len(want)), key=lambda i: want[i].numel())
    want[largest].view(-1)[0] += 1
    assert ops.wrong(op, got, want) > 0.0
    want[largest].view(-1)[0] = torch.nan if want[largest].is_floating_point() else -7
    assert ops.wrong(op, got, want) > 0.0
    assert ops.wrong(op, got[:-1], want) == 1.0


@pytest.mark.parametrize(
    ("figure", "goal", "result"),
    [
        (0.8, (">=", 0.8), "pass"),
        (0.79, (">=", 0.8), "FAIL"),
        (1.02, ("<=", 1.02), "pass"),
        (float("nan"), ("<=", 1.02), "FAIL"),
        (float("nan"), (">=", 0.8), "FAIL"),
        (None, (">=", 0.8), "FAIL"),
        (0, ("==", 0), "pass"),
    ],
)
def test_verdicts(figure, goal, result):
    assert report.verdict(figure, goal) == result


# -- the machine -------------------------------------------------------------------------------


def test_clocks_by_the_bits_of_their_reasons():
    at_cap = machine.sample("1755, 2619, 698.10, 61, 0x0000000000000004\n")
    assert (at_cap["clocks.sm"], at_cap["temperature.gpu"]) == (1755, 61)
    assert at_cap["power_cap"]
    assert not at_cap["slowed"]
    for bits in ("0x08", "0x20", "0x40", "0x80"):
        assert machine.sample(f"345, 2619, 90, 89, {bits}")["slowed"]
    assert machine.sample("[N/A], 2619, 90, 89, 0x0") is None
    assert machine.sample("no such device") is None


def test_slowed_clocks_fail_a_stage(tmp_path):
    made = report.Report("kernels", tmp_path, False, "abc", 0)
    machine.judge_clocks(made, [])
    good = machine.sample("1755, 2619, 698, 61, 0x4")
    machine.judge_clocks(made, [good, good])
    machine.judge_clocks(made, [good, machine.sample("345, 2619, 90, 89, 0x40")])
    assert [check["result"] for check in made.data["checks"]] == ["absent", "pass", "FAIL"]


# -- serving -----------------------------------------------------------------------------------


def test_weights_and_tokens_of_a_known_model():
    """8.03 billion parameters; 128 KiB of keys and values a token."""
    model = models.MODELS[0]
    assert model.weights / 2e9 == pytest.approx(8.03, abs=0.01)
    assert model.token_bytes == 128 << 10


@pytest.mark.parametrize(
    ("gib", "name"), [(140, "8B"), (79, "8B"), (46, "3B"), (23, "1B")], ids=str
)
def test_two_engines_and_their_pools_fit(gib, name):
    model, asked = serving.fitting(gib << 30)
    assert model.name.endswith(name)
    assert 2 * (model.weights + asked.pool * model.token_bytes) < gib << 30
    longest = max(length for length, _ in asked.alone)
    assert longest + serving.ROOM <= min(asked.pool, model.positions)
    assert all(count * (length + serving.ROOM) <= asked.pool for count, length, _ in asked.together)
    count, length, _ = asked.crowd
    assert count * length > 5 * asked.pool


def test_the_largest_pool_serves_8k_32k_and_128k():
    asked = serving.sizes(serving.POOL)
    assert [length for length, _ in asked.alone] == [8192, 32768, 130816]


def test_a_gpu_too_small_for_any_model_is_told():
    with pytest.raises(RuntimeError, match="GiB are free for each of two; free memory"):
        serving.fitting(12 << 30)


# -- tokens ------------------------------------------------------------------------------------


def test_texts_count_up_to_their_first_difference():
    assert tokens.equal_tokens([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 4 / 6
    assert tokens.equal_tokens([[1]], [[1]]) == 1.0


def test_vllms_own_table_of_graphs_is_understood():
    from vllm.compilation.cuda_graph import CUDAGraphLogging, CUDAGraphStat
    from vllm.config import CUDAGraphMode

    made = CUDAGraphLogging(CUDAGraphMode.FULL_AND_PIECEWISE, [1, 2, 8])
    for mode, times in ((CUDAGraphMode.FULL, 3), (CUDAGraphMode.NONE, 1)):
        for _ in range(times):
            made.observe(CUDAGraphStat(6, 8, 2, str(mode)))
    lines = made.generate_metric_table().splitlines()
    assert vllm_log.graph_modes(lines) == {"FULL": 3, "NONE": 1}


def test_a_sync_is_counted_where_it_was_asked_for():
    code = f"import warnings\nwarnings.warn({vllm_log.SYNC!r})\nwarnings.warn('another')"
    show = warnings.showwarning
    with vllm_log.counted_syncs(SimpleNamespace()) as seen:
        exec(compile(code, "/site/vllm_kvcompress/engine/x.py", "exec"), {})
        exec(compile(code, "/site/torch/_tensor.py", "exec"), {})
    assert warnings.showwarning is show
    ours, caller = seen
    assert ours == "vllm_kvcompress x.py:2 <module>"
    assert caller.startswith("elsewhere test_gpu_arithmetic.py")


# -- reports -----------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path):
    return report.Report("kernels", tmp_path, False, "abc", 0)


def test_a_missed_goal_is_told_first(made):
    made.check("good", 0.9, (">=", 0.8), measured=True)
    made.check("slow op", 0.3, (">=", 0.8), measured=True)
    made.row("figures", op="slow op", ms=1.23456789)
    made.finish()
    faults = failures([made.data])
    assert faults == ["FAIL   kernels: slow op = 0.3 (goal >= 0.8)"]
    written = page([made.data], faults)
    assert written.index("- FAIL") < written.index("## kernels")
    assert "| slow op | 0.3 | >= 0.8 | FAIL |" in written
    assert "| slow op | 1.2346 |" in written
    assert "Dry run" not in written


def test_a_dry_figure_is_not_judged_and_marked(tmp_path):
    made = report.Report("kernels", tmp_path, True, "abc", 0)
    made.check("slow op", 0.3, (">=", 0.8), measured=True)
    made.finish()
    assert failures([made.data]) == []
    assert "no figure below is a measurement" in page([made.data], [])
    made.check("wrong op", 2.0, ("<=", 1.0))
    assert len(failures([made.data])) == 1


def test_a_stage_that_did_not_finish_fails_and_keeps_what_it_found(made):
    made.check("good", 0.9, (">=", 0.8))
    assert failures([made.data]) == ["FAIL   kernels: did not finish"]
    assert "| good | 0.9 |" in page([made.data], [])


def test_a_table_has_all_columns_of_its_rows():
    assert (
        table([{"a": 1}, {"b": float("inf")}]) == "| a | b |\n| --- | --- |\n| 1 |  |\n|  | inf |"
    )


def test_tests_are_counted_and_a_skipped_one_shows_nothing(made, tmp_path):
    found = tmp_path / "tests.xml"
    found.write_text(
        "<testsuites><testsuite>"
        "<testcase classname='a' name='x'/>"
        "<testcase classname='a' name='y'><skipped/></testcase>"
        "<testcase classname='b' name='z'><failure/></testcase>"
        "</testsuite></testsuites>"
    )
    correctness.judge(made, found)
    results = {check["name"]: (check["figure"], check["result"]) for check in made.data["checks"]}
    assert results["b: z"][1] == "FAIL"
    assert results["tests that failed"] == (1, "FAIL")
    assert results["tests that passed"] == (1, "pass")
    assert made.data["tables"]["tests"][0] == {"of": "a", "passed": 1, "skipped": 1}
