"""Bytes in the report, and other servers with a low-bit KV cache: ``--against``."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
from vllm.model_executor.layers.quantization.turboquant.config import TQ_PRESETS, TurboQuantConfig

from fake_vllm import FakeVllm, write_prompts
from loopback import server
from vllm_kvcompress.compare import server as compare_server
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.planning.cache_dtypes import ALTERNATIVES, LOW_BIT_CACHES, share_of_bytes
from vllm_kvcompress.serving import process


@pytest.fixture
def other():
    """Yield another running fake server: without the plugin, with an fp8 KV cache."""
    vllm = FakeVllm()
    vllm.has_plugin, vllm.cache_dtype = False, "fp8"
    with server(vllm) as url:
        vllm.url = url
        yield vllm


@pytest.fixture
def run_compare(compare, fake, tmp_path):
    """Return a function that compares snapkv and cake on ten prompts, of which five are odd."""

    def run(*flags, max_drop="0.3"):
        write_prompts(tmp_path / "mine.jsonl", range(10))
        argv = ["--url", fake.url, "--prompts", "mine.jsonl", "--max-drop", max_drop]
        return compare(*argv, "--no-baselines", "--budgets", "0.2", *flags)

    return run


def read_report(tmp_path):
    return json.loads((tmp_path / "out" / "report.json").read_text())


def about_low_bit(report):
    return [note for note in report["notes"] if "fp8" in note]


def test_bytes_are_relative_to_the_models_dtype(run_compare, fake, tmp_path):
    """The fake server's k4v3 takes a quarter of the bytes, and an fp8 cache half of them."""
    run_compare("--methods", "cake", "--budgets", "0.4:k4v3,0.2")
    assert [c["bytes"] for c in read_report(tmp_path)["cells"]] == pytest.approx([0.1, 0.2])
    assert "| 10% |" in (tmp_path / "out" / "report.md").read_text()
    fake.cache_dtype = "fp8"
    run_compare("--methods", "cake", "--out", "second")
    report = json.loads((tmp_path / "second" / "report.json").read_text())
    assert report["cells"][0]["bytes"] == pytest.approx(0.1)
    assert about_low_bit(report) == []  # the server has such a cache already
    assert "keeps 20.0% of the tokens in 10% of the bytes" in report["recommendation"]["sentence"]


def test_the_recommendation_takes_the_fewest_bytes(run_compare, tmp_path):
    """0.6 in k4v3 takes fewer bytes than 0.2 in 16 bits."""
    run_compare("--methods", "cake", "--budgets", "0.6:k4v3,0.2")
    cell = read_report(tmp_path)["recommendation"]["cell"]
    assert (cell["budget"], cell["packed_dtype"]) == (0.6, "k4v3")


def test_without_another_server_the_report_says_how_to_measure_one(run_compare, tmp_path):
    run_compare("--methods", "cake")
    (note,) = about_low_bit(read_report(tmp_path))
    assert note.startswith("Not measured: vLLM's own low-bit caches keep all tokens")
    assert "fp8 (50% of the bytes), int8_per_token_head (52% of the bytes)" in note
    assert "--against" in note


def test_another_server_gets_the_same_prompts_uncompressed(run_compare, fake, other, tmp_path):
    result = run_compare("--methods", "cake", "--against", other.url)
    report = read_report(tmp_path)
    method, alone = report["cells"]
    assert (alone["method"], alone["bytes"], alone["asked"]) == ("fp8 alone", 0.5, 10)
    assert (alone["compressed"], alone["kept"], alone["exact"]["mean"]) == (None, None, 1.0)
    full = [b for b in fake.prompt_requests if b["vllm_xargs"]["kv_compress"] == "off"]
    sent = [b["messages"] for b in other.prompt_requests]
    assert sorted(map(str, sent)) == sorted(str(b["messages"]) for b in full)
    assert {b["vllm_xargs"]["kv_compress"] for b in other.requests} == {"off"}
    assert "fp8 alone" in result.out
    assert method["bytes"] == pytest.approx(0.2)
    assert report["recommendation"]["cell"]["method"] == "cake"
    (note,) = about_low_bit(report)
    assert note.startswith("Use fp8 alone if 50% of the bytes is small enough. It keeps all")
    assert note.endswith("cake 0.2 takes 20% of the bytes.")


def test_the_page_does_not_call_another_server_a_baseline(run_compare, other, tmp_path):
    run_compare("--methods", "cake", "--against", other.url)
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| fp8 alone | 1 | - of 10 |" in page
    assert "baselines" not in page
    assert "fp8 alone: outputs of other servers (`--against`), without compression." in page


def test_a_cache_that_loses_too_much_is_not_close_enough(run_compare, other, tmp_path):
    other.wrong_numbers = True
    run_compare("--methods", "cake", "--against", other.url)
    (note,) = about_low_bit(read_report(tmp_path))
    assert note.startswith("fp8 alone (50% of the bytes) is not close enough: its loss by score")


def test_a_cache_of_as_few_bytes_is_used_without_compression(run_compare, other, tmp_path):
    run_compare("--methods", "cake", "--budgets", "0.6", "--against", other.url)
    (note,) = about_low_bit(read_report(tmp_path))
    assert note.startswith("Use fp8 alone, without compression: it takes 50% of the bytes, no more")


def test_a_cache_alone_may_do_where_no_method_does(run_compare, other, tmp_path):
    result = run_compare("--methods", "snapkv", "--against", other.url)
    assert result.status == 1
    (note,) = about_low_bit(read_report(tmp_path))
    assert note.startswith("fp8 alone (50% of the bytes) is close enough, without compression")


def test_another_server_of_unknown_bytes_is_still_compared(run_compare, other, tmp_path):
    other.cache_dtype = "nvfp4"
    run_compare("--methods", "cake", "--against", other.url)
    report = read_report(tmp_path)
    assert (report["cells"][1]["method"], report["cells"][1]["bytes"]) == ("nvfp4 alone", None)
    (note,) = (note for note in report["notes"] if "nvfp4" in note)
    assert note.startswith(
        "Use nvfp4 alone if it saves enough memory, which is not known. It keeps"
    )


def test_a_run_with_another_server_resumes_without_asking_again(run_compare, other, tmp_path):
    run_compare("--methods", "cake")
    run_compare("--methods", "cake", "--against", other.url)
    asked = len(other.prompt_requests)
    run_compare("--methods", "cake", "--against", other.url)
    assert (asked, len(other.prompt_requests)) == (10, 10)
    assert read_report(tmp_path)["complete"]


def test_two_servers_with_the_same_cache_are_told_apart(run_compare, other, tmp_path):
    second = FakeVllm()
    second.has_plugin, second.cache_dtype = False, "fp8"
    with server(second) as url:
        run_compare("--methods", "cake", "--against", other.url, "--against", url)
    names = [cell["method"] for cell in read_report(tmp_path)["cells"]]
    assert names == ["cake", "fp8 alone", f"fp8 alone at {url}"]


def test_another_server_must_serve_the_same_model(run_compare, fake, other, tmp_path):
    other.responses["/v1/models"] = 200, '{"data": [{"id": "other"}]}'
    result = run_compare("--methods", "cake", "--against", other.url)
    assert result.status == 2
    assert "must serve fake" in result.err
    assert "got other; start it with the same model, or with --served-model-name fake" in result.err
    assert fake.prompt_requests == []


def test_with_a_model_a_cache_dtype_starts_the_other_server(
    run_compare, compare, fake, other, tmp_path, monkeypatch
):
    started = []

    def start_low_bit(*arguments):
        started.append(arguments)
        return contextlib.nullcontext(other.url)

    monkeypatch.setattr(compare_server, "start", lambda *_: contextlib.nullcontext(fake.url))
    monkeypatch.setattr(compare_server, "start_low_bit", start_low_bit)
    (tmp_path / "config.json").write_text("{}")
    write_prompts(tmp_path / "mine.jsonl", range(10))
    command = ["--model", ".", "--prompts", "mine.jsonl", "--methods", "cake", "--budgets", "0.2",
               "--no-baselines", "--against", "fp8", "--", "--enforce-eager"]  # fmt: skip
    result = compare(*command)
    assert started == [(Path("."), "fp8", ("--enforce-eager",), Path("out/server-fp8.log"))]
    assert "Starting vllm serve . --kv-cache-dtype fp8; its log is out/server-fp8.log" in result.err
    assert (len(other.prompt_requests), len(fake.prompt_requests)) == (10, 20)
    cell = read_report(tmp_path)["cells"][1]
    assert (cell["method"], cell["server"], cell["bytes"]) == ("fp8 alone", "fp8", 0.5)
    # The server has another port when the run is resumed.
    with server(other) as url:
        other.url = url
        compare(*command)
    assert len(other.prompt_requests) == 10


def test_the_other_server_has_the_same_flags_and_its_own_cache_dtype(tmp_path, monkeypatch):
    commands = []

    def command(model, port, arguments):
        commands.append(arguments)
        return [sys.executable, "-c", ""]

    monkeypatch.setattr(process, "command", command)
    flags = ["--kv-min-prompt", "256", "--kv-cache-dtype", "auto"]
    with pytest.raises(ConfigError, match="the server ended before it was healthy; see"):
        compare_server.start_low_bit(tmp_path, "fp8", flags, tmp_path / "log").__enter__()
    assert commands == [["--kv-compress", "off", *flags, "--kv-cache-dtype", "fp8"]]


def test_a_cache_dtype_needs_a_model(run_compare, fake):
    result = run_compare("--methods", "cake", "--against", "fp8")
    assert result.status == 2
    assert (
        "--against fp8 starts a server and needs --model; start one yourself with --kv-cache-dtype"
        " fp8, and give its address"
    ) in result.err
    assert fake.requests == []


@pytest.mark.parametrize(
    ("count", "wrong", "verdict"),
    [
        (
            10,
            False,
            "looks close, but 10 prompts are too few to be sure: its loss by similarity is",
        ),
        (10, True, "is not close enough: its loss by similarity is 0.375"),
        (40, False, "is small enough. It keeps all tokens: its loss by similarity is 0.000"),
    ],
)
def test_the_verdict_needs_enough_prompts(run_compare, other, tmp_path, count, wrong, verdict):
    other.wrong_numbers = wrong
    write_prompts(tmp_path / "few.jsonl", range(count))
    run_compare("--methods", "cake", "--against", other.url, "--prompts", "few.jsonl",
                "--by", "similarity", max_drop="0.1")  # fmt: skip
    (note,) = about_low_bit(read_report(tmp_path))
    assert verdict in note
    assert "and its KL" in note


def test_an_address_of_another_server_is_checked_first(run_compare, fake):
    result = run_compare("--methods", "cake", "--against", "fp8:8000/v1")
    assert result.status == 2
    assert "--against must be a server's address without a path" in result.err
    assert fake.requests == []


@pytest.mark.parametrize("same", ["first", "twice"])
def test_each_other_server_is_named_once(run_compare, fake, other, same):
    urls = [fake.url] if same == "first" else [other.url, f"{other.url}/"]
    result = run_compare(
        "--methods", "cake", *(part for url in urls for part in ("--against", url))
    )
    assert result.status == 2
    assert "--against must name other servers than --url, each once" in result.err


@pytest.mark.parametrize("cache_dtype", TQ_PRESETS)
def test_bytes_of_a_turboquant_cache_are_vllms(cache_dtype):
    """For the layers and head size that the function assumes; four layers stay at 16 bits."""
    slot = TurboQuantConfig.from_cache_dtype(cache_dtype, 128).slot_size_aligned
    assert share_of_bytes(cache_dtype) == pytest.approx((4 + 28 * slot / 512) / 32)


def test_bytes_of_a_cache_with_scales_per_token_and_head_include_the_scales():
    shares = {
        "fp8": 0.5,
        "fp8_per_token_head": 264 / 512,
        "int8_per_token_head": 264 / 512,
        "int4_per_token_head": 136 / 512,
    }
    assert {name: share_of_bytes(name) for name in shares} == shares


def test_alternatives_are_known_and_plain_caches_take_all_bytes():
    assert all((share_of_bytes(name) or 1) < 1 for name in {*ALTERNATIVES, *LOW_BIT_CACHES})
    assert (share_of_bytes("auto"), share_of_bytes("nvfp4")) == (1.0, None)
