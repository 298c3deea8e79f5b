"""Pretend, in a process of its own, that vLLM's CPU build sits on an H200.

Its Python files are those of the CUDA build but for the compiled extensions, so everything up to
the first call into a device is what CUDA decides. Run: ``python cuda_platform.py MODEL``.
"""

import json
import os
import sys
from types import ModuleType, SimpleNamespace


def pretend() -> None:
    """Before anything of vLLM is imported."""
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

    class H200(cuda.NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H200")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 141 * 2**30)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)

    vllm.platforms._current_platform = H200()
    import vllm._custom_ops as ops

    for name in dir(ops):
        if "supports" in name:
            setattr(ops, name, lambda *args: True)


def decide(model: str) -> dict[str, object]:
    """What the plugin and vLLM make of a model on this platform."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.selector import get_attn_backend

    from vllm_kvcompress.engine.attention import override_backends

    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        additional_config={"kvcompress": {"compress": "cake", "budget": 0.1}},
    ).create_engine_config()
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
        "backend": backend.__qualname__,
        "impl": backend.get_impl_cls().__qualname__,
    }


if __name__ == "__main__":
    pretend()
    sys.stdout.write(f"DECIDED {json.dumps(decide(sys.argv[1]))}\n")
