"""``kvcompress methods``, and the other commands with methods of other packages."""

import json

import pytest

from added_methods import EVENS, installed, write_package
from vllm_kvcompress.methods.registry import BUILT_IN


def test_it_lists_every_name_and_its_package(run, tmp_path):
    """In a process of its own, which finds the package through Python's path."""
    environment = {"PYTHONPATH": str(write_package(tmp_path))}
    result = run("methods", "--json", environment=environment)
    assert (result.returncode, result.stderr) == (0, "")
    listed = json.loads(result.stdout)
    assert listed["errors"] == []
    presets = {row["name"]: row for row in listed["presets"]}
    assert [*presets] == [*BUILT_IN["preset"], "evens"]
    assert {row["package"] for row in presets.values()} == {"built in", "kvcompress-evens 1.0"}
    assert presets["evens"] == {
        "name": "evens", "allocator": "uniform", "scorer": "evens", "selector": "topk",
        "window": 4, "lookahead": 0, "package": "kvcompress-evens 1.0",
    }  # fmt: skip
    parts = {(row["kind"], row["name"]): row for row in listed["parts"]}
    assert len(parts) == sum(len(BUILT_IN[kind]) for kind in BUILT_IN) - len(BUILT_IN["preset"]) + 1
    assert parts["scorer", "evens"]["parameters"] == {"step": 2}


def test_a_wrong_entry_is_listed_with_its_error_and_status_1(run_in_process, tmp_path):
    entries = {"scorer.evens": "kvcompress_evens:Evens", "preset.snapkv": "kvcompress_evens:PRESET"}
    with installed(write_package(tmp_path, entries)):
        result = run_in_process("methods")
    assert result.status == 1
    assert "evens" in result.out
    assert "error: kvcompress-evens 1.0, entry point 'preset.snapkv'" in result.out


@pytest.mark.parametrize("command", ["plan", "doctor", "compare"])
def test_help_names_the_methods_of_other_packages(command, run_in_process, tmp_path):
    """Even if the package cannot be imported."""
    assert "other packages" not in run_in_process(command, "--help").out
    with installed(write_package(tmp_path, code="raise OSError")):
        result = run_in_process(command, "--help")
    assert result.status == 0
    assert "Methods of other packages: evens (kvcompress-evens)." in " ".join(result.out.split())


def test_a_plan_for_the_method_of_another_package(run_in_process, tiny, tmp_path):
    with installed(write_package(tmp_path)):
        result = run_in_process("plan", tiny, "--len", 4096, "--kv-compress", "evens", "--json")
    assert result.status == 0
    assert json.loads(result.out)


def test_a_package_that_cannot_be_imported_is_status_2(run_in_process, tiny, tmp_path):
    code = EVENS.replace("import torch", "import torch_that_is_missing")
    with installed(write_package(tmp_path, code=code)):
        result = run_in_process("plan", tiny, "--len", 4096, "--kv-compress", "cake")
    assert result.status == 2
    assert result.err.startswith("kvcompress: error: kvcompress-evens 1.0, entry point 'scorer")
    assert "No module named 'torch_that_is_missing'" in result.err
