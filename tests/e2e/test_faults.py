"""What goes wrong in production, done to a real server: nobody waits, nothing stays held."""

import concurrent.futures
import signal

import httpx
import psutil
import pytest

from first_layers import first_layers
from forks import serve_forking
from idling import idle, received, scrape, wait_for
from streams import asking, listen, streaming
from vllm_kvcompress.serving.text import long_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCKS = 8  # of 128 tokens, the null block among them: one prompt of 560 tokens and no second
AHEAD = 64  # of an answer: while a client comes and goes, its prompt stands whole
FLAGS = [
    *("--enforce-eager", "--max-model-len", "896", "--served-model-name", "demo"),
    *("--kv-compress", "cake", "--kv-budget", "0.3", "--kv-min-prompt", "256"),
    *("--dtype", "float32"),  # the faster one where a CPU has no instructions for bfloat16
    *("--kv-allow-override", "off,snapkv", "--num-gpu-blocks-override", str(BLOCKS)),
    *("--kv-decode-budget", "128"),  # packed again 128 tokens after the prompt's last block
    *("--kv-max-whole", "600", "--kv-piece", "256"),  # every prompt but the longest stands whole
    *("--kv-lookahead", str(AHEAD), "--kv-compress-config", '{"log_requests": true}'),
]
PACKED = "repacked_answers", "packed_pieces"


@pytest.fixture(scope="module")
def text(demo_model):
    from transformers import AutoTokenizer

    return long_prompt(AutoTokenizer.from_pretrained(demo_model), 540)


def processes(server):
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


@pytest.fixture(scope="module")
def server(demo_model, tmp_path_factory):
    flags = [*FLAGS, "--shutdown-timeout", "120"]
    model = first_layers(tmp_path_factory.mktemp("model"), demo_model)
    with serve_forking(model, flags, tmp_path_factory.mktemp("server")) as running:
        yield running


def test_a_pool_for_one_serves_all_who_come(server, text):
    """Eight prompts that fill the pool each, compressed or not: every one is answered in full."""
    asks = [{}, {"kv_compress": "snapkv"}, {"kv_budget": 0.6}]
    # half of them are judged by their answers
    asks = [each | ahead for ahead in ({"kv_lookahead": 0}, {"kv_lookahead": 8}) for each in asks]
    asks[1:1] = asks[5:5] = [{"kv_compress": "off"}]
    before = server.metric("vllm:kv_compress_planned_requests_total")

    def ask(item):
        index, xargs = item
        sent = asking(f"{index} {text}", 24, vllm_xargs=xargs)
        answer = httpx.post(f"{server.url}/v1/completions", json=sent, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["completion_tokens"]

    with concurrent.futures.ThreadPoolExecutor(len(asks)) as pool:
        assert list(pool.map(ask, enumerate(asks))) == [24] * len(asks)
    wait_for(lambda: idle(server))
    planned = server.metric("vllm:kv_compress_planned_requests_total")
    assert planned - before >= 6
    assert server.metric("vllm:kv_compress_requests_total") == planned


def test_clients_that_hang_up_leave_nothing_behind(server, text):
    """Blocks and files come back.

    In the prefill, whole or between two pieces, while an answer is to judge its prompt, after the
    compression, in mid-answer, and once the answer was packed again.
    """
    with streaming(server, text, 2) as events:
        list(events)
    wait_for(lambda: idle(server))
    held = [p.num_fds() for p in processes(server)]

    def leave(index, asks):
        longer = text[: len(text) // 5] if index in (0, 2, 4) else ""
        with streaming(server, f"{index} {text} {longer}", 200, vllm_xargs=asks) as events:
            if index % 3:
                for _ in range(index if index < 5 else 120):
                    next(events)

    before = [server.metric(f"vllm:kv_compress_{what}_total") for what in PACKED]
    for asks in ({}, {"kv_lookahead": 0}):
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            list(pool.map(leave, range(6), [asks] * 6))
    wait_for(lambda: idle(server))
    after = [server.metric(f"vllm:kv_compress_{what}_total") for what in PACKED]
    assert all(new >= old + 2 for new, old in zip(after, before, strict=True)), (before, after)
    wait_for(lambda: [p.num_fds() for p in processes(server)] <= held)
    assert listen(server, text, 4) == "length"


def counted(server):
    """Requests that were counted, by method or reason and under "refused"."""
    prefix, found = "vllm:kv_compress", scrape(server, "reason")
    planned = scrape(server)[f"{prefix}_planned_requests_total"]
    refused = scrape(server)[f"{prefix}_refused_requests_total"]
    skipped = {
        reason: count
        for (name, reason), count in found.items()
        if name == f"{prefix}_skipped_requests_total"
    }
    return {"planned": planned, "refused": refused, **skipped}


def test_each_request_is_counted_once_whatever_ends_it(server, text):
    """A stop string and a client that hangs up have reasons of their own."""
    url = f"{server.url}/v1/completions"
    wait_for(lambda: idle(server))
    said = httpx.post(url, json=asking(text, 24), timeout=300).json()["choices"][0]["text"]
    wait_for(lambda: idle(server))
    before = counted(server)

    def ask(tokens, prompt=text, **more):
        return httpx.post(url, json=asking(prompt, tokens, **more), timeout=300)

    stopped = ask(200, stop=[said[len(said) // 2 :][:4]]).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] <= 24
    with streaming(server, text, 300) as events:
        next(events)
    assert ask(24).status_code == 200  # ends within its look-ahead
    assert ask(AHEAD + 8, stop=["never said"]).status_code == 200
    assert ask(8, prompt="Hello", n=2, temperature=1).status_code == 200
    assert ask(8, vllm_xargs={"kv_compress": "off"}).status_code == 200
    assert ask(8, vllm_xargs={"kv_compress": "tova"}).status_code == 400
    wanted = {"answered": 2, "aborted": 1, "planned": 1, "short_prompt": 2, "off": 1, "refused": 1}

    def rose():
        return {name: count - before[name] for name, count in counted(server).items()}

    wait_for(lambda: sum(rose().values()) == sum(wanted.values()))
    assert {name: count for name, count in rose().items() if count} == wanted


HOSTILE = {
    "no JSON": b"{",
    "nothing": b"",
    "an array": b"[]",
    "a number": b"1e999",
    "no text": b"\xff\xfe",
    "deep": b'{"model":"demo","prompt":"x","vllm_xargs":{"kv_budget":'
    + b"[" * 5000
    + b"]" * 5000
    + b"}}",
    "many keys": b'{"model":"demo","prompt":"x","vllm_xargs":{'
    + b",".join(b'"kv_%d":1' % i for i in range(100_000))
    + b"}}",
    "a huge key": b'{"model":"demo","prompt":"x","vllm_xargs":{"kv_' + b"k" * 10**7 + b'":1}}',
    "a beam": b'{"model":"demo","prompt":"x","use_beam_search":true,"n":2,"max_tokens":4,'
    b'"vllm_xargs":{"kv_compress":"nonsense"}}',
    "twice": b'{"model":"demo","prompt":"x","vllm_xargs":{"kv_budget":0.2,"kv_budget":"x"}}',
    "a list for extras": b'{"model":"demo","prompt":"x","vllm_xargs":[1]}',
    "text for extras": b'{"model":"demo","prompt":"x","vllm_xargs":"kv_compress"}',
    "an object in extras": b'{"model":"demo","prompt":"x","vllm_xargs":{"kv_compress":{}}}',
    "not a number": b'{"model":"demo","prompt":"x","vllm_xargs":{"kv_budget":NaN}}',
    "infinite": b'{"model":"demo","prompt":"x","vllm_xargs":{"kv_budget":1e999}}',
    "huge": b'{"model":"demo","prompt":"x","vllm_xargs":{"kv_budget":' + b"9" * 4000 + b"}}",
    "a long name": b'{"model":"demo","prompt":"x","vllm_xargs":{"kv_compress":"'
    + b"c" * 200_000
    + b'"}}',
    "a surrogate": b'{"model":"demo","prompt":"x","vllm_xargs":{"kv_compress":"\\ud800"}}',
    "nul": b'{"model":"demo","prompt":"x","vllm_xargs":{"kv_compress":"off\\u0000"}}',
    "empty prompt ids": b'{"model":"demo","prompt":[],"vllm_xargs":{"kv_compress":"cake"}}',
    "foreign prompt ids": b'{"model":"demo","prompt":[99999999],"vllm_xargs":{"kv_budget":0.2}}',
    "negative tokens": b'{"model":"demo","prompt":"x","max_tokens":-5}',
    "a path": b'{"model":"demo","prompt":"x","vllm_xargs":{"kv_compress":"../../etc/passwd"}}',
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_body_is_the_clients_error(server, kind):
    answer = httpx.post(
        f"{server.url}/v1/completions",
        content=HOSTILE[kind],
        headers={"content-type": "application/json"},
        timeout=120,
    )
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
    assert len(answer.text) < 500_000
    assert httpx.get(f"{server.url}/health", timeout=120).status_code == 200


def test_sigterm_lets_running_answers_finish(server, text):
    """The first of them is in its look-ahead, and two wait. The last test on this server."""
    wait_for(lambda: idle(server))
    before, done = received(server), len(server.compressed())
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(listen, server, f"{i} {text}", AHEAD + 26) for i in range(3)]
        # a server that drains takes no request that comes later
        wait_for(lambda: received(server) == before + 3)
        server.process.send_signal(signal.SIGTERM)
        assert [end.result(timeout=600) for end in ends] == ["length"] * 3
    assert server.process.wait(300) == 0
    assert server.compressed()[done].lookahead == AHEAD
