"""Start of an engine on CUDA, before any kernel runs: classes, refusals and memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_worker import Worker

from cuda_platform import GPUS
from engines import engine, settings
from vllm_kvcompress.commands.plan.gpu_memory import defaults_for
from vllm_kvcompress.engine.attention import cuda as attention_cuda
from vllm_kvcompress.engine.device_memory import device_bytes
from vllm_kvcompress.engine.startup import backend_choice, refusals, vllm_hooks
from vllm_kvcompress.engine.startup import configure as configuring
from vllm_kvcompress.engine.startup.configure import configure
from vllm_kvcompress.engine.worker.cuda import CompressingGPUWorker
from vllm_kvcompress.engine.worker.worker import refuse_other_backends
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.refusals.tested import CUDA_BACKENDS
from vllm_kvcompress.settings.config import CompressionConfig

CAKE = CompressionConfig.parse({"compress": "cake"})


@pytest.fixture
def cuda(monkeypatch, model):
    """Return a configuration as vLLM creates it on CUDA."""
    config = EngineArgs(model=model, skip_tokenizer_init=True).create_engine_config()
    platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_name="cuda")
    for module in (refusals, vllm_hooks, configuring):
        monkeypatch.setattr(module, "current_platform", platform)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
    config.cache_config.kv_cache_memory_bytes = None
    config.additional_config = {}
    return SimpleNamespace(config=config, platform=platform)


@pytest.mark.parametrize("backend", [None, "FLASH_ATTN", "TRITON_ATTN"])
def test_cuda_uses_the_compressing_gpu_worker(cuda, backend):
    cuda.config.attention_config.backend = backend and AttentionBackendEnum[backend]
    configure(cuda.config, CAKE)
    assert cuda.config.parallel_config.worker_cls.endswith("worker.cuda.CompressingGPUWorker")


@pytest.mark.parametrize("backend", ["FLASHINFER", "FLEX_ATTENTION"])
def test_other_backends_are_rejected_by_name(cuda, backend):
    cuda.config.attention_config.backend = AttentionBackendEnum[backend]
    with pytest.raises(ConfigError, match=rf"FLASH_ATTN.*TRITON_ATTN.*got {backend}; pass --att"):
        configure(cuda.config, CAKE)
    assert cuda.config.parallel_config.worker_cls == "vllm.v1.worker.gpu_worker.Worker"


def test_backend_chosen_by_vllm_is_rejected_by_name(model):
    """Without --attention-backend, the built model's backend is checked."""
    with (
        engine(model) as llm,
        pytest.raises(ConfigError, match=r"vLLM chose \['CPU_ATTN'\]; pass --attention-backend FL"),
    ):
        refuse_other_backends(llm.worker.vllm_config, attention_cuda.BACKENDS)


def test_model_runner_v1_on_cuda_is_rejected(cuda, monkeypatch):
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(
        ConfigError, match="only on Model Runner V2; unset VLLM_USE_V2_MODEL_RUNNER"
    ):
        configure(cuda.config, CAKE)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    with pytest.raises(
        ConfigError, match="only on Model Runner V2; remove the option that vLLM's log says V2 does"
    ):
        configure(cuda.config, CAKE)


def test_fault_tolerance_is_rejected(cuda):
    cuda.config.parallel_config.enable_fault_tolerance = True
    with pytest.raises(ConfigError, match="remove --enable-fault-tolerance"):
        configure(cuda.config, CAKE)


def test_accepted_backends_are_the_implemented_ones():
    assert {backend.name for backend in attention_cuda.BACKENDS} == {*CUDA_BACKENDS}


@pytest.mark.parametrize(("version", "support"), [(3, "ALWAYS"), (2, "UNIFORM_BATCH")])
def test_graph_support_follows_the_flash_attention_version(monkeypatch, version, support):
    monkeypatch.setattr(attention_cuda, "get_flash_attn_version", lambda: version)
    found = attention_cuda.CompressedFlashBuilder.get_cudagraph_support(None, None)
    assert found.name == support


def test_other_platforms_are_rejected(cuda):
    cuda.platform.is_cuda = lambda: False
    cuda.platform.device_name = "rocm"
    with pytest.raises(ConfigError, match="on CUDA and on CPUs, and this is rocm"):
        configure(cuda.config, CAKE)


def test_device_bytes_count_the_page_pools_tables(model):
    """Exact to the byte; a method that reads all attention also needs memory for column sums."""
    options = dict(max_num_seqs=5, max_model_len=1000, additional_config=settings("snapkv"))
    with engine(model, **options) as llm:
        config, pool = llm.worker.vllm_config, llm.compressor.pool
        tables = pool._tables.nbytes + pool._packed.nbytes
        layers, kv_heads, heads, longest, dim = 4, 2, 4, 1000, 32
        # 5 request slots and slot 0, 16 rows (5 rounded up), and 32 blocks of 4 bytes
        assert tables == (5 + 1 + 16) * layers * 32 * 4
        # one launch scores all layers of a prompt this short
        scores = layers * kv_heads * longest * 12 + 4 * heads * layers * longest * 4
        # of 16 prompts, and a copy of those of the 4 prompts that share a launch
        queries = (16 + 4) * layers * 32 * heads * dim * 4
        pages = page_plan(llm.worker.settings.budget_spec(layers, longest), 32).pages
        # protected tokens in the window may need one more page per layer, and rounding another
        staged = (pages + 2 * layers) * 32 * 2 * dim * 4
        assert device_bytes(config, llm.worker.settings) == tables + scores + queries + staged
        d2o = CompressionConfig.parse({"compress": "d2o"})
        sums = layers * heads * longest * 4
        assert device_bytes(config, d2o) >= tables + scores + sums + staged * kv_heads


@pytest.fixture
def gpu_worker(monkeypatch, cuda):
    """Return a worker for which vLLM has measured 10 GB of memory for the KV cache."""
    configure(cuda.config, CAKE)
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 10_000_000_000)
    worker = CompressingGPUWorker.__new__(CompressingGPUWorker)
    worker.peak_activation_memory, worker.available_kv_cache_memory_bytes = 7, 10_000_000_000
    worker.vllm_config, worker.cache_config = cuda.config, cuda.config.cache_config
    return worker


def test_trap_13_compression_buffers_reduce_the_kv_cache(gpu_worker):
    taken = device_bytes(gpu_worker.vllm_config, gpu_worker.settings)
    assert taken > 0
    assert gpu_worker.determine_available_memory() == 10_000_000_000 - taken
    assert gpu_worker.available_kv_cache_memory_bytes == 10_000_000_000 - taken
    assert gpu_worker.peak_activation_memory == 7 + taken


def test_size_that_vllm_restores_is_not_treated_as_explicit(gpu_worker, monkeypatch):
    def found(self) -> int:
        self.cache_config.kv_cache_memory_bytes = 10_000_000_000
        return 10_000_000_000

    monkeypatch.setattr(Worker, "determine_available_memory", found)
    assert gpu_worker.determine_available_memory() < 10_000_000_000


def test_explicit_kv_cache_size_is_unchanged(gpu_worker):
    gpu_worker.cache_config.kv_cache_memory_bytes = 10_000_000_000
    assert gpu_worker.determine_available_memory() == 10_000_000_000


def test_too_little_memory_is_rejected(gpu_worker, monkeypatch):
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 1000)
    with pytest.raises(ConfigError, match="1000 are left for it and the KV cache; raise --gpu-mem"):
        gpu_worker.determine_available_memory()


@pytest.mark.parametrize(
    ("gpu", "first_of_vllm", "versions"),
    [
        ("H200", "FLASH_ATTN", [3]),
        # before vLLM 0.33, the pretended extensions do not include a build for Blackwell
        ("B200", "FLASHINFER", [None, 4]),
    ],
)
def test_compression_keeps_vllms_defaults_on_cuda(model, gpu, first_of_vllm, versions):
    """Graphs, torch.compile, async scheduling and FlashAttention 3 are as vLLM chooses alone.

    On Blackwell vLLM prefers a backend that we do not support, so we choose FLASH_ATTN.
    """
    script = Path(__file__).with_name("cuda_platform.py")
    done = subprocess.run(
        [sys.executable, str(script), model, gpu],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("DECIDED ")), None)
    assert line, done.stdout[-2000:] + done.stderr[-3000:]
    assert (
        "the attention backend is FLASH_ATTN, the first that --kv-compress supports here"
        in done.stdout + done.stderr
    )
    found = json.loads(line.removeprefix("DECIDED "))
    assert found.pop("flash_attention") in versions
    assert found == {
        "worker": "CompressingGPUWorker",
        "scheduler": "CompressingAsyncScheduler",
        "v2": True,
        "graphs": "FULL_AND_PIECEWISE",
        "compiled": "VLLM_COMPILE",
        "first_of_vllm": first_of_vllm,
        "chosen": "FLASH_ATTN",
        "backend": "CompressedFlashBackend",
        "impl": "CompressedFlashImpl",
        "max_num_seqs": defaults_for("cuda", GPUS[gpu][1], 1).max_num_seqs,
    }


def test_first_supported_backend_is_chosen(cuda, monkeypatch):
    """TRITON_ATTN if FLASH_ATTN cannot run, as on Turing; if neither can, nothing changes."""
    config, supported = cuda.config, {"TRITON_ATTN"}

    def get_attn_backend(*model):
        if config.attention_config.backend.name not in supported:
            raise ValueError("compute capability\nnot supported")

    monkeypatch.setattr(backend_choice, "get_attn_backend", get_attn_backend)
    configure(config, CAKE)
    assert config.attention_config.backend.name == "TRITON_ATTN"
    config.attention_config.backend = None
    supported.clear()
    with pytest.raises(ConfigError, match=r"accepts neither here \(compute capability not supp"):
        configure(config, CAKE)
    assert config.attention_config.backend is None


def test_backend_per_attention_kind_is_checked(cuda):
    attention = cuda.config.attention_config
    attention.backend_per_kind = {"full_attention": AttentionBackendEnum.FLASHINFER}
    with pytest.raises(ConfigError, match=r"got FLASHINFER; .*remove --attention-config.backend_p"):
        configure(cuda.config, CAKE)
    attention.backend_per_kind = {"full_attention": AttentionBackendEnum.TRITON_ATTN}
    configure(cuda.config, CAKE)
    assert attention.backend is None  # the per-kind backend is enough
