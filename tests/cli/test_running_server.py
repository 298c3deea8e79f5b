"""``kvcompress doctor --url`` and ``health`` on real servers and on fake metrics pages.

One real server has compression on. The other has the same kind of flags and KVCOMPRESS_OFF.
"""

import json
import shlex

import httpx
import pytest
from openai import OpenAI

from endpoint_requests import ENDPOINTS, post, usage_events
from engines import engine
from first_layers import first_layers
from forks import serve_forking
from long_text import long_prompt
from loopback import exported, server

# Float32 is faster on CPUs without bfloat16 instructions.
FLAGS = shlex.split(
    "--enforce-eager --max-model-len 4096 --num-gpu-blocks-override 65 --dtype float32"
    " --served-model-name demo --kv-budget 0.2 --kv-min-prompt 512"
)
COMPRESSED = [*FLAGS, "--kv-compress", "cake", "--kv-allow-override", "cake,snapkv"]
SWITCHED_OFF = FLAGS + shlex.split(
    "--kv-compress cake-chunk --kv-allow-override all --kv-budget-bounds 0.1:0.5 --kv-usage"
    " --kv-protect system --kv-packed-dtype k4v3 --enable-scale-out --kv-alias demo@small=cake:0.2"
)


def checks_of(result) -> dict[str, dict]:
    return {check["name"]: check for check in json.loads(result.out)["checks"]}


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    return first_layers(tmp_path_factory.mktemp("model"), demo_model)


@pytest.fixture(scope="module")
def compressed(model, tmp_path_factory):
    with serve_forking(model, COMPRESSED, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def off(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serve_forking(model, SWITCHED_OFF, folder, KVCOMPRESS_OFF="1") as running:
        yield running


@pytest.mark.engine
@pytest.mark.slow
def test_a_compressing_server_passes_all_checks(compressed, run_in_process):
    before = run_in_process("health", "--url", compressed.url, "--expect-compression")
    assert (before.status, before.out) == (
        0,
        "The server responds; cake compressed 0 of 0 planned prompts.\n",
    )
    result = run_in_process("doctor", "--url", compressed.url, "--expect", "on", "--json")
    checks = checks_of(result)
    assert result.status == 0, result.out
    assert list(checks) == ["server", "compression", "worker", "blocks", "usage"]
    assert "method cake, budget 0.2" in checks["compression"]["detail"]
    assert checks["worker"]["detail"] == "1 of 1 planned prompts compressed (cake)"
    assert "blocks in use while decoding" in checks["usage"]["detail"]
    assert "0 afterwards" in checks["usage"]["detail"]
    after = run_in_process("health", "--url", compressed.url)
    assert "cake compressed 1 of 1 planned" in after.out


@pytest.mark.engine
@pytest.mark.slow
def test_the_request_may_choose_a_method(compressed, run_in_process):
    arguments = ["doctor", "--url", compressed.url, "--kv-compress"]
    result = run_in_process(*arguments, "snapkv", "--kv-budget", "0.5", "--json")
    assert result.status == 0, result.out
    assert "(snapkv)" in checks_of(result)["worker"]["detail"]
    refused = run_in_process(*arguments, "h2o", "--json")
    assert refused.status == 1
    assert "answered 400" in checks_of(refused)["request"]["detail"]
    assert "kv_compress must be one of" in checks_of(refused)["request"]["detail"]


@pytest.mark.engine
@pytest.mark.slow
def test_a_prompt_that_the_server_does_not_compress_is_a_failed_check(compressed, run_in_process):
    result = run_in_process("doctor", "--url", compressed.url, "--tokens", "100", "--json")
    assert result.status == 1
    assert "this server does not compress a prompt of" in checks_of(result)["request"]["detail"]


@pytest.mark.engine
@pytest.mark.slow
def test_expect_checks_whether_compression_is_on(off, run_in_process, compressed):
    for expect in ((), ("--expect", "off")):
        result = run_in_process("doctor", "--url", off.url, *expect, "--json")
        assert result.status == 0
        assert checks_of(result)["compression"] == {
            "name": "compression",
            "ok": True,
            "detail": "off: its operator turned it off, and settings of requests are ignored",
        }
    result = run_in_process("doctor", "--url", off.url, "--expect", "on", "--json")
    assert result.status == 1
    fix = "restart it without KVCOMPRESS_OFF, and with a method in --kv-compress"
    assert checks_of(result)["compression"]["detail"].endswith(f", expected on; {fix}")
    assert run_in_process("health", "--url", off.url).out.endswith("compression is off.\n")
    unhealthy = run_in_process("health", "--url", off.url, "--expect-compression")
    assert unhealthy.status == 1
    assert fix in unhealthy.out
    on = run_in_process("doctor", "--url", compressed.url, "--expect", "off", "--json")
    assert on.status == 1
    assert ", expected off" in checks_of(on)["compression"]["detail"]


# -- a server with KVCOMPRESS_OFF ------------------------------------------------------------------

INVALID = "kv_budget must be a ratio in (0, 1]"


def notes(response) -> list:
    """Return the note on ignored settings of each usage in a response."""
    assert response.status_code == 200, response.text
    found = []
    for event in usage_events(response):
        usage = event["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        assert "kv_compress" not in details
        found.append(details.get("kv_compress_off"))
    assert found
    return found


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_settings_of_requests_are_ignored_with_a_note(off, endpoint, stream):
    for xargs, ignored, error in (
        ({"kv_compress": "cake", "kv_budget": 0.2}, ["kv_compress", "kv_budget"], ""),
        ({"kv_budget": 0.9, "kv_packed_dtype": "k4v3"}, ["kv_budget", "kv_packed_dtype"], ""),
        ({"kv_decode_budget": 99, "kv_lookahead": 1}, ["kv_decode_budget", "kv_lookahead"], ""),
        ({"kv_budget": "many"}, ["kv_budget"], INVALID),
        ({"kv_protect": "sytem", "other": 1}, ["kv_protect"], "'sytem' is unknown"),
        ({"kv_bugdet": 1}, None, "did you mean 'kv_budget'?"),
        ({"kv_alias": "demo@small"}, ["kv_alias"], ""),
    ):
        for note in notes(post(off, endpoint, "Hello", xargs, stream)):
            assert note.get("ignored") == ignored
            assert ("error" in note) == bool(error)
            assert error in note.get("error", "")
    for xargs, name in (({}, "demo"), ({"other": 1}, "demo"), ({}, "demo@small")):
        assert set(notes(post(off, endpoint, "Hello", xargs, stream, name))) == {None}


@pytest.mark.engine
@pytest.mark.slow
def test_misplaced_settings_and_other_endpoints_are_answered_too(off):
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    outside = httpx.post(f"{off.url}/v1/chat/completions", json={**chat, "kv_budget": 0.2})
    (note,) = notes(outside)
    assert note["ignored"] == ["kv_budget"]
    assert "must be inside vllm_xargs" in note["error"]
    batch = {**chat, "messages": [chat["messages"]] * 2, "vllm_xargs": {"kv_budget": 0.2}}
    answers = httpx.post(f"{off.url}/v1/chat/completions/batch", json=batch, timeout=60)
    assert notes(answers) == [{"ignored": ["kv_budget"]}]
    del batch["vllm_xargs"]
    answers = httpx.post(f"{off.url}/v1/chat/completions/batch", json=batch, timeout=60)
    assert set(notes(answers)) == {None}
    batch["vllm_xargs"] = "no object"
    answers = httpx.post(f"{off.url}/v1/chat/completions/batch", json=batch, timeout=60)
    assert answers.status_code == 400  # by vLLM, for each chat of the batch
    generate = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}
    generate["sampling_params"]["extra_args"] = {"kv_budget": 0.2}
    answers = httpx.post(f"{off.url}/inference/v1/generate", json=generate, timeout=60)
    assert notes(answers) == [{"ignored": ["kv_budget"]}]
    message = {**chat, "kv_budget": 0.2, "vllm_xargs": {"kv_compress": "cake"}}
    answers = httpx.post(f"{off.url}/v1/messages", json=message, timeout=60)
    assert answers.status_code == 200, answers.text
    assert "kv_compress" not in answers.text


@pytest.mark.engine
@pytest.mark.slow
def test_outputs_are_vllms_own_for_every_method_and_alias(off, model, demo_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    ids, count = tokenizer.encode(long_prompt(tokenizer, 1500)), 48
    options = {"additional_config": {}, "block_size": 128, "max_model_len": 4096}
    with engine(model, **options) as llm:
        (alone,) = llm.generate([ids], count)
    client = OpenAI(base_url=f"{off.url}/v1", api_key="none", timeout=300)
    assert [each.id for each in client.models.list()] == ["demo", "demo@small"]
    for name, xargs in (
        ("demo", {}),
        ("demo", {"kv_compress": "cake", "kv_budget": 0.1}),
        ("demo", {"kv_budget": 0.2}),
        ("demo@small", {}),
    ):
        response = client.completions.create(
            model=name,
            prompt=ids,
            max_tokens=count,
            temperature=0,
            extra_body={"ignore_eos": True, "vllm_xargs": xargs, "return_token_ids": True},
        )
        assert response.choices[0].token_ids == alone
        assert response.model == name
        details = response.usage.prompt_tokens_details
        if xargs:
            assert details.kv_compress_off == {"ignored": list(xargs)}
    metrics = httpx.get(f"{off.url}/metrics").text
    ours = [line for line in metrics.splitlines() if line.startswith("vllm:kv_compress")]
    assert ours == ['vllm:kv_compress_off{engine="0",model_name="demo"} 1.0']
    assert "KV-cache compression is off, because KVCOMPRESS_OFF is set" in off.log.read_text()


# -- fake servers, which compress nothing or fail --------------------------------------------------


class FakePages:
    """A server whose metrics page changes during and after a completion."""

    def __init__(self, before: str, during: str, after: str, completion=(200, None)) -> None:
        self.before, self.during, self.after = before, during, after
        self.completion, self.completion_requested, self.num_reads = completion, False, 0

    def __call__(self, path: str, body: bytes) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "m", "max_model_len": 8192}]})
        if path == "/tokenize":
            return 200, json.dumps({"tokens": list(range(5000))})
        if path == "/v1/completions":
            self.completion_requested = True
            status, text = self.completion
            count = json.loads(body)["max_tokens"]
            return status, text or "data: {}\n\n" * count + "data: [DONE]\n"
        if path == "/metrics":
            return 200, self._metrics()
        return 200, ""

    def _metrics(self) -> str:
        if not self.completion_requested:
            return self.before
        self.num_reads += 1
        return self.during if self.num_reads <= 7 else self.after


def on(planned: int, compressed: int, **figures) -> str:
    """Return the metrics page of a server with one engine and compression on."""
    return exported({"0": planned}, {"0": compressed}, **figures)


@pytest.mark.parametrize(
    ("respond", "status", "failed_check", "detail"),
    [
        (FakePages(on(3, 3), on(4, 4, freed=60, running=1, usage=0.015), on(4, 4, freed=60)),
         0, None, "15 blocks in use"),
        (FakePages(on(3, 3), on(4, 3, running=1), on(4, 3)),
         1, "worker", "0 of 1 planned prompts were compressed"),
        (FakePages(on(3, 3), on(3, 3, running=1), on(3, 3)), 1, "worker", "stayed uncompressed"),
        (FakePages(on(3, 3), on(4, 4, running=1), on(4, 4)), 1, "blocks", "no memory was saved"),
        (FakePages(on(3, 3), on(4, 4, freed=60, running=1, usage=0.07), on(4, 4, freed=60)),
         1, "usage", "70 blocks in use while decoding"),
        (FakePages(on(3, 3), on(4, 4, freed=60, running=1), on(4, 4, freed=60, usage=0.01)),
         1, "usage", "10 afterwards"),
        (FakePages(on(3, 3), on(9, 9, freed=60, running=5, usage=0.9), on(9, 9, freed=60)),
         0, None, "not checked: the server is serving other requests"),
        (FakePages(on(3, 3), "", "", (500, '{"error": {"message": "no luck"}}')),
         1, "request", "/v1/completions answered 500: no luck"),
        (FakePages(on(3, 3), "", "", (200, 'data: {"error": {"message": "died"}}\n')),
         1, "request", "/v1/completions failed: died"),
    ],
    ids=[
        "ok", "no-op", "uncompressed", "not freed", "too many", "leaked", "busy", "refused", "died",
    ],
)  # fmt: skip
def test_metrics_decide_the_checks(
    run_in_process, monkeypatch, respond, status, failed_check, detail
):
    monkeypatch.setattr("vllm_kvcompress.doctor.server_probe._SETTLE_TIMEOUT_S", 0.5)
    with server(respond) as url:
        result = run_in_process("doctor", "--url", url, "--json")
    checks = checks_of(result)
    assert result.status == status, checks
    assert detail in result.out
    failed = [name for name, check in checks.items() if not check["ok"]]
    assert failed[:1] == ([failed_check] if failed_check else [])


@pytest.mark.parametrize(("draft_labels", "in_use"), [
    ("", 17), ('draft_layers="1",', 28), ('draft_layers="1",draft_slots="16",', 29),
])  # fmt: skip
def test_the_planned_blocks_include_drafts(draft_labels, in_use, run_in_process):
    """A draft model's layer keeps all tokens, and its drafts take slots behind them."""

    def page(*args, **figures) -> str:
        return on(*args, **figures).replace('method="cake",min', f'method="cake",{draft_labels}min')

    for blocks, status in ((in_use, 0), (in_use + 1, 1)):
        pages = FakePages(
            page(3, 3),
            page(4, 4, freed=99, running=1, usage=blocks / 1000),
            page(4, 4, freed=99),
        )
        with server(pages) as url:
            result = run_in_process("doctor", "--url", url, "--json")
        assert result.status == status, result.out
        assert f"at most {in_use} planned" in result.out


@pytest.mark.parametrize("meaning", ["cake:0.2", "cake:0.9:k4v3"])
def test_a_server_that_compresses_under_aliases_only_is_checked_with_one(meaning, run_in_process):
    names = json.dumps(json.dumps({"m@full": "off", "m@kv": meaning}))
    labels = f'method="off",alias={names},packed_dtype="",packed_page_tokens="64",min'

    def page(*args, **figures) -> str:
        return on(*args, **figures).replace('method="cake",min', labels)

    pages = FakePages(page(3, 3), page(4, 4, freed=60, running=1), page(4, 4, freed=60))
    bodies = []

    def respond(path, body):
        if path == "/v1/completions":
            bodies.append(json.loads(body))
        return pages(path, body)

    with server(respond) as url:
        result = run_in_process("doctor", "--url", url, "--json")
    assert result.status == 0, result.out
    assert "1 of 1 planned prompts compressed (cake)" in result.out
    assert [(body["model"], body.get("vllm_xargs")) for body in bodies] == [("m@kv", None)]


@pytest.mark.parametrize(
    "labels",
    ['method="off",allow_override="cake-chunk",lookahead=""', 'method="cake",lookahead="0"'],
    ids=["opt-in", "another method"],
)
def test_a_chosen_method_has_its_own_look_ahead(labels, run_in_process):
    """The prompt stays uncompressed for the first 2 of the 7 times that its blocks are counted."""

    def page(*args, **figures) -> str:
        return on(*args, **figures).replace('method="cake",min', f"{labels},min")

    class WithLookahead(FakePages):
        def _metrics(self) -> str:
            metrics = super()._metrics()
            if self.completion_requested and self.num_reads <= 2:
                return page(3, 3, running=1, usage=0.07)
            return metrics

    pages = WithLookahead(
        page(3, 3), page(4, 4, freed=60, running=1, usage=0.015), page(4, 4, freed=60)
    )
    with server(pages) as url:
        result = run_in_process("doctor", "--url", url, "--kv-compress", "cake-chunk", "--json")
    assert result.status == 0, result.out
    assert "15 blocks in use" in checks_of(result)["usage"]["detail"]


def test_a_server_without_the_plugins_metrics_is_off(run_in_process):
    with server(FakePages(exported({}, {}), "", "")) as url:
        result = run_in_process("doctor", "--url", url, "--expect", "on", "--json")
        assert result.status == 1
        detail = checks_of(result)["compression"]["detail"]
        assert "expected on; start it with --kv-compress" in detail
        result = run_in_process("doctor", "--url", url, "--json")
        assert (result.status, list(checks_of(result))) == (0, ["server", "compression"])


def test_a_server_without_k4v3_fails_the_check_of_a_request_for_it(run_in_process):
    with server(FakePages(on(3, 3), "", "")) as url:
        result = run_in_process("doctor", "--url", url, "--kv-packed-dtype", "k4v3", "--json")
    assert result.status == 1
    assert "does not pack prompts in k4v3" in checks_of(result)["request"]["detail"]


def test_a_server_that_is_not_vllm_is_a_failed_check(run_in_process):
    with server(lambda path, body: (404, "not here")) as url:
        result = run_in_process("doctor", "--url", url)
    assert result.status == 1
    assert "/v1/models answered 404: not here" in result.out


def test_control_characters_of_the_server_are_not_printed(run_in_process):
    page = exported({"0": 0}, {}).replace(
        'method="cake",min', 'method="\x1b[2J",pressure="\x9b",min'
    )
    with server(FakePages(page, page, page)) as url:
        shown = run_in_process("doctor", "--url", url, "--expect", "off")
    assert "method ?[2J" in shown.out
    assert all(line.isprintable() for line in (shown.out + shown.err).split("\n"))
    with server(lambda path, _: (200, "") if path == "/health" else (404, "\x1b[2J\u202e")) as url:
        shown = run_in_process("doctor", "--url", url)
    assert "/v1/models answered 404: ?[2J?" in shown.out


def test_an_unreachable_server_is_a_failed_check(run_in_process):
    result = run_in_process("doctor", "--url", "http://127.0.0.1:9", "--json")
    assert result.status == 1
    assert "does not answer" in checks_of(result)["server"]["detail"]
