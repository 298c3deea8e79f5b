"""``doctor --url`` and ``health`` on servers: real ones, and pages of ones that do nothing."""

import json

import pytest

from first_layers import first_layers
from forks import serve_forking
from loopback import exported, server

FLAGS = [
    "--enforce-eager",
    "--max-model-len",
    "4096",
    "--num-gpu-blocks-override",
    "65",
    "--dtype",
    "float32",  # the faster one where a CPU has no instructions for bfloat16
]
COMPRESSED = [
    *FLAGS, "--served-model-name", "demo", "--kv-compress", "cake", "--kv-budget", "0.2",
    "--kv-min-prompt", "512", "--kv-allow-override", "cake,snapkv",
]  # fmt: skip


def found(done) -> dict[str, dict]:
    return {check["name"]: check for check in json.loads(done.out)["checks"]}


@pytest.fixture(scope="module")
def compressed(demo_model, tmp_path_factory):
    model = first_layers(tmp_path_factory.mktemp("model"), demo_model)
    with serve_forking(model, COMPRESSED, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def off(tiny, tmp_path_factory):
    flags = [*FLAGS, "--skip-tokenizer-init"]
    with serve_forking(tiny, flags, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.mark.engine
@pytest.mark.slow
def test_a_compressed_server_is_well(compressed, typed):
    before = typed("health", "--url", compressed.url, "--expect-compression")
    assert (before.status, before.out) == (
        0,
        "The server answers; cake compressed 0 of 0 planned prompts.\n",
    )
    done = typed("doctor", "--url", compressed.url, "--expect", "on", "--json")
    checks = found(done)
    assert done.status == 0, done.out
    assert list(checks) == ["server", "compression", "worker", "blocks", "usage"]
    assert "method cake, budget 0.2" in checks["compression"]["detail"]
    assert checks["worker"]["detail"] == "1 of 1 planned prompts compressed (cake)"
    assert "blocks in use while decoding" in checks["usage"]["detail"]
    assert "0 afterwards" in checks["usage"]["detail"]
    after = typed("health", "--url", compressed.url)
    assert "cake compressed 1 of 1 planned" in after.out


@pytest.mark.engine
@pytest.mark.slow
def test_the_prompt_asks_for_a_method_of_its_own(compressed, typed):
    ask = ["doctor", "--url", compressed.url, "--kv-compress"]
    done = typed(*ask, "snapkv", "--kv-budget", "0.5", "--json")
    assert done.status == 0, done.out
    assert "(snapkv)" in found(done)["worker"]["detail"]
    refused = typed(*ask, "h2o", "--json")
    assert refused.status == 1
    assert "answered 400" in found(refused)["request"]["detail"]
    assert "kv_compress must be one of" in found(refused)["request"]["detail"]


@pytest.mark.engine
@pytest.mark.slow
def test_a_prompt_that_would_be_left_whole_proves_nothing(compressed, typed):
    done = typed("doctor", "--url", compressed.url, "--tokens", "100", "--json")
    assert done.status == 1
    assert "is left whole by this server; pass --tokens" in found(done)["request"]["detail"]


@pytest.mark.engine
@pytest.mark.slow
def test_a_server_without_compression(off, typed, compressed):
    done = typed("doctor", "--url", off.url, "--json")
    assert done.status == 0
    assert list(found(done)) == ["server", "compression"]
    done = typed("doctor", "--url", off.url, "--expect", "on", "--json")
    assert done.status == 1
    assert "it is expected on; start it with --kv-compress" in found(done)["compression"]["detail"]
    assert typed("health", "--url", off.url).status == 0
    assert typed("health", "--url", off.url, "--expect-compression").status == 1
    on = typed("doctor", "--url", compressed.url, "--expect", "off", "--json")
    assert on.status == 1
    assert "it is expected off" in found(on)["compression"]["detail"]


# -- servers that only say what a test wants: doing nothing, and answering wrongly --------------


class Pages:
    """A server's pages: metrics before, while and after it answered a completion."""

    def __init__(self, before: str, during: str, after: str, completion=(200, None)) -> None:
        self.before, self.during, self.after = before, during, after
        self.completion, self.asked, self.reads = completion, False, 0

    def __call__(self, path: str, body: bytes) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "m", "max_model_len": 8192}]})
        if path == "/tokenize":
            return 200, json.dumps({"tokens": list(range(5000))})
        if path == "/v1/completions":
            self.asked = True
            status, text = self.completion
            count = json.loads(body)["max_tokens"]
            return status, text or "data: {}\n\n" * count + "data: [DONE]\n"
        if path == "/metrics":
            return 200, self._metrics()
        return 200, ""

    def _metrics(self) -> str:
        if not self.asked:
            return self.before
        self.reads += 1
        return self.during if self.reads <= 7 else self.after


def on(planned: int, done: int, **more) -> str:
    return exported({"0": planned}, {"0": done}, **more)


@pytest.mark.parametrize(
    ("pages", "status", "wrong", "detail"),
    [
        (Pages(on(3, 3), on(4, 4, freed=60, running=1, usage=0.015), on(4, 4, freed=60)),
         0, None, "15 blocks in use"),
        (Pages(on(3, 3), on(4, 3, running=1), on(4, 3)),
         1, "worker", "planned to be compressed and none was"),
        (Pages(on(3, 3), on(3, 3, running=1), on(3, 3)), 1, "worker", "was left whole"),
        (Pages(on(3, 3), on(4, 4, running=1), on(4, 4)), 1, "blocks", "nothing was won"),
        (Pages(on(3, 3), on(4, 4, freed=60, running=1, usage=0.07), on(4, 4, freed=60)),
         1, "usage", "70 blocks in use while decoding"),
        (Pages(on(3, 3), on(4, 4, freed=60, running=1), on(4, 4, freed=60, usage=0.01)),
         1, "usage", "10 afterwards"),
        (Pages(on(3, 3), on(9, 9, freed=60, running=5, usage=0.9), on(9, 9, freed=60)),
         0, None, "not judged: the server is at work for others"),
        (Pages(on(3, 3), "", "", (500, '{"error": {"message": "no luck"}}')),
         1, "request", "/v1/completions answered 500: no luck"),
        (Pages(on(3, 3), "", "", (200, 'data: {"error": {"message": "died"}}\n')),
         1, "request", "/v1/completions failed: died"),
    ],
    ids=["well", "no-op", "whole", "not freed", "too many", "leaked", "busy", "refused", "died"],
)  # fmt: skip
def test_what_the_metrics_tell(typed, monkeypatch, pages, status, wrong, detail):
    monkeypatch.setattr("vllm_kvcompress.doctor.server_probe._PATIENCE_S", 0.5)
    with server(pages) as url:
        done = typed("doctor", "--url", url, "--json")
    checks = found(done)
    assert done.status == status, checks
    assert detail in done.out
    assert [name for name, check in checks.items() if not check["ok"]][:1] == [wrong][: bool(wrong)]


def test_a_server_that_compresses_under_aliases_alone_is_asked_under_one(typed):
    names = json.dumps(json.dumps({"m@full": "off", "m@kv": "cake:0.2"}))

    def page(*args, **more) -> str:
        return on(*args, **more).replace('method="cake",min', f'method="off",alias={names},min')

    pages = Pages(page(3, 3), page(4, 4, freed=60, running=1), page(4, 4, freed=60))
    asked = []

    def answer(path, body):
        if path == "/v1/completions":
            asked.append(json.loads(body))
        return pages(path, body)

    with server(answer) as url:
        done = typed("doctor", "--url", url, "--json")
    assert done.status == 0, done.out
    assert "1 of 1 planned prompts compressed (cake)" in done.out
    assert [(body["model"], body.get("vllm_xargs")) for body in asked] == [("m@kv", None)]


def test_a_page_that_is_not_vllms(typed):
    with server(lambda path, body: (404, "not here")) as url:
        done = typed("doctor", "--url", url)
    assert done.status == 1
    assert "/v1/models answered 404: not here" in done.out


def test_nobody_answers(typed):
    done = typed("doctor", "--url", "http://127.0.0.1:9", "--json")
    assert done.status == 1
    assert "does not answer" in found(done)["server"]["detail"]
