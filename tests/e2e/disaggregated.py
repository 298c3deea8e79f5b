"""Start a prefill and a decode server, and a proxy between them and the clients.

The servers transfer the KV cache with NIXL over TCP. NIXL's progress thread spins on a core even
when idle. On a machine with few cores it starves the engine's threads, and a handshake can exceed
vLLM's timeout of five seconds. A decode engine polls NIXL in every step while it waits, so the
tests disable its thread. A prefill server needs the thread, so the tests make it sleep between
polls.
"""

import importlib
import json
import shlex
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from checkpoints import tokens
from engines import V2, engine, settings
from forks import serve_forking
from site_patches import patch_on_import
from vllm_kvcompress.serving.process import free_port

M, LENGTH, OUTPUT_TOKENS = 8, 417, 40
SETTINGS = settings("cake-chunk", 0.3, lookahead=M)
# --enable-scale-out enables /inference/v1/generate
DECODE = shlex.split(f"""
    --kv-compress cake-chunk --kv-budget 0.3 --kv-lookahead {M} --kv-min-prompt 128
    --kv-allow-override off,cake-chunk,snapkv --kv-usage --enable-scale-out
""")
PROMPTS = [
    tokens(LENGTH, seed=1),
    tokens(LENGTH, seed=1)[:200] + tokens(300, seed=2),  # shares a prefix with the first prompt
    tokens(384, seed=3),  # 12 full blocks
]
if V2:  # slow in Triton's interpreter
    OUTPUT_TOKENS, PROMPTS = 16, PROMPTS[:1]
FLAGS = shlex.split("""
    --block-size 32 --enforce-eager --max-model-len 1024 --dtype float32
    --served-model-name demo --num-gpu-blocks-override 129
""")
TO_PREFILL = {
    **{"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None},
    **{"remote_block_ids": None, "remote_host": None, "remote_port": None},
}


def transfer_config(role, **fields):
    """Return vLLM's ``--kv-transfer-config``."""
    # no worker threads besides NIXL's own
    extra = {"num_threads": 0, **fields.pop("extra", {})}
    on_cpu = {"kv_buffer_device": "cpu", "kv_connector_extra_config": extra}
    return {"kv_connector": "NixlConnector", "kv_role": role, **on_cpu, **fields}


def nixl():
    """Return the environment variables of an engine that transfers KV caches on this machine."""
    return {
        "UCX_TLS": "tcp,self",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "PYTHONHASHSEED": "0",
        # how soon a killed server is detected
        "UCX_KEEPALIVE_INTERVAL": "1s",
    }


WORKER = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
# Agents created by this vLLM module get no progress thread. NIXL would then also leave out UCX's
# locks, but vLLM connects to prefill servers in another thread than it polls in, and both send.
POLLING = (
    "module.nixl_agent_config = __import__('functools').partial("
    "module.nixl_agent_config, enable_prog_thread=False, sync_mode=__import__('nixl_cu12._api')"
    "._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW)"
)

# the progress thread of agents created with this module sleeps for 1 ms between polls
CONFIG = "module.nixlBind.nixlAgentConfig"
PAUSING = (
    f"module.nixlBind.nixlAgentConfig = type('Pausing', ({CONFIG},), dict(pthrDelay=property("
    f"None, lambda config, _, delay={CONFIG}.pthrDelay: delay.__set__(config, 1000))))"
)


def transfer_server(model, folder, role, *flags, **transfer_fields):
    """Return a context manager that runs a prefill or a decode server.

    Args:
        role: "kv_producer" (prefill) or "kv_consumer" (decode).
    """
    transfer_flags = ["--kv-transfer-config", json.dumps(transfer_config(role, **transfer_fields))]
    pulls = role == "kv_consumer"
    site = patch_on_import(WORKER, POLLING) if pulls else patch_on_import("nixl_cu12._api", PAUSING)
    return serve_forking(model, [*FLAGS, *flags, *transfer_flags], folder, site, **nixl())


def prefill_params(server, body):
    """Prefill the request on `server`; return the `kv_transfer_params` for the decode server."""
    request = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": TO_PREFILL}
    response = httpx.post(f"{server.url}/v1/completions", json=request, timeout=300)
    response.raise_for_status()
    return response.json()["kv_transfer_params"]


@contextmanager
def proxy(prefill, decode):
    """Run a minimal router that prefills on one server and streams the output of the other."""

    class Passing(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            body["kv_transfer_params"] = prefill_params(prefill, body)
            with httpx.stream("POST", decode.url + self.path, json=body, timeout=300) as response:
                self.send_response(response.status_code)
                self.send_header("content-type", response.headers["content-type"])
                self.end_headers()
                for part in response.iter_raw():
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


def body(prompt, **fields):
    common = {"model": "demo", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    return common | {"ignore_eos": True, "return_token_ids": True} | fields


def complete(url, prompt, **fields):
    return httpx.post(f"{url}/v1/completions", json=body(prompt, **fields), timeout=300)


def output_ids(response):
    response.raise_for_status()
    return response.json()["choices"][0]["token_ids"]


def local_outputs_of(model):
    """Return the output tokens of an engine that compresses like the decode server.

    The engine computes the prompts itself. Asserts that compression changes outputs, but not
    before the look-ahead ends.
    """
    with engine(model, max_model_len=1024) as llm:
        uncompressed = llm.generate(PROMPTS, OUTPUT_TOKENS)
    with engine(model, max_model_len=1024, additional_config=SETTINGS) as llm:
        compressed = llm.generate(PROMPTS, OUTPUT_TOKENS)
        assert llm.compressor.compressed == len(PROMPTS)
    assert uncompressed != compressed
    assert [output[: M + 1] for output in uncompressed] == [
        output[: M + 1] for output in compressed
    ]
    return compressed


def pulling(model, monkeypatch, *, policy="fail", config=SETTINGS, **options):
    """Return a context manager of an engine in this process that pulls its prompts.

    Args:
        policy: vLLM's `kv_load_failure_policy`.
        config: the engine's ``additional_config``.
    """
    for name, value in nixl().items():
        monkeypatch.setenv(name, value)
    worker = importlib.import_module(WORKER)
    monkeypatch.setattr(worker, "nixl_agent_config", worker.nixl_agent_config)
    exec(POLLING, {"module": worker})
    transfer = transfer_config("kv_consumer", kv_load_failure_policy=policy)
    defaults = {"max_model_len": 1024, "max_num_seqs": 4}
    return engine(
        model, additional_config=config, kv_transfer_config=transfer, **defaults | options
    )


def submit(llm, prefill, name, prompt, max_tokens=OUTPUT_TOKENS):
    params = prefill_params(prefill, body(prompt))
    llm.submit(name, prompt, max_tokens, extra_args={"kv_transfer_params": params})
