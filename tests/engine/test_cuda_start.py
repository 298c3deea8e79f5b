"""What is decided on CUDA before a kernel runs: classes, refusals by name, memory."""

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

from checkpoints import make
from cuda_platform import GPUS
from engines import engine, settings
from vllm_kvcompress.commands.gpu_memory import defaults_for
from vllm_kvcompress.engine.attention import cuda as attention_cuda
from vllm_kvcompress.engine.startup import backend_choice, refusals, vllm_hooks
from vllm_kvcompress.engine.startup import configure as configuring
from vllm_kvcompress.engine.startup.configure import configure
from vllm_kvcompress.engine.worker.cuda import CompressingGPUWorker
from vllm_kvcompress.engine.worker.footprint import device_bytes
from vllm_kvcompress.engine.worker.worker import refuse_other_backends
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.settings.config import CompressionConfig

CAKE = CompressionConfig.parse({"compress": "cake"})


@pytest.fixture
def cuda(monkeypatch, checkpoints_folder):
    """A configuration as it comes out of vLLM on CUDA."""
    model = make("llama-gqa", checkpoints_folder)
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
def test_cuda_gets_its_worker(cuda, backend):
    cuda.config.attention_config.backend = backend and AttentionBackendEnum[backend]
    configure(cuda.config, CAKE)
    assert cuda.config.parallel_config.worker_cls.endswith("worker.cuda.CompressingGPUWorker")


@pytest.mark.parametrize("backend", ["FLASHINFER", "FLEX_ATTENTION"])
def test_other_backends_are_refused_by_name(cuda, backend):
    cuda.config.attention_config.backend = AttentionBackendEnum[backend]
    with pytest.raises(ConfigError, match=rf"FLASH_ATTN.*TRITON_ATTN.*got {backend}; pass --att"):
        configure(cuda.config, CAKE)
    assert cuda.config.parallel_config.worker_cls == "vllm.v1.worker.gpu_worker.Worker"


def test_a_backend_that_vllm_chose_itself_is_refused_by_name(checkpoints_folder):
    """Where nothing was asked for: what the built model has."""
    with (
        engine(make("llama-gqa", checkpoints_folder)) as llm,
        pytest.raises(ConfigError, match=r"vLLM chose \['CPU_ATTN'\]; pass --attention-backend FL"),
    ):
        refuse_other_backends(llm.worker.vllm_config, attention_cuda.BACKENDS)


def test_the_v1_runner_on_cuda_is_refused(cuda, monkeypatch):
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


def test_a_worker_must_not_outlive_a_failed_step(cuda):
    cuda.config.parallel_config.enable_fault_tolerance = True
    with pytest.raises(ConfigError, match="remove --enable-fault-tolerance"):
        configure(cuda.config, CAKE)


def test_the_backends_that_are_accepted_are_those_we_have():
    assert {backend.name for backend in attention_cuda.BACKENDS} == {*refusals.CUDA_BACKENDS}


@pytest.mark.parametrize(("version", "support"), [(3, "ALWAYS"), (2, "UNIFORM_BATCH")])
def test_graphs_are_what_the_configured_flash_attention_can(monkeypatch, version, support):
    monkeypatch.setattr(attention_cuda, "get_flash_attn_version", lambda: version)
    found = attention_cuda.CompressedFlashBuilder.get_cudagraph_support(None, None)
    assert found.name == support


def test_other_chips_are_refused(cuda):
    cuda.platform.is_cuda = lambda: False
    cuda.platform.device_name = "rocm"
    with pytest.raises(ConfigError, match="on CUDA and on CPUs, and this is rocm"):
        configure(cuda.config, CAKE)


# -- memory ---------------------------------------------------------------------------------------


def test_the_page_pools_tables_are_counted(checkpoints_folder):
    """To the byte; a method that reads the whole attention takes its column sums besides."""
    options = dict(max_num_seqs=5, max_model_len=1000, additional_config=settings("snapkv"))
    with engine(make("llama-gqa", checkpoints_folder), **options) as llm:
        config, pool = llm.worker.vllm_config, llm.compressor.pool
        held = pool._tables.nbytes + pool._packed.nbytes
        layers, kv_heads, heads, longest, dim = 4, 2, 4, 1000, 32
        assert held == (5 + 1 + 16) * layers * 32 * 4  # 5 rows and 32 blocks, to the next 16
        scores = layers * kv_heads * longest * 12 + 4 * heads * longest * 4
        # of 16 prompts, and of the layers that are scored together
        queries = (16 + 1) * layers * 32 * heads * dim * 4
        pages = page_plan(llm.worker.settings.prompt(layers, longest), 32).pages
        # what a request protects of its window may need a page of its own, and another is cut
        staged = (pages + 2 * layers) * 32 * 2 * dim * 4
        assert device_bytes(config, llm.worker.settings) == held + scores + queries + staged
        d2o = CompressionConfig.parse({"compress": "d2o"})
        sums = layers * heads * longest * 4
        assert device_bytes(config, d2o) >= held + scores + sums + staged * kv_heads


@pytest.fixture
def gpu_worker(monkeypatch, cuda):
    """A worker whose vLLM found 10 GB for the KV cache."""
    configure(cuda.config, CAKE)
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 10_000_000_000)
    worker = CompressingGPUWorker.__new__(CompressingGPUWorker)
    worker.peak_activation_memory, worker.available_kv_cache_memory_bytes = 7, 10_000_000_000
    worker.vllm_config, worker.cache_config = cuda.config, cuda.config.cache_config
    return worker


def test_trap_13_buffers_come_off_the_kv_cache(gpu_worker):
    taken = device_bytes(gpu_worker.vllm_config, gpu_worker.settings)
    assert taken > 0
    assert gpu_worker.determine_available_memory() == 10_000_000_000 - taken
    assert gpu_worker.available_kv_cache_memory_bytes == 10_000_000_000 - taken
    assert gpu_worker.peak_activation_memory == 7 + taken


def test_a_saved_plans_size_is_not_one_given_by_hand(gpu_worker, monkeypatch):
    def found(self) -> int:
        self.cache_config.kv_cache_memory_bytes = 10_000_000_000
        return 10_000_000_000

    monkeypatch.setattr(Worker, "determine_available_memory", found)
    assert gpu_worker.determine_available_memory() < 10_000_000_000


def test_a_size_given_by_hand_is_kept(gpu_worker):
    gpu_worker.cache_config.kv_cache_memory_bytes = 10_000_000_000
    assert gpu_worker.determine_available_memory() == 10_000_000_000


def test_no_room_beside_the_buffers(gpu_worker, monkeypatch):
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 1000)
    with pytest.raises(ConfigError, match="1000 are left for it and the KV cache; raise --gpu-mem"):
        gpu_worker.determine_available_memory()


# -- vLLM's own decisions on CUDA ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "first_of_vllm", "versions"),
    [
        ("H200", "FLASH_ATTN", [3]),
        # until 0.33 its build for Blackwell is none of the extensions that are pretended
        ("B200", "FLASHINFER", [None, 4]),
    ],
)
def test_compression_leaves_cudas_defaults_on(checkpoints_folder, gpu, first_of_vllm, versions):
    """Graphs, torch.compile, async scheduling, FlashAttention 3: as vLLM alone would choose.

    On Blackwell vLLM's first choice is a backend that is not ours: FLASH_ATTN is chosen there.
    """
    script = Path(__file__).with_name("cuda_platform.py")
    done = subprocess.run(
        [sys.executable, str(script), make("llama-gqa", checkpoints_folder), gpu],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("DECIDED ")), None)
    assert line, done.stdout[-2000:] + done.stderr[-3000:]
    assert (
        "the attention backend is FLASH_ATTN, since none was asked for" in done.stdout + done.stderr
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


def test_the_first_of_ours_that_vllm_takes_is_chosen(cuda, monkeypatch):
    """Where FLASH_ATTN cannot run, as on Turing; where none can, nothing is changed."""
    config, taken = cuda.config, {"TRITON_ATTN"}

    def as_vllm(*model):
        if config.attention_config.backend.name not in taken:
            raise ValueError("compute capability\nnot supported")

    monkeypatch.setattr(backend_choice, "get_attn_backend", as_vllm)
    configure(config, CAKE)
    assert config.attention_config.backend.name == "TRITON_ATTN"
    config.attention_config.backend = None
    taken.clear()
    with pytest.raises(ConfigError, match=r"takes neither here \(compute capability not supp"):
        configure(config, CAKE)
    assert config.attention_config.backend is None


def test_a_backend_for_full_attention_alone_is_judged_too(cuda):
    attention = cuda.config.attention_config
    attention.backend_per_kind = {"full_attention": AttentionBackendEnum.FLASHINFER}
    with pytest.raises(ConfigError, match=r"got FLASHINFER; remove --attention-config.backend_per"):
        configure(cuda.config, CAKE)
    attention.backend_per_kind = {"full_attention": AttentionBackendEnum.TRITON_ATTN}
    configure(cuda.config, CAKE)
    assert attention.backend is None  # it was chosen
