"""The GPU benchmark's HTTP stage: the client's command line, its figures, and their comparison."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import server
from benchmarks.gpu.report import Report
from benchmarks.gpu.summary import failures

RESULT = {"completed": 2, "duration": 1.0, "output_throughput": 50.0}
RESULT |= {"median_ttft_ms": 100.0, "median_tpot_ms": 5.0, "p99_itl_ms": 9.0}


@pytest.fixture
def report(tmp_path):
    return Report("server", tmp_path, True, "abc", 0)


def test_vllms_client_knows_every_flag(tmp_path):
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    _, bench, serve, *flags = server.command("http://127.0.0.1:1", server.LOAD, 7, tmp_path)
    assert (bench, serve) == ("bench", "serve")
    args = parser.parse_args(flags)
    assert (args.num_prompts, args.random_input_len, args.random_output_len) == (128, 4096, 128)
    assert (args.seed, args.ignore_eos, args.save_result) == (7, True, True)
    assert (Path(args.result_dir), args.result_filename) == (tmp_path, "result.json")


def test_the_client_returns_the_figures_of_its_result_file(monkeypatch):
    seeds = []

    def run(line, **options):
        assert options["check"]
        seeds.append(line[line.index("--seed") + 1])
        folder = Path(line[line.index("--result-dir") + 1])
        (folder / "result.json").write_text(json.dumps(RESULT))

    monkeypatch.setattr(server.subprocess, "run", run)
    figures = server.client("http://127.0.0.1:1", server.DRY_LOAD, 5)(3)
    assert figures == {name: x for name, x in RESULT.items() if name != "duration"}
    assert seeds == ["8"]


@pytest.fixture
def measured(report, monkeypatch):
    """Return a function that measures two stand-ins whose rounds have these figures."""

    def run(**plugin_figures):
        packed = {server.FULL: 0, server.PLUGIN: 0}

        def client(name, load, _seed):
            def run_round(_number):
                packed[name] += load.requests * (name == server.PLUGIN)
                return RESULT | (plugin_figures if name == server.PLUGIN else {})

            return run_round

        monkeypatch.setattr(server, "client", client)
        servers = {
            name: SimpleNamespace(url=name, metric=lambda _, name=name: packed[name])
            for name in packed
        }
        server.measure(report, server.DRY_LOAD, servers)
        return report.data

    return run


def test_servers_are_compared_round_by_round(measured):
    found = measured(median_ttft_ms=103.0)
    assert failures([found | {"finished": True}]) == []
    differences = {row["of"]: row["median"] for row in found["tables"]["differences"]}
    workload = "2 x 1100 by HTTP"
    assert differences[f"{workload}: median_ttft_ms"] == pytest.approx(0.03)
    assert differences[f"{workload}: p99_itl_ms"] == 0
    assert list(found["rounds"][workload]) == [server.FULL, server.PLUGIN]


def test_a_request_that_failed_fails_the_stage(measured):
    (fault,) = failures([measured(completed=1) | {"finished": True}])
    assert fault == "FAIL   server: 2 x 1100 by HTTP, plugin: completed = 1 (goal == 2)"


def test_a_missing_demo_model_fails_the_stage(report, monkeypatch, tmp_path):
    monkeypatch.setattr(server, "MODEL", tmp_path)
    server.run(report, torch.device("cpu"))
    (fault,) = failures([report.data | {"finished": True}])
    assert fault.endswith("is missing; run `make model`")
