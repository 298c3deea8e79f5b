"""Run vLLM's CPU build as if it were on a GPU, in a separate process.

The CPU and CUDA builds have the same Python files and differ in their compiled extensions, so all
decisions before the first device call are those of CUDA. Run:
``python cuda_platform.py MODEL H200``.
"""

import json
import os
import sys
from types import ModuleType, SimpleNamespace

# name: compute capability, memory in GiB, multiprocessors
GPUS = {"H200": ((9, 0), 141, 132), "B200": ((10, 0), 180, 148)}


def pretend(gpu: str) -> None:
    """Replace vLLM's platform by CUDA on `gpu`; call this before vLLM is imported."""
    capability, memory, units = GPUS[gpu]
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    triton.backends.backends.setdefault("cpu", SimpleNamespace(driver=driver, compiler=None))
    for extension in ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa3_C"):
        name = f"vllm.{extension}"
        sys.modules[name] = ModuleType(name)
    import vllm.platforms
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability

    class Pretended(cuda.NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*capability))
        get_device_name = classmethod(lambda cls, device_id=0: f"NVIDIA {gpu}")
        get_device_total_memory = classmethod(lambda cls, device_id=0: memory * 2**30)
        num_compute_units = classmethod(lambda cls, device_id=0: units)

    vllm.platforms._current_platform = Pretended()
    import vllm._custom_ops as ops

    for name in dir(ops):
        if "supports" in name:
            setattr(ops, name, lambda *args: True)


def decide(model: str) -> dict[str, object]:
    """Return the choices of the plugin and of vLLM for a model on this platform."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.platforms.cuda import _get_backend_priorities
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.selector import get_attn_backend

    from vllm_kvcompress.engine.attention.backend import override_backends

    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        additional_config={"kvcompress": {"compress": "cake", "budget": 0.1}},
    ).create_engine_config(UsageContext.OPENAI_API_SERVER)
    capability = current_platform.get_device_capability()
    first = _get_backend_priorities(use_mla=False, device_capability=capability)[0]
    worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    with override_backends(worker.backends), set_current_vllm_config(config):
        backend = get_attn_backend(64, config.model_config.dtype, None)
    return {
        "worker": worker.__qualname__,
        "scheduler": config.scheduler_config.scheduler_cls.rpartition(".")[2],
        "v2": config.use_v2_model_runner,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "compiled": config.compilation_config.mode.name,
        "flash_attention": get_flash_attn_version(),
        "first_of_vllm": first.name,
        "chosen": config.attention_config.backend.name,
        "backend": backend.__qualname__,
        "impl": backend.get_impl_cls().__qualname__,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
    }


if __name__ == "__main__":
    pretend(sys.argv[2])
    sys.stdout.write(f"DECIDED {json.dumps(decide(sys.argv[1]))}\n")
