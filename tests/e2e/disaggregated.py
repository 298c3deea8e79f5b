"""Prefill and decode on two servers: how they start, and who is between them and a client.

What is between them is NIXL over TCP. It has a thread that spins on a core, idle or not, and keeps
the engine's other threads waiting where cores are few: a handshake then may take longer than the
five seconds that vLLM waits for it. An engine that pulls asks NIXL in every step while it waits,
and does without that thread. A prefill server needs it, and here it pauses between two looks.
"""

import importlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from broken_sites import broken
from checkpoints import tokens
from engines import V2, engine, settings
from forks import serve_forking
from vllm_kvcompress.serving.process import free_port

M, LENGTH, ANSWER = 8, 417, 40
SETTINGS = settings("cake-chunk", 0.3, lookahead=M)
DECODE = [
    "--kv-compress",
    "cake-chunk",
    "--kv-budget",
    "0.3",
    "--kv-lookahead",
    str(M),
    "--kv-min-prompt",
    "128",
    "--kv-allow-override",
    "off,cake-chunk,snapkv",
    "--kv-usage",
    "--enable-scale-out",  # /inference/v1/generate
]
PROMPTS = [
    tokens(LENGTH, seed=1),
    tokens(LENGTH, seed=1)[:200] + tokens(300, seed=2),  # begins as the first
    tokens(384, seed=3),  # whole blocks
]
if V2:  # in Triton's interpreter
    ANSWER, PROMPTS = 16, PROMPTS[:1]
FLAGS = [
    "--block-size",
    "32",
    "--enforce-eager",
    "--max-model-len",
    "1024",
    "--dtype",
    "float32",
    "--served-model-name",
    "demo",
    "--num-gpu-blocks-override",
    "129",
]
TO_PREFILL = {
    **{"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None},
    **{"remote_block_ids": None, "remote_host": None, "remote_port": None},
}


def transfer(role, **more):
    """vLLM's --kv-transfer-config."""
    # no threads beside those that NIXL needs
    extra = {"num_threads": 0, **more.pop("extra", {})}
    of_cpu = {"kv_buffer_device": "cpu", "kv_connector_extra_config": extra}
    return {"kv_connector": "NixlConnector", "kv_role": role, **of_cpu, **more}


def nixl():
    """The environment of an engine that pulls, or is pulled from, on this machine."""
    return {
        "UCX_TLS": "tcp,self",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "PYTHONHASHSEED": "0",
        # how soon it is noticed that a server is gone which has not said so
        "UCX_KEEPALIVE_INTERVAL": "1s",
    }


WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
# agents that this module of vLLM makes have no thread of their own
POLLING = (
    "module.nixl_agent_config = __import__('functools')"
    ".partial(module.nixl_agent_config, enable_prog_thread=False)"
)

# the thread of agents that are made with this module pauses a millisecond between two looks
CONFIG = "module.nixlBind.nixlAgentConfig"
PAUSING = (
    f"module.nixlBind.nixlAgentConfig = type('Pausing', ({CONFIG},), dict(pthrDelay=property("
    f"None, lambda config, _, delay={CONFIG}.pthrDelay: delay.__set__(config, 1000))))"
)


def one_of_two(model, folder, role, *flags, **more):
    """A server that is one of the two."""
    own = ["--kv-transfer-config", json.dumps(transfer(role, **more))]
    pulls = role == "kv_consumer"
    site = broken(WORKER, POLLING) if pulls else broken("nixl_cu12._api", PAUSING)
    return serve_forking(model, [*FLAGS, *flags, *own], folder, site, **nixl())


def prefilled(server, body):
    """What a prefill server hands to a decode server for a request."""
    sent = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": TO_PREFILL}
    answer = httpx.post(f"{server.url}/v1/completions", json=sent, timeout=300)
    answer.raise_for_status()
    return answer.json()["kv_transfer_params"]


@contextmanager
def proxy(prefill, decode):
    """A router's least: it asks both servers one after the other, and passes the answer on."""

    class Passing(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body["kv_transfer_params"] = prefilled(prefill, body)
            with httpx.stream("POST", decode.url + self.path, json=body, timeout=300) as answer:
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers["content-type"])
                self.end_headers()
                for part in answer.iter_raw():
                    self.wfile.write(part)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Passing) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


def body(prompt, **more):
    common = {"model": "demo", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
    return common | {"ignore_eos": True, "return_token_ids": True} | more


def complete(url, prompt, **more):
    return httpx.post(f"{url}/v1/completions", json=body(prompt, **more), timeout=300)


def ids(answer):
    answer.raise_for_status()
    return answer.json()["choices"][0]["token_ids"]


def computed_here(model):
    """What an engine answers that compresses as the decode server, and computes the prompts."""
    with engine(model, max_model_len=1024) as llm:
        whole = llm.generate(PROMPTS, ANSWER)
    with engine(model, max_model_len=1024, additional_config=SETTINGS) as llm:
        packed = llm.generate(PROMPTS, ANSWER)
        assert llm.compressor.compressed == len(PROMPTS)
    assert whole != packed
    assert [each[: M + 1] for each in whole] == [each[: M + 1] for each in packed]
    return packed


def pulling(model, monkeypatch, *, policy="fail", own=SETTINGS, **options):
    """An engine in this process that pulls its prompts, with `own` settings of compression."""
    for name, value in nixl().items():
        monkeypatch.setenv(name, value)
    worker = importlib.import_module(WORKER)
    monkeypatch.setattr(worker, "nixl_agent_config", worker.nixl_agent_config)
    exec(POLLING, {"module": worker})
    config = transfer("kv_consumer", kv_load_failure_policy=policy)
    usual = {"max_model_len": 1024, "max_num_seqs": 4}
    return engine(model, additional_config=own, kv_transfer_config=config, **usual | options)


def submit(llm, prefill, name, prompt, answer=ANSWER):
    params = prefilled(prefill, body(prompt))
    llm.submit(name, prompt, answer, extra_args={"kv_transfer_params": params})
