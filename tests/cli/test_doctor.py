"""``kvcompress doctor`` on working engines, and on engines that silently do not compress."""

import io
import json
import shlex
import struct
import subprocess
import zlib
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from rich.console import Console
from vllm.v1.core.block_pool import BlockPool

from added_methods import installed, write_package
from draft_checkpoints import make_eagle
from first_layers import LAYERS, first_layers
from site_patches import WITHOUT_VLLM, patch_on_import, without_packages, write_site
from vllm_kvcompress.doctor.kept import KeptMap, show_kept
from vllm_kvcompress.doctor.probe_prompt import Limits
from vllm_kvcompress.engine.compression.compressor import PromptCompressor
from vllm_kvcompress.engine.compression.packer import Packer
from vllm_kvcompress.engine.scheduling.request_schedules import RequestSchedules
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.methods.registry import RECOMMENDED
from vllm_kvcompress.serving.text import english
from vllm_kvcompress.settings.config import CompressionConfig

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TINY = shlex.split(
    "--kv-min-prompt 128 --timeout 1500 -- --enforce-eager --block-size 32 --dtype float32"
    " --max-model-len 2048 --skip-tokenizer-init --num-gpu-blocks-override 129"
)
CHECK_NAMES = shlex.split("versions plugin hooks model engine classes worker blocks pool")


def checks(done) -> dict[str, dict]:
    """Return a finished command's checks by name, after checking that its report is consistent."""
    ran = isinstance(done, subprocess.CompletedProcess)
    out, status = (done.stdout, done.returncode) if ran else (done.out, done.status)
    found = json.loads(out)
    assert set(found) <= {"ok", "checks", "kept", "picture"}
    for check in found["checks"]:
        assert set(check) == {"name", "ok", "detail"}
        assert isinstance(check["ok"], bool)
        assert check["detail"]
        assert "\n" not in check["detail"]
    assert found["ok"] is all(check["ok"] for check in found["checks"])
    assert status == (0 if found["ok"] else 1)
    return {check["name"]: check for check in found["checks"]}


@pytest.fixture(scope="module")
def two_layers(demo_model, tmp_path_factory):
    return first_layers(tmp_path_factory.mktemp("model"), demo_model)


@pytest.fixture(scope="module")
def explained(two_layers, tmp_path_factory, run_in):
    folder, model = tmp_path_factory.mktemp("explained"), two_layers
    done = run_in(
        folder, "doctor", model, "--kv-budget", "0.2", "--tokens", "2000", "--explain",
        "--picture", "kept.png", "--json", "--", "--enforce-eager", "--max-model-len", "2304",
        "--num-gpu-blocks-override", "33", "--dtype", "float32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done, folder


def test_all_checks_pass_on_a_real_model(explained):
    done, _ = explained
    found = checks(done)
    assert list(found) == CHECK_NAMES
    assert "vLLM 0.3" in found["versions"]["detail"]
    assert "CompressingCPUWorker" in found["classes"]["detail"]
    assert "CPU_ATTN" in found["classes"]["detail"]
    plan = plan_of(2000, 0.2)
    assert f"into {plan.pages} pages" in found["worker"]["detail"]
    held = plan.blocks + 1  # plus the tail's block
    assert found["blocks"]["detail"].startswith(f"{held} held while decoding, as planned, instead")


def plan_of(tokens: int, budget: float):
    settings = CompressionConfig.parse({"compress": RECOMMENDED, "budget": budget})
    plan = page_plan(settings.budget_spec(LAYERS, tokens), 128)
    assert plan is not None
    return plan


def test_kept_shares_of_a_chat_are_reported_by_role(two_layers, tmp_path, run_doctor_in_process):
    """Every layer and head keeps the protected tokens, and the page plan includes them."""
    body = {
        "messages": [
            {"role": "system", "content": "Never say the word orange. " * 30},
            {"role": "user", "content": english()[:6000]},
            {"role": "assistant", "content": "I have read it. " * 10},
            {"role": "user", "content": "What is it about?"},
        ]
    }
    (tmp_path / "chat.json").write_text(json.dumps(body))
    done = run_doctor_in_process(
        "doctor", two_layers, "--kv-budget", "0.05", "--prompt-file", tmp_path / "chat.json",
        "--kv-compress-config", '{"protect": "system"}', "--explain", "--json", "--",
        "--enforce-eager", "--max-model-len", "2304", "--num-gpu-blocks-override", "33",
        "--dtype", "float32",
    )  # fmt: skip
    assert done.status == 0, done.err[-2000:]
    kept = KeptMap.from_json(json.loads(done.out)["kept"])
    assert list(kept.parts) == ["system", "user", "assistant", "template"]
    assert sum(tokens for tokens, _ in kept.parts.values()) == kept.prompt_tokens
    shares = {name: share for name, (_, share) in kept.parts.items()}
    assert shares["system"] == 1
    assert shares["user"] < 0.3
    assert kept.mean == pytest.approx(sum(tokens * share for tokens, share in kept.parts.values()))
    assert f"system 100% of {kept.parts['system'][0]:,}, user" in kept.by_part


def test_kept_map_matches_the_page_plan(explained):
    kept = json.loads(explained[0].stdout)["kept"]
    plan = plan_of(2000, 0.2)
    assert sum(kept["kept_tokens"]) == plan.pages * 128 + LAYERS * plan.tail
    assert (kept["method"], kept["budget"], kept["prompt_tokens"]) == (RECOMMENDED, 0.2, 2000)
    assert len(set(kept["kept_tokens"])) > 1  # CAKE gives layers different shares
    assert len(kept["share"]) == LAYERS
    for tokens, share in zip(kept["kept_tokens"], kept["share"], strict=True):
        edges = [-(-bucket * 2000 // len(share)) for bucket in range(len(share) + 1)]
        kept_tokens = sum(
            part * (stop - start)
            for part, start, stop in zip(share, edges, edges[1:], strict=False)
        )
        assert kept_tokens == pytest.approx(tokens)
        assert share[-1] == 1  # the window and the tail
        assert all(0 <= part <= 1 for part in share)


def test_picture_has_a_row_per_layer(explained):
    done, folder = explained
    assert json.loads(done.stdout)["picture"] == "kept.png"
    rows = decoded(folder / "kept.png")
    # This column crosses the bars, right of the heat map: each layer's bar is one run of blue.
    assert bars(rows, column=round(len(rows[0]) * 0.7475)) == LAYERS


def decoded(path) -> list[list[tuple[int, int, int]]]:
    """Return the pixels of an 8-bit PNG with four channels, after checking its header."""
    from matplotlib.image import imread

    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert zlib.crc32(data[12:29]) == struct.unpack(">I", data[29:33])[0]
    pixels = imread(path)
    return [[tuple(round(255 * c) for c in pixel[:3]) for pixel in row] for row in pixels.tolist()]


def bars(rows: list[list[tuple[int, int, int]]], column: int) -> int:
    """Count the runs of the bars' blue in one column of pixels."""
    blue = [row[column] == (0x21, 0x71, 0xB5) for row in rows]
    return sum(this and not above for above, this in zip([False, *blue], blue, strict=False))


def test_text_has_a_line_per_layer_with_the_same_tokens(explained):
    kept = KeptMap.from_json(json.loads(explained[0].stdout)["kept"])
    out = io.StringIO()
    show_kept(kept, Console(file=out, width=100))
    lines = [line for line in out.getvalue().splitlines() if line[:5].strip().isdigit()]
    assert [int(line[:5]) for line in lines] == list(range(LAYERS))
    shown = [int(line.split()[1].replace(",", "")) for line in lines]
    plan = plan_of(2000, 0.2)
    assert sum(shown) == plan.pages * 128 + LAYERS * plan.tail
    assert all(line.rstrip()[-1] in "▁▂▃▄▅▆▇█" for line in lines)


@pytest.fixture
def run_with_site(run_in_process, tmp_path, monkeypatch):
    """Return a function that runs ``kvcompress`` in this process, and `site` in its child's."""

    def command(site, *arguments):
        write_site(tmp_path, site)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return run_in_process(*arguments)

    return command


def test_methods_of_other_packages_are_checked(run_doctor_in_process, tmp_path):
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.mkdir()
    wrong.mkdir()
    with installed(write_package(right)):
        found = checks(run_doctor_in_process("doctor", "--json"))
    assert found["methods"]["detail"] == "kvcompress-evens 1.0 (preset.evens, scorer.evens)"
    with installed(write_package(wrong, code="raise OSError('no disk')")):
        found = checks(run_doctor_in_process("doctor", "--json"))
    assert [*found] == ["versions", "plugin", "methods"]
    assert not found["methods"]["ok"]
    assert "OSError: no disk" in found["methods"]["detail"]


def test_doctor_requests_compression_if_it_is_opt_in(run_doctor_in_process, tiny):
    config = '{"compress": "off", "allow_override": "all"}'
    done = run_doctor_in_process("doctor", tiny, "--json", "--kv-compress-config", config, *TINY)
    found = checks(done)
    assert found["worker"]["ok"], done.err
    assert list(found) == CHECK_NAMES


@pytest.mark.parametrize("lookahead", [0, 32])
def test_prompt_longer_than_the_pool_passes(lookahead, run_doctor_in_process, tiny):
    """The kept map shows the tokens kept after the last piece, as positions in the prompt."""
    small = ["--kv-max-whole", "768", "--kv-piece", "256", "--num-gpu-blocks-override", "33"]
    small += ["--kv-lookahead", str(lookahead)]
    done = run_doctor_in_process(
        "doctor", tiny, "--json", "--explain", "--tokens", "1500", *TINY, *small
    )
    found = checks(done)
    assert list(found) == CHECK_NAMES
    assert all(check["ok"] for check in found.values()), done.err
    kept = json.loads(done.out)["kept"]
    assert kept["prompt_tokens"] == 1500
    assert sum(kept["kept_tokens"]) < 0.25 * 1500 * len(kept["kept_tokens"])
    if not lookahead:  # with a look-ahead, the window and the tail are output tokens
        assert all(share[-1] == 1 for share in kept["share"])
    assert all(sum(share) < len(share) / 2 for share in kept["share"])


@pytest.mark.parametrize(
    ("method", "budget"), [("cake", "1.0"), ("cake-chunk", "0.4"), ("cake-chunk", "1.0")]
)
def test_kept_tokens_in_k4v3_are_checked(method, budget, run_doctor_in_process, wide):
    flags = ["--kv-compress", method, "--kv-budget", budget, "--kv-packed-dtype", "k4v3"]
    flags += ["--tokens", "1500", "--explain"]
    done = run_doctor_in_process("doctor", wide, "--json", *flags, *TINY)
    found = checks(done)
    assert list(found) == CHECK_NAMES
    assert all(check["ok"] for check in found.values()), done.err
    kept = KeptMap.from_json(json.loads(done.out)["kept"])
    assert kept.title == f"qwen3, {method}, budget {budget}, k4v3"
    waits = (method, budget) == ("cake-chunk", "0.4")
    assert ("look-ahead" in found["blocks"]["detail"]) == waits
    share = kept.mean / 1500
    assert share == 1 if budget == "1.0" else 0.3 < share < 0.6


@pytest.mark.parametrize("method", ["cake", "cake-chunk"])
def test_prompts_in_pieces_in_k4v3_are_checked(method, run_doctor_in_process, wide):
    flags = ["--kv-compress", method, "--kv-budget", "1.0", "--kv-packed-dtype", "k4v3"]
    pieces = ["--kv-max-whole", "256", "--kv-piece", "96"]
    done = run_doctor_in_process(
        "doctor", wide, "--json", *flags, "--tokens", "1500", *TINY, *pieces
    )
    found = checks(done)
    assert list(found) == CHECK_NAMES
    assert all(check["ok"] for check in found.values()), done.err


@pytest.mark.parametrize("method", ["cake", "d2o"])
def test_decode_budget_is_checked(method, run_doctor_in_process, tiny, monkeypatch):
    """The doctor lowers a large budget so the output is packed, and detects if it is not."""
    bounded = ["--kv-compress", method, "--kv-decode-budget", "4096"]
    flags = [*TINY, *bounded, "--kv-decode-interval", "32"]
    found = checks(run_doctor_in_process("doctor", tiny, "--json", *flags))
    assert list(found) == [*CHECK_NAMES[:-2], "answer", *CHECK_NAMES[-2:]]
    assert all(check["ok"] for check in found.values()), found
    assert "1 of 1 ranks packed the output as it grew" in found["answer"]["detail"]
    if method == "cake":
        run = Packer.run
        prompt_jobs = lambda jobs: [job for job in jobs if job.pack_request.prefill]  # noqa: E731
        monkeypatch.setattr(Packer, "run", lambda self, jobs: run(self, prompt_jobs(jobs)))
        found = checks(run_doctor_in_process("doctor", tiny, "--json", *flags))
        assert "does not limit the output's tokens" in found["answer"]["detail"]
        assert [name for name, check in found.items() if not check["ok"]] == ["answer"]


def test_doctor_without_a_model_checks_the_installation(run_doctor_in_process):
    done = run_doctor_in_process("doctor", "--json")
    assert list(checks(done)) == CHECK_NAMES[:3]
    assert done.status == 0


def test_worker_that_packs_nothing_is_detected(run_doctor_in_process, tiny, monkeypatch):
    """The worker acknowledges the plan without packing, so blocks are freed without an error."""
    end = lambda self: (self._step.plan and self._step.plan.number, self.abort_step())[0]  # noqa: E731
    monkeypatch.setattr(PromptCompressor, "end_step", end)
    found = checks(run_doctor_in_process("doctor", tiny, "--json", *TINY))
    assert not found["worker"]["ok"]
    assert "compression is on but does not run" in found["worker"]["detail"]


def test_scheduler_that_plans_nothing_is_detected(run_doctor_in_process, tiny, monkeypatch):
    monkeypatch.setattr(RequestSchedules, "_prefill_schedule", lambda self, *_: None)
    found = checks(run_doctor_in_process("doctor", tiny, "--json", *TINY))
    assert not found["worker"]["ok"]
    assert not found["blocks"]["ok"]
    assert "blocks were not freed" in found["blocks"]["detail"]


def test_plugin_that_vllm_does_not_load_is_detected(run_in_process, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another")  # for the child process
    found = checks(run_in_process("doctor", "--json"))
    assert not found["plugin"]["ok"]
    assert "VLLM_PLUGINS='another' does not list it" in found["plugin"]["detail"]


def test_vllm_without_a_hook_is_detected(run_doctor_in_process, monkeypatch):
    monkeypatch.delattr(BlockPool, "evict_blocks")
    found = checks(run_doctor_in_process("doctor", "--json"))
    assert not found["hooks"]["ok"]
    assert "no vllm.v1.core.block_pool:BlockPool.evict_blocks" in found["hooks"]["detail"]


@pytest.mark.parametrize(
    ("package", "check", "fix"),
    [
        # imported when vLLM lists its flags
        (
            "partial_json_parser",  # pip still lists it as installed
            "plugin",
            "run `pip install --force-reinstall --no-deps"
            f" 'partial-json-parser=={version('partial-json-parser')}'`",
        ),
        # imported with vLLM itself; its distribution has a different name
        ("openai_harmony", "versions", "run `pip check`, and install what it reports"),
    ],
)
def test_missing_package_of_vllm_is_named_once(run_with_site, package, check, fix):
    found = checks(run_with_site(without_packages(package), "doctor", "--json"))
    detail = found[check]["detail"]
    assert not found[check]["ok"]
    assert detail.count(f"needs the Python package {package}, which is not installed") == 1
    assert detail.endswith(fix)
    assert "has no" not in detail


def test_crashed_child_process_leaves_a_report(run_with_site):
    site = patch_on_import(
        "vllm_kvcompress.engine.startup.vllm_hooks",
        "module.VllmHook.check = lambda self, version: __import__('os').abort()",
    )
    done = run_with_site(site, "doctor", "--json")
    assert checks(done)["engine"] == {
        "name": "engine",
        "ok": False,
        "detail": "its process was killed by signal 6; see its log with --verbose",
    }
    assert "The end of vLLM's log:" in done.err


def test_missing_vllm_is_reported(run):
    done = run("doctor", site=WITHOUT_VLLM)
    assert done.returncode == 1
    assert "vLLM is not installed for this Python" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["nowhere/a/model"], "there is no folder nowhere/a/model"),
        (["TINY", "--url", "http://127.0.0.1:9"], "give either MODEL to start an engine or --url"),
        (["--explain"], "--explain starts its own engine and needs MODEL"),
        (["TINY", "--picture", "x.png"], "--picture needs --explain"),
        (["--kv-compress", "cake"], "flags of vllm serve need MODEL or --url"),
        (["TINY", "--kv-compress", "caek"], "did you mean 'cake'"),
        (["TINY", "--expect", "maybe"], "--expect must be on or off"),
        (["TINY", "--prompt-file", "none.txt"], "--prompt-file none.txt cannot be read"),
        (["--url", "http://127.0.0.1:9", "--kv-window", "8"], "the server sets ['window']"),
        (["--url", "http://127.0.0.1:9", "--kv-packed-dtype", "k4v4"], "did you mean 'k4v3'"),
        (["--url", "127.0.0.1:9"], "--url must be a server's address"),
    ],
)
def test_wrong_usage_prints_one_sentence_and_exits_with_2(run_in_process, tiny, flags, sentence):
    done = run_in_process("doctor", *[tiny if flag == "TINY" else flag for flag in flags], "--json")
    assert done.status == 2
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert line.startswith("kvcompress: error: ")
    assert sentence in line


def test_flag_that_vllm_rejects_exits_with_2(run_in_process, tiny):
    """The command takes its exit status and its message from the child process."""
    done = run_in_process("doctor", tiny, "--json", "--", "--no-such-flag")
    assert (done.status, done.out) == (2, "")
    assert "unrecognized arguments: --no-such-flag" in done.err.splitlines()[-1]


def test_prompt_that_stays_uncompressed_exits_with_2(run_doctor_in_process, tiny):
    done = run_doctor_in_process("doctor", tiny, "--json", "--tokens", "20", *TINY)
    assert (done.status, done.out) == (2, "")
    assert "these settings do not compress a prompt of 20 tokens" in done.err.splitlines()[-1]


def test_blocks_of_draft_layers_are_checked(run_doctor_in_process, tiny, monkeypatch):
    """They are in the planned blocks. If the plan left them out, too many blocks were held."""
    eagle = {"method": "eagle", "model": make_eagle(tiny), "num_speculative_tokens": 2}
    flags = [*TINY, "--kv-lookahead", "3", "--speculative-config", json.dumps(eagle)]
    found = checks(run_doctor_in_process("doctor", tiny, "--json", *flags))
    assert all(check["ok"] for check in found.values()), found
    assert "8 pages for all tokens of the draft model's layers" in found["worker"]["detail"]
    assert "Not checked: what those pages hold" in found["worker"]["detail"]
    assert "as planned" in found["blocks"]["detail"]
    planned = Limits.request
    monkeypatch.setattr(
        Limits, "request", lambda self, tokens: planned(replace(self, draft_layers=0), tokens)
    )
    found = checks(run_doctor_in_process("doctor", tiny, "--json", *flags))
    assert [name for name, check in found.items() if not check["ok"]] == ["blocks"]


def test_unsupported_model_fails_the_model_check(run_doctor_in_process, tiny):
    three = ["--pipeline-parallel-size", "3"]
    found = checks(run_doctor_in_process("doctor", tiny, "--json", *TINY, *three))
    assert not found["model"]["ok"]
    assert "every pipeline stage must have the same number of layers" in found["model"]["detail"]


def test_the_off_switch_passes_the_checks_of_an_unsupported_model(
    run_doctor_in_process, tiny, monkeypatch
):
    monkeypatch.setenv("KVCOMPRESS_OFF", "1")
    flags = [*TINY, "--pipeline-parallel-size", "3"]
    done = run_doctor_in_process("doctor", tiny, "--expect", "off", "--json", *flags)
    found = checks(done)
    assert done.status == 0, done.err
    why = "off: vLLM runs unchanged, because KVCOMPRESS_OFF is set"
    assert found["compression"]["detail"] == why
    done = run_doctor_in_process("doctor", tiny, "--expect", "on", "--json", *flags)
    assert checks(done)["expected"]["detail"] == "compression is off, expected on"


@pytest.mark.parametrize(("amx", "packed_dtype", "dtype", "slow"), [
    (True, "k4v3", torch.bfloat16, True),
    (True, "k4v3", torch.float32, False),
    (True, "auto", torch.bfloat16, False),
    (False, "k4v3", torch.bfloat16, False),
])  # fmt: skip
def test_slow_decoding_in_k4v3_is_named(amx, packed_dtype, dtype, slow, monkeypatch):
    from vllm_kvcompress.engine.doctor.trial_engine import _support

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_tile": amx})
    settings = CompressionConfig.parse({"compress": RECOMMENDED, "packed_dtype": packed_dtype})
    support = _support(settings, dtype)
    assert support.startswith(f"supported by {RECOMMENDED}")
    assert ("1.2 times as long" in support) is slow
