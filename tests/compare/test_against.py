"""Bytes in the report, and other servers with a low-bit KV cache: ``--against``."""

import contextlib
import sys
from pathlib import Path

import pytest

from benchmarks.evidence.cache_formats import CACHE_FORMATS
from fake_vllm import FakeVllm, read_report, write_prompts
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
def run_cake(run_compare):
    """Return a function that compares cake at 0.2 on ten prompts, of which five are odd."""

    def run(line="", **options):
        flags = "--max-drop 0.3 --no-baselines --methods cake --budgets 0.2"
        return run_compare(f"{flags} {line}", **options)

    return run


def about_low_bit(report):
    return [note for note in report["notes"] if "fp8" in note]


def test_bytes_are_relative_to_the_models_dtype(run_cake, fake, tmp_path):
    """The fake server's k4v3 takes a quarter of the bytes, and an fp8 cache half of them."""
    run_cake("--budgets 0.4:k4v3,0.2")
    assert [c["bytes"] for c in read_report(tmp_path)["cells"]] == pytest.approx([0.1, 0.2])
    assert "| 10% |" in (tmp_path / "out" / "report.md").read_text()
    fake.cache_dtype = "fp8"
    run_cake("--out second")
    report = read_report(tmp_path, "second")
    assert report["cells"][0]["bytes"] == pytest.approx(0.1)
    assert about_low_bit(report) == []  # the server has such a cache already
    assert "keeps 20.0% of the tokens in 10% of the bytes" in report["recommendation"]["sentence"]


def test_without_another_server_the_report_says_how_to_measure_one(run_cake, tmp_path):
    run_cake()
    (note,) = about_low_bit(read_report(tmp_path))
    assert note.startswith("Not measured: vLLM's own low-bit caches keep all tokens")
    assert "fp8 (50% of the bytes), int8_per_token_head (52% of the bytes)" in note
    assert "--against" in note


def test_another_server_gets_the_same_prompts_uncompressed(run_cake, fake, other, tmp_path):
    result = run_cake(f"--against {other.url}")
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
    assert note.endswith("cake 0.2 takes 20% of the bytes.")


def test_the_page_does_not_call_another_server_a_baseline(run_cake, other, tmp_path):
    run_cake(f"--against {other.url}")
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| fp8 alone | 1 | - of 10 |" in page
    assert "baselines" not in page
    assert "fp8 alone: outputs of other servers (`--against`), without compression." in page


@pytest.mark.parametrize(
    ("flags", "changes", "verdict"),
    [
        ("", {}, "Use fp8 alone if 50% of the bytes is small enough. It keeps all"),
        ("", {"wrong_numbers": True}, "fp8 alone (50% of the bytes) is not close enough: its loss"),
        ("--budgets 0.6", {}, "Use fp8 alone, without compression: it takes 50% of the bytes, no"),
        ("--methods snapkv", {}, "fp8 alone (50% of the bytes) is close enough, without compr"),
        ("", {"cache_dtype": "nvfp4"}, "Use nvfp4 alone if it saves enough memory, which is not k"),
    ],
)
def test_a_note_says_whether_the_cache_alone_is_enough(
    run_cake, other, tmp_path, flags, changes, verdict
):
    for name, value in changes.items():
        setattr(other, name, value)
    result = run_cake(f"{flags} --against {other.url}")
    assert result.status == ("snapkv" in flags)
    report = read_report(tmp_path)
    assert report["cells"][1]["method"] == f"{other.cache_dtype} alone"
    assert report["cells"][1]["bytes"] == (None if changes.get("cache_dtype") else 0.5)
    (note,) = (note for note in report["notes"] if f"{other.cache_dtype} alone" in note)
    assert note.startswith(verdict)


def test_a_run_with_another_server_resumes_without_asking_again(run_cake, other, tmp_path):
    run_cake()
    run_cake(f"--against {other.url}")
    asked = len(other.prompt_requests)
    run_cake(f"--against {other.url}")
    assert (asked, len(other.prompt_requests)) == (10, 10)
    assert read_report(tmp_path)["complete"]


def test_two_servers_with_the_same_cache_are_told_apart(run_cake, other, tmp_path):
    second = FakeVllm()
    second.has_plugin, second.cache_dtype = False, "fp8"
    with server(second) as url:
        run_cake(f"--against {other.url} --against {url}")
    names = [cell["method"] for cell in read_report(tmp_path)["cells"]]
    assert names == ["cake", "fp8 alone", f"fp8 alone at {url}"]


def test_another_server_must_serve_the_same_model(run_cake, fake, other, tmp_path):
    other.responses["/v1/models"] = 200, '{"data": [{"id": "other"}]}'
    result = run_cake(f"--against {other.url}")
    assert result.status == 2
    assert "must serve fake" in result.err
    assert "got other; start it with the same model, or with --served-model-name fake" in result.err
    assert fake.prompt_requests == []


def test_with_a_model_a_cache_dtype_starts_the_other_server(
    compare, fake, other, tmp_path, monkeypatch
):
    started = []

    def start_low_bit(*arguments):
        started.append(arguments)
        return contextlib.nullcontext(other.url)

    monkeypatch.setattr(compare_server, "start", lambda *_: contextlib.nullcontext(fake.url))
    monkeypatch.setattr(compare_server, "start_low_bit", start_low_bit)
    (tmp_path / "config.json").write_text("{}")
    write_prompts(tmp_path / "mine.jsonl", range(10))
    command = "--model . --prompts mine.jsonl --methods cake --budgets 0.2 --no-baselines"
    command += " --against fp8 -- --enforce-eager"
    result = compare(command)
    assert started == [(Path("."), "fp8", ("--enforce-eager",), Path("out/server-fp8.log"))]
    assert "Starting vllm serve . --kv-cache-dtype fp8; its log is out/server-fp8.log" in result.err
    assert (len(other.prompt_requests), len(fake.prompt_requests)) == (10, 20)
    cell = read_report(tmp_path)["cells"][1]
    assert (cell["method"], cell["server"], cell["bytes"]) == ("fp8 alone", "fp8", 0.5)
    # The server has another port when the run is resumed.
    with server(other) as url:
        other.url = url
        compare(command)
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


@pytest.mark.parametrize(
    ("count", "wrong", "verdict"),
    [
        (10, False, "looks close, but 10 prompts are too few to be sure: its loss by similarity"),
        (10, True, "is not close enough: its loss by similarity is 0.375"),
        (40, False, "is small enough. It keeps all tokens: its loss by similarity is 0.000"),
    ],
)
def test_the_verdict_needs_enough_prompts(run_cake, other, tmp_path, count, wrong, verdict):
    other.wrong_numbers = wrong
    flags = f"--against {other.url} --by similarity --max-drop 0.1"
    run_cake(flags, numbers=range(count))
    (note,) = about_low_bit(read_report(tmp_path))
    assert verdict in note
    assert "and its KL" in note


@pytest.mark.parametrize("cache_dtype", CACHE_FORMATS)
def test_bytes_of_a_format_equal_the_evidences(cache_dtype):
    """For the layers and head size that the function assumes."""
    shares = [CACHE_FORMATS[cache_dtype].share_of_bytes(layer, 32, 128) for layer in range(32)]
    assert share_of_bytes(cache_dtype) == pytest.approx(sum(shares) / 32)


def test_alternatives_are_known_and_plain_caches_take_all_bytes():
    assert all((share_of_bytes(name) or 1) < 1 for name in {*ALTERNATIVES, *LOW_BIT_CACHES})
    assert (share_of_bytes("auto"), share_of_bytes("nvfp4")) == (1.0, None)
