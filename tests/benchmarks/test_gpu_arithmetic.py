"""The GPU benchmark's floors, goals, clock checks and model sizes, checked by hand."""

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
    packed,
    prompt,
    report,
    stages,
    tokens,
    vllm_log,
    workloads,
)
from benchmarks.gpu import rounds as rounds_module
from benchmarks.gpu.summary import failures, page, table

EIGHT_B = prompt.Shape(tokens=8192)
TINY = prompt.Shape(layers=2, tokens=90, heads=4, kv_heads=2, dim=8, window=4, budget=0.4)
CPU = torch.device("cpu")


def test_floors_match_a_calculation_by_hand():
    """2 layers, 8 KV heads, dimension 128, bf16, 8192 tokens; layers keep 15 % and 5 %."""
    shape = prompt.Shape(layers=2, tokens=8192)
    assert shape.counts == [1228 // 16, 409 // 16] == [76, 25]
    assert prompt.keys_once(shape) == 2 * 8192 * 8 * 128 * 2 == 32 << 20
    assert prompt.kept_twice(shape) == 2 * (76 + 25) * 65536
    assert prompt.scores_once(shape) == 2 * 8 * 8192 * 4
    assert prompt.tables_twice(shape) == 64 * (76 + 25) * (4 + 4)
    pairs = sum(range(8192 - 2048 + 1, 8192 + 1))  # keys visible to the last 2048 queries
    assert prompt.causal_product(shape) == 2 * 32 * 128 * 2 * pairs
    pairs = 76 * 16 * (8192 - 76 * 16) + 25 * 16 * (8192 - 25 * 16)
    assert prompt.cosines(shape) == 8 * 128 * 2 * pairs
    assert shape.bytes == 65536 * (2 * 512 + 76 + 25)


def test_layers_keep_their_budget_on_average():
    assert len(EIGHT_B.counts) == 32
    assert sum(EIGHT_B.counts) * 16 == pytest.approx(32 * 0.1 * 8192, rel=0.02)


def test_every_op_has_one_floor_and_its_documented_goal():
    for op in ops.OPS:
        assert (op.floor_bytes(EIGHT_B) > 0) != (op.floor_flops(EIGHT_B) > 0), op.name
    goals = {op.name.split(",")[0]: op.goal for op in ops.OPS if op.goal}
    assert goals == {"window_scores": 0.8, "value_scores": 0.8, "move_kept": 0.8}


def test_ops_are_launched_as_in_the_engine():
    """For a prompt of 1/16 of the maximum length, 16 layers share a window-score launch."""
    launches = {op.name.split(",")[0]: len(op.launches(EIGHT_B)) for op in ops.OPS}
    expected = {"window_scores": 2, "value_scores": 32, "value_norms": 32, "key_cosines": 32}
    expected |= {"lag_scores": 32, "column_sums": 32, "merge_evicted": 32, "page_tables": 1}
    expected |= {"select": 1, "select_chunks": 1, "count_highest": 1, "move_kept": 1}
    assert launches == expected
    uneven = replace(EIGHT_B, layers=5, tokens=60000)
    assert ops.OPS[0].launches(uneven) == [range(0, 2), range(2, 4), range(4, 5)]


def test_layers_are_halved_until_they_fit_into_memory():
    assert kernels.fit_layers(EIGHT_B, EIGHT_B.bytes).layers == 32
    assert kernels.fit_layers(EIGHT_B, EIGHT_B.bytes - 1).layers == 16
    assert kernels.fit_layers(EIGHT_B, 1).layers == 1


@pytest.mark.parametrize("token_major", [True, False])
def test_memory_that_no_op_may_read_is_nan(token_major):
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
def test_mismatch_detects_one_wrong_element(op):
    """On a CPU the launch runs the reference, so its outputs must match."""
    inputs = op.inputs(TINY, CPU, 0)
    layers = op.launches(TINY)[-1]
    expected = [x.clone() for x in op.reference(inputs, layers)]
    got = op.launch(inputs, layers)
    got = op.read_outputs(inputs) if op.read_outputs else got
    assert ops.mismatch(op, got, expected) == 0.0
    largest = max(range(len(expected)), key=lambda i: expected[i].numel())
    expected[largest].view(-1)[0] += 1
    assert ops.mismatch(op, got, expected) > 0.0
    expected[largest].view(-1)[0] = torch.nan if expected[largest].is_floating_point() else -7
    assert ops.mismatch(op, got, expected) > 0.0
    assert ops.mismatch(op, got[:-1], expected) == 1.0


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
def test_a_figure_passes_or_fails_its_goal(figure, goal, result):
    assert report.verdict(figure, goal) == result


def test_packed_attention_matches_its_reference_in_the_layout_of_cuda(tmp_path):
    stage_report = report.Report("packed-attention", tmp_path, True, "abc", 0)
    packed.run(stage_report, CPU)
    checks = {check["name"]: check["result"] for check in stage_report.data["checks"]}
    title = "packed_attention, 2 x 150"
    others = packed.SIXTEEN_BITS, packed.EQUAL_BYTES, packed.FP8, packed.TURBOQUANT
    assert checks == {f"{title}: largest error": "pass"} | dict.fromkeys(
        (f"{title}: {name}" for name in others), "absent"
    )
    (row,) = stage_report.data["tables"]["packed attention of one layer"]
    assert (row["requests"], row["tokens"]) == (2, 150)


def flash_attention(*, q, k, v, out, seqused_k, block_table, softmax_scale, **options):
    """Compute what FlashAttention computes from the same arguments."""
    assert options["cu_seqlens_q"].tolist() == list(range(len(q) + 1))
    assert (q.dtype == torch.float8_e4m3fn) == ("k_descale" in options)
    scales = [options.get(f"{name}_descale", torch.ones(len(q), k.shape[2])) for name in "qkv"]
    for row, length in enumerate(seqused_k.tolist()):
        assert length <= options["max_seqlen_k"]
        pages = block_table[row, : -(-length // k.shape[1])].long()
        query, keys, values = (
            x.float() * scale[row].repeat_interleave(x.shape[-2] // k.shape[2])[:, None]
            for x, scale in zip((q[row], k[pages], v[pages]), scales, strict=True)
        )
        keys, values = (x.flatten(0, 1)[None, :length].transpose(1, 2) for x in (keys, values))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[None, :, None], keys, values, scale=softmax_scale, enable_gqa=True
        )
        out[row] = attended[0, :, 0].to(out.dtype)
    return out


def test_caches_of_flash_attention_take_turns_with_packed_attention(tmp_path, monkeypatch):
    from vllm.v1.attention.backends import fa_utils

    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash_attention, raising=False)
    stage_report = report.Report("packed-attention", tmp_path, True, "abc", 0)
    packed.run(stage_report, CPU)
    title, tables = "packed_attention, 2 x 150", stage_report.data["tables"]
    figures = {check["name"]: check["figure"] for check in stage_report.data["checks"]}
    compared = [packed.SIXTEEN_BITS, packed.EQUAL_BYTES, packed.FP8]
    for name in compared:
        assert figures[f"{title}: {name}, largest error"] < 1e-5, name
    assert [row["variant"] for row in tables["requests"]] == [packed.K4V3, *compared]
    assert [row["than"] for row in tables["differences"]] == compared
    (row,) = tables["packed attention of one layer"]
    assert row["over fp8"] > 0


def test_attention_over_other_tokens_fails_its_check():
    step = packed.Step(packed.DRY_LAYER, 2, 150, 32, CPU, 0)
    keys, values = (step._normal(10, 16, 2, 64) for _ in range(2))
    exact = step.exact(step.query[0], keys, values, 150)
    right = packed.Other(lambda: exact[None], exact)
    wrong = packed.Other(lambda: step.exact(step.query[0], keys.flip(0), values, 150)[None], exact)
    assert right.error() == 0.0
    assert wrong.error() > packed.RIGHT_TOKENS


def test_packed_pages_hold_four_times_as_many_tokens_as_pages_of_16_bits():
    layer = packed.Layer()
    step = packed.Step(layer, 1, 1024 + 16, 16, CPU, 0)
    assert step.width * layer.block * packed.SMALLER == 1024
    assert layer.page_bytes == 65536
    output = step.run(None, torch.zeros_like(step.query))
    assert step.error(output) < packed.TOLERANCE
    assert step.error(output + 1) > packed.TOLERANCE


def test_every_stage_has_a_function_and_a_limit():
    assert all(callable(stages.function(name)) for name in stages.LIMITS)
    assert next(iter(stages.LIMITS)) == "packed-attention"


# -- the machine -------------------------------------------------------------------------------


def test_throttle_reasons_are_parsed_from_their_bits():
    at_cap = machine.sample("1755, 2619, 698.10, 61, 0x0000000000000004\n")
    assert (at_cap["clocks.sm"], at_cap["temperature.gpu"]) == (1755, 61)
    assert at_cap["power_cap"]
    assert not at_cap["slowed"]
    for bits in ("0x08", "0x20", "0x40", "0x80"):
        assert machine.sample(f"345, 2619, 90, 89, {bits}")["slowed"]
    assert machine.sample("[N/A], 2619, 90, 89, 0x0") is None
    assert machine.sample("no such device") is None


def test_throttled_clocks_fail_a_stage(tmp_path):
    stage_report = report.Report("kernels", tmp_path, False, "abc", 0)
    machine.report_clocks(stage_report, [])
    good = machine.sample("1755, 2619, 698, 61, 0x4")
    machine.report_clocks(stage_report, [good, good])
    machine.report_clocks(stage_report, [good, machine.sample("345, 2619, 90, 89, 0x40")])
    assert [check["result"] for check in stage_report.data["checks"]] == ["absent", "pass", "FAIL"]


# -- serving -----------------------------------------------------------------------------------


def test_bytes_of_weights_and_tokens_match_a_known_model():
    """Llama-3.1-8B has 8.03 billion parameters and 128 KiB of keys and values per token."""
    model = models.MODELS[0]
    assert model.weights / 2e9 == pytest.approx(8.03, abs=0.01)
    assert model.token_bytes == 128 << 10


@pytest.mark.parametrize(
    ("gib", "name"), [(140, "8B"), (79, "8B"), (46, "3B"), (23, "1B")], ids=str
)
def test_two_engines_and_their_pools_fit(gib, name):
    model, sizes = workloads.fit_model(gib << 30)
    assert model.name.endswith(name)
    assert 2 * (model.weights + sizes.pool * model.token_bytes) < gib << 30
    assert sizes.max_prompt + workloads.MAX_OUTPUT_TOKENS <= min(sizes.pool, model.positions)
    assert all(
        count * (length + workloads.MAX_OUTPUT_TOKENS) <= sizes.pool
        for count, length, _ in (*sizes.together, *sizes.look_aheads)
    )
    count, length, _ = sizes.crowd
    assert count * length > 5 * sizes.pool


def test_the_largest_pool_serves_8k_32k_and_128k():
    sizes = workloads.sizes(workloads.MAX_POOL_TOKENS)
    assert [length for length, _ in (sizes.prompt_8k, sizes.prompt_32k)] == [8192, 32768]
    assert sizes.prompt_128k[0] == sizes.max_prompt == 130816


def test_goals_of_one_percent_have_forty_rounds_or_more():
    sizes = workloads.sizes(workloads.MAX_POOL_TOKENS)
    for _, rounds in (sizes.prompt_8k, sizes.short[1:]):
        assert rounds >= rounds_module.ONE_PERCENT_ROUNDS >= 40


def test_a_gpu_too_small_for_any_model_is_an_error():
    with pytest.raises(RuntimeError, match="GiB per engine are free: free GPU memory"):
        workloads.fit_model(12 << 30)


# -- tokens ------------------------------------------------------------------------------------


def test_equal_tokens_stops_at_the_first_difference():
    assert tokens.equal_tokens([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 4 / 6
    assert tokens.equal_tokens([[1]], [[1]]) == 1.0


def test_vllms_graph_table_is_parsed():
    from vllm.compilation.cuda_graph import CUDAGraphLogging, CUDAGraphStat
    from vllm.config import CUDAGraphMode

    graph_log = CUDAGraphLogging(CUDAGraphMode.FULL_AND_PIECEWISE, [1, 2, 8])
    for mode, times in ((CUDAGraphMode.FULL, 3), (CUDAGraphMode.NONE, 1)):
        for _ in range(times):
            graph_log.observe(CUDAGraphStat(6, 8, 2, str(mode)))
    lines = graph_log.generate_metric_table().splitlines()
    assert vllm_log.graph_modes(lines) == {"FULL": 3, "NONE": 1}


def test_a_sync_is_counted_at_the_code_that_caused_it():
    code = f"import warnings\nwarnings.warn({vllm_log.SYNC!r})\nwarnings.warn('another')"
    original = warnings.showwarning
    with vllm_log.counted_syncs(SimpleNamespace()) as counts:
        exec(compile(code, "/site/vllm_kvcompress/engine/x.py", "exec"), {})
        exec(compile(code, "/site/torch/_tensor.py", "exec"), {})
    assert warnings.showwarning is original
    ours, caller = counts
    assert ours == "vllm_kvcompress x.py:2 <module>"
    assert caller.startswith("elsewhere test_gpu_arithmetic.py")


# -- reports -----------------------------------------------------------------------------------


@pytest.fixture
def stage_report(tmp_path):
    return report.Report("kernels", tmp_path, False, "abc", 0)


def test_the_page_lists_failed_checks_first(stage_report):
    stage_report.check("good", 0.9, (">=", 0.8), measured=True)
    stage_report.check("slow op", 0.3, (">=", 0.8), measured=True)
    stage_report.row("figures", op="slow op", ms=1.23456789)
    stage_report.finish()
    faults = failures([stage_report.data])
    assert faults == ["FAIL   kernels: slow op = 0.3 (goal >= 0.8)"]
    written = page([stage_report.data], faults)
    assert written.index("- FAIL") < written.index("## kernels")
    assert "| slow op | 0.3 | >= 0.8 | FAIL |" in written
    assert "| slow op | 1.2346 |" in written
    assert "Dry run" not in written


def test_a_dry_run_skips_goals_of_measured_figures_and_is_marked(tmp_path):
    stage_report = report.Report("kernels", tmp_path, True, "abc", 0)
    stage_report.check("slow op", 0.3, (">=", 0.8), measured=True)
    stage_report.finish()
    assert failures([stage_report.data]) == []
    assert "no figure below is a measurement" in page([stage_report.data], [])
    stage_report.check("wrong op", 2.0, ("<=", 1.0))
    assert len(failures([stage_report.data])) == 1


def test_an_unfinished_stage_fails_and_keeps_its_results(stage_report):
    stage_report.check("good", 0.9, (">=", 0.8))
    assert failures([stage_report.data]) == ["FAIL   kernels: did not finish"]
    assert "| good | 0.9 |" in page([stage_report.data], [])


def test_a_table_has_the_columns_of_all_rows():
    assert (
        table([{"a": 1}, {"b": float("inf")}]) == "| a | b |\n| --- | --- |\n| 1 |  |\n|  | inf |"
    )


def test_kernel_tests_are_counted_without_skipped_ones(stage_report, tmp_path):
    junit_file = tmp_path / "tests.xml"
    junit_file.write_text(
        "<testsuites><testsuite>"
        "<testcase classname='a' name='x'/>"
        "<testcase classname='a' name='y'><skipped/></testcase>"
        "<testcase classname='b' name='z'><failure/></testcase>"
        "</testsuite></testsuites>"
    )
    correctness.report_tests(stage_report, junit_file)
    checks = stage_report.data["checks"]
    results = {check["name"]: (check["figure"], check["result"]) for check in checks}
    assert results["b: z"][1] == "FAIL"
    assert results["tests that failed"] == (1, "FAIL")
    assert results["tests that passed"] == (1, "pass")
    assert stage_report.data["tables"]["tests"][0] == {"of": "a", "passed": 1, "skipped": 1}
