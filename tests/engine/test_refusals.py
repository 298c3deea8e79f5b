"""Refusals of unsupported options, executors and settings before the model loads."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoints import make, tokens
from configuring import configure
from engines import engine, settings
from local_ray import need_ray
from vllm_kvcompress.engine.startup.refusals import refuse_unsupported
from vllm_kvcompress.errors import ConfigError, VllmHookError
from vllm_kvcompress.settings.config import CompressionConfig

REUSE = settings("cake", 1.0, packed_dtype="k4v3", reuse="grid", lookahead=8)
PRESSED = settings("cake", 1.0, packed_dtype="k4v3", reuse="late", pressure=0.5)


def test_a_supported_model_is_configured(model):
    config = configure(model)
    assert config.parallel_config.worker_cls.endswith("CompressingCPUWorker")
    assert config.scheduler_config.scheduler_cls.endswith("CompressingScheduler")
    assert config.additional_config["kvcompress"]["compress"] == "cake"


def test_the_settings_are_part_of_vllms_config_hash(model):
    hashes = {
        configure(model, additional_config=settings(budget=budget)).compute_hash()
        for budget in (0.1, 0.2, 0.1)
    }
    assert len(hashes) == 2


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason", "fix"),
    [
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "others find saved tokens by their position or hash",
            "--kv-transfer-config",
        ),
        (
            {"kv_cache_dtype": "fp8_per_token_head"},
            "the only supported quantised KV cache is fp8 with one scale per layer",
            "--kv-cache-dtype auto",
        ),
        *(
            (
                {"kv_cache_dtype": "fp8_e4m3", "additional_config": settings(**own)},
                "merges tokens, which would have to be quantised again in a fp8_e4m3 KV cache",
                "--kv-cache-dtype auto",
            )
            for own in (
                {"compress": "d2o"},
                {"compress": "snapkv", "merge": "values"},
                {"compress": "snapkv", "allow_override": "d2o"},
            )
        ),
        *(
            (
                {"kv_cache_dtype": "fp8_e4m3", "additional_config": settings(**own)},
                "packed_dtype=k4v3 cannot be combined with a fp8_e4m3 KV cache",
                "set --kv-cache-dtype auto, or set packed_dtype to auto",
            )
            for own in ({"packed_dtype": "k4v3"}, {"alias": "small=cake:0.4:k4v3"})
        ),
        (
            {"additional_config": settings(packed_dtype="k4v3")},
            "k4v3 needs a head dim that is a multiple of 8 and at least 64",
            "this model has 32; set packed_dtype to auto",
        ),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]},
            "all layers must use the same KV cache dtype",
            "--kv-cache-dtype-skip-layers",
        ),
        (
            {"kv_cache_dtype": "float16"},  # which vLLM refuses by itself since 0.33
            "the model's bfloat16; set --kv-cache-dtype auto|is incompatible with dtype",
            "auto",
        ),
        ({"pipeline_parallel_size": 3}, "have the same number of layers", "a divisor of 4, got 3"),
        ({"scheduler_cls": "somebody.Else"}, "own scheduler", "--scheduler-cls"),
        ({"worker_cls": "somebody.Elses"}, "vLLM's own workers", "--worker-cls"),
        ({"runner": "pooling"}, "only generative models", "without --kv-compress"),
        *(
            (
                {"additional_config": settings(name, decode_budget=64)},
                f"cannot bound outputs by '{name}'",
                "choose from ['cake', 'cake-chunk', 'caote', 'chunkkv', 'd2o', 'fastcaote', 'h2o',",
            )
            for name in ("dynamickv", "keydiff", "random", "defensivekv")
        ),
        (
            {"additional_config": settings("snapkv", decode_budget=64, allow_override="keydiff")},
            "cannot bound outputs by 'keydiff'",
            "or remove --kv-decode-budget",
        ),
        *(
            (
                {"additional_config": settings(**own, decode_budget=64)},
                reason,
                "choose from ['cake'",
            )
            for own, reason in (
                ({"compress": "h2o", "scorer_params": {"per_query": True}}, "saw a token"),
                ({"compress": "d2o", "allocator_params": {"per_query": True}}, "saw a token"),
                (
                    {"compress": "caote", "scorer_params": {"base": "h2o"}},
                    "column sums per query head",
                ),
            )
        ),
        (
            {
                "additional_config": settings(decode_budget=64, decode_interval=130),
                "block_size": 32,
            },
            "must be a multiple of the KV block's 32 tokens, got 130",
            "set it to 128",
        ),
        *(
            (
                {"additional_config": settings(name, max_whole=512)},
                f"cannot pack prompts by '{name}'",
                "choose from ['cake', 'cake-chunk', 'caote', 'chunkkv', 'd2o', 'fastcaote', 'h2o',",
            )
            for name in ("dynamickv", "keydiff", "random", "defensivekv")
        ),
        (
            {"additional_config": settings(max_whole=512, piece=130), "block_size": 32},
            "must be a multiple of the KV block's 32 tokens, got 130",
            "set it to 128",
        ),
        *(
            ({"additional_config": settings("cake", budget, reuse=mode, **dtype)}, rule, fix)
            for mode, budget, dtype, rule, fix in (
                (
                    "grid",
                    0.5,
                    {"packed_dtype": "k4v3"},
                    "got budget 0.5 and k4v3",
                    "--kv-budget 1.0",
                ),
                ("late", 1.0, {}, "got budget 1.0 and auto", "--kv-packed-dtype k4v3"),
            )
        ),
        *(
            ({"additional_config": REUSE} | options, rule, fix)
            for options, rule, fix in (
                (
                    {"enable_prefix_caching": False},
                    "needs prefix caching",
                    "--no-enable-prefix-caching",
                ),
                ({"additional_config": PRESSED}, "do not count as used", "remove --kv-pressure"),
                (
                    {
                        "kv_transfer_config": {
                            "kv_connector": "NixlConnector",
                            "kv_role": "kv_consumer",
                        }
                    },
                    "--kv-transfer-config and --kv-reuse were not tested together",
                    "--kv-transfer-config",
                ),
                (
                    {
                        "speculative_config": {
                            "method": "ngram",
                            "num_speculative_tokens": 2,
                            "prompt_lookup_max": 3,
                        }
                    },
                    "--speculative-config and --kv-reuse were not tested together",
                    "--speculative-config",
                ),
            )
        ),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else None,
)
def test_trap_10_trap_11_unsupported_options_are_refused(model, options, reason, fix):
    with pytest.raises((ConfigError, ValueError), match=reason) as refusal:
        configure(model, **options)
    assert fix in str(refusal.value)


@pytest.mark.parametrize(
    ("part", "name", "value", "reason", "fix"),
    [
        (
            "parallel_config",
            "decode_context_parallel_size",
            2,
            "context parallelism",
            "remove --decode-context-parallel-size, got 2",
        ),
        (
            "parallel_config",
            "prefill_context_parallel_size",
            2,
            "context parallelism",
            "remove --prefill-context-parallel-size, got 2",
        ),
        (
            "model_config",
            "disable_cascade_attn",
            False,
            "cascade attention",
            "--no-disable-cascade-attn",
        ),
        ("parallel_config", "enable_dbo", True, "dual-batch overlap", "--enable-dbo"),
        (
            "parallel_config",
            "enable_elastic_ep",
            True,
            "adds and removes ranks",
            "--enable-elastic-ep",
        ),
        (
            "parallel_config",
            "data_parallel_backend",
            "ray",
            "Ray actors",
            "remove --data-parallel-backend, got ray",
        ),
        ("attention_config", "use_non_causal", True, "attend only to", "use_non_causal"),
        (
            "model_config",
            "enable_return_routed_experts",
            True,
            "looks up the experts of a token by its KV block",
            "--enable-return-routed-experts",
        ),
        (
            "cache_config",
            "kv_sharing_fast_prefill",
            True,
            "share KV caches",
            "--kv-sharing-fast-prefill",
        ),
    ],
)
def test_options_that_vllm_ignores_here_are_refused(model, part, name, value, reason, fix):
    """vLLM refuses or ignores these on a CPU, so the test calls our check directly."""
    config = configure(model)
    object.__setattr__(getattr(config, part), name, value)
    with pytest.raises(ConfigError, match=reason) as refusal:
        refuse_unsupported(config, CompressionConfig.parse(settings()["kvcompress"]))
    assert fix in str(refusal.value)


def test_parking_needs_a_slot_and_the_memory_of_its_container(model, monkeypatch):
    with pytest.raises(ConfigError, match="park must be at least one slot of 4 KV blocks"):
        configure(model, additional_config=settings(park=1e-6))
    configure(model, additional_config=settings(park=1))
    read_text = Path.read_text

    def limited(path, *args, **kwargs):
        if str(path) == "/sys/fs/cgroup/memory.max":
            return f"{2**29}\n"
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", limited)
    with pytest.raises(ConfigError, match=r"at most the memory of this machine, 0\.5 GiB, got 1"):
        configure(model, additional_config=settings(park=1))


@pytest.mark.parametrize("method", ["dflash", "dspark", "draft_model", "suffix", "ngram_gpu"])
def test_trap_09_drafts_from_other_sources_are_refused(model, method):
    """vLLM would look for a draft model first, so the test calls our check directly."""
    config = configure(model)
    config.speculative_config = SimpleNamespace(method=method)
    with pytest.raises(ConfigError, match=f"drafting with {method} is not tested") as refusal:
        refuse_unsupported(config, CompressionConfig.parse(settings()["kvcompress"]))
    assert "--speculative-config" in str(refusal.value)
    assert str(model) in str(refusal.value)


@pytest.mark.parametrize(
    ("flag", "more"),
    [("decode_budget", {}), ("max_whole", {}), ("decode_interval", {"packed_dtype": "k4v3"})],
)
def test_drafts_with_repeated_compression_are_refused(model, flag, more):
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    configure(model, speculative_config=ngram)
    own = settings("cake", **{flag: 8192}, **more)
    with pytest.raises(ConfigError, match="at exact lengths, which drafts can skip") as refusal:
        configure(model, speculative_config=ngram, additional_config=own)
    assert f"--kv-{flag.replace('_', '-')}" in str(refusal.value)


def test_sliding_windows_without_their_own_group_are_refused(checkpoints_folder):
    """Without vLLM's hybrid manager, sliding-window layers share the blocks of all layers."""
    model = make("gpt-oss", checkpoints_folder)
    configure(model)
    with pytest.raises(ConfigError, match="need their own KV cache group") as refusal:
        configure(model, disable_hybrid_kv_cache_manager=True)
    assert "--disable-hybrid-kv-cache-manager" in str(refusal.value)


# -- executors, given by name, class or import path ------------------------------------------------

EXECUTORS = "vllm.v1.executor"


def executors() -> dict[str, type]:
    from vllm.v1.executor import Executor, UniProcExecutor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class Watched(MultiprocExecutor):
        def shutdown(self) -> None:
            super().shutdown()

    class Rerouted(UniProcExecutor):
        def execute_model(self, scheduler_output, non_block=False):
            return self.driver_worker.worker.model_runner.execute_model(scheduler_output)

    class Below(Rerouted):
        pass

    class Foreign(Executor):
        def _init_executor(self) -> None: ...
        def collective_rpc(self, *args, **kwargs): ...
        def check_health(self) -> None: ...

    own = (Watched, Rerouted, Below, Foreign)
    known = (UniProcExecutor, MultiprocExecutor, ExecutorWithExternalLauncher)
    return {cls.__name__: cls for cls in own + known}


@pytest.mark.parametrize(
    "given",
    [
        "mp",
        "uni",
        "UniProcExecutor",
        "Watched",
        f"{EXECUTORS}.multiproc_executor.MultiprocExecutor",
        f"{EXECUTORS}.uniproc_executor.UniProcExecutor",
    ],
)
def test_executors_that_use_the_worker_are_accepted(model, given):
    configure(model, distributed_executor_backend=executors().get(given, given))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("Rerouted", r"Rerouted overrides execute_model;"),
        ("Below", r"Below overrides execute_model;"),
        ("Foreign", "are known to do that;"),
        ("ExecutorWithExternalLauncher", "are known to do that;"),
        (
            f"{EXECUTORS}.uniproc_executor.ExecutorWithExternalLauncher",
            "are known to do that;",
        ),
        ("external_launcher", "are known to do that;"),
    ],
)
def test_other_executors_are_refused_with_a_working_fix(model, given, reason):
    """The test edits vLLM's finished configuration, since no launcher runs here."""
    config, cake = configure(model), CompressionConfig.parse(settings()["kvcompress"])
    backend = executors().get(given, given)
    object.__setattr__(config.parallel_config, "distributed_executor_backend", backend)
    with pytest.raises(ConfigError, match=reason) as refusal:
        refuse_unsupported(config, cake)
    assert "set --distributed-executor-backend mp" in str(refusal.value)
    object.__setattr__(config.parallel_config, "distributed_executor_backend", "mp")
    refuse_unsupported(config, cake)


def ray_executors() -> dict[str, type]:
    """Return executors that need Ray. vLLM 0.33 no longer has the older one."""
    need_ray()
    from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

    class WatchedOnRay(RayExecutorV2):
        def shutdown(self) -> None:
            super().shutdown()

    class ReroutedOnRay(RayExecutorV2):
        def collective_rpc(self, *args, **kwargs): ...

    known = [RayExecutorV2, WatchedOnRay, ReroutedOnRay]
    with suppress(ImportError):
        from vllm.v1.executor.ray_executor import RayDistributedExecutor

        class BelowTheOlder(RayDistributedExecutor):
            pass

        known += [RayDistributedExecutor, BelowTheOlder]
    return {cls.__name__: cls for cls in known}


@pytest.mark.parametrize(
    "given", ["ray", "RayExecutorV2", f"{EXECUTORS}.ray_executor_v2.RayExecutorV2", "WatchedOnRay"]
)
def test_rays_executor_is_accepted_by_name_class_and_path(model, given):
    given = ray_executors().get(given, given)
    config = configure(model, distributed_executor_backend=given, tensor_parallel_size=2)
    assert config.parallel_config.worker_cls.endswith("CompressingCPUWorker")


def test_rays_executor_sends_steps_like_vllms_own():
    """RayExecutorV2 overrides no method on the path of a step."""
    executor = ray_executors()["RayExecutorV2"]
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
    from vllm.v1.executor.ray_executor_v2 import RayWorkerProc

    assert issubclass(executor, MultiprocExecutor)
    for name in ("collective_rpc", "execute_model", "sample_tokens"):
        assert getattr(executor, name) is getattr(MultiprocExecutor, name)
    assert RayWorkerProc.worker_busy_loop is WorkerProc.worker_busy_loop


def test_data_parallel_ranks_on_rays_executor_are_refused(model):
    need_ray()
    with pytest.raises(ConfigError, match=r"--data-parallel-size and .* ray were not tested"):
        configure(model, distributed_executor_backend="ray", data_parallel_size=2)


def test_a_ray_executor_with_an_overridden_step_is_refused(model):
    with pytest.raises(ConfigError, match=r"ReroutedOnRay overrides collective_rpc;"):
        configure(model, distributed_executor_backend=ray_executors()["ReroutedOnRay"])


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("ray", "unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND, or set"),
        *(
            (name, "set --distributed-executor-backend ray, or set")
            for name in (
                "RayDistributedExecutor",
                f"{EXECUTORS}.ray_executor.RayDistributedExecutor",
                "BelowTheOlder",
            )
        ),
    ],
)
def test_rays_older_executor_is_refused_with_a_working_fix(model, given, fix, monkeypatch):
    found = ray_executors()
    if "RayDistributedExecutor" not in found:
        pytest.skip("this vLLM has no older executor for Ray")
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(ConfigError, match=r"only .* are known to do that") as refusal:
        configure(model, distributed_executor_backend=found.get(given, given))
    assert fix in str(refusal.value)
    monkeypatch.delenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND")
    configure(model, distributed_executor_backend="ray")


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0.0", "0.12.1"])
def test_an_untested_vllm_is_refused(model, version, monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(VllmHookError, match=rf"vLLM {version} is untested.*install a vLLM in"):
        configure(model)
    configure(model, additional_config={})  # without our setting the version is not checked


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compress": "caek"}, "did you mean 'cake'"),
        ({"compress": "cake", "budgte": 0.1}, "did you mean 'budget'"),
        ({"compress": "cake", "budget": 0}, r"budget must be a ratio in \(0, 1\]"),
        ({"compress": "cake", "budget": -1}, "got -1"),
        ({"compress": "cake", "budget": 1.5}, "got 1.5"),
        ({"compress": "cake", "budget": "ten"}, "got 'ten'"),
        ({"compress": "cake", "budget": float("nan")}, "got nan"),
        ({"compress": "cake", "budget": 32}, "cannot hold the observation window of 32"),
        ("cake", "must be an object"),
    ],
)
def test_wrong_settings_are_refused_before_the_model_is_read(given, message, model, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(EngineArgs, "create_model_config", lambda self: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=message):
        configure(model, additional_config={"kvcompress": given})


# -- requests ---------------------------------------------------------------------------------


def test_vllm_refuses_bad_prompts_and_the_engine_survives(model):
    from vllm.exceptions import VLLMValidationError

    with engine(model, additional_config=settings(), max_model_len=512) as llm:
        good = tokens(200, seed=1)
        first = llm.generate([good])
        for bad in ([], tokens(513, seed=2), tokens(5000, seed=3)):
            with pytest.raises((ValueError, VLLMValidationError), match=r"(?i)prompt|length|token"):
                llm.generate([bad])
        assert llm.generate([good]) == first
        assert len(llm.generate([tokens(511, seed=4)], 5)[0]) == 1
