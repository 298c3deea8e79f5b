"""Starts an engine from the flags of ``vllm serve`` and checks one prompt's compression in it."""

import dataclasses
import platform
import time
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_kvcompress.doctor.checks import Check, CheckCallback, Failed, require
from vllm_kvcompress.doctor.probe_prompt import Limits
from vllm_kvcompress.engine.device_memory import sizes_of
from vllm_kvcompress.engine.doctor import trial_outcome
from vllm_kvcompress.engine.doctor.installation import parser, sentence
from vllm_kvcompress.engine.doctor.trial_prompt import prompt_of
from vllm_kvcompress.engine.layers import groups_of, stages_of
from vllm_kvcompress.engine.messages.settings import active_settings, attach_settings
from vllm_kvcompress.errors import ConfigError, KVCompressError
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.planning.packed_pages import packed_page_tokens
from vllm_kvcompress.planning.request import PlannedRequest
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.off_switch import OFF_SWITCH, is_switched_off
from vllm_kvcompress.settings.overrides import override_args


def try_model(spec: dict[str, Any], on_check: CheckCallback) -> dict[str, Any] | None:
    """Configure and start the engine, run one prompt and report the checks.

    Args:
        spec: as in `engine.doctor.run_checks.examine`.
        on_check: called with each check as soon as it is made.

    Returns:
        The kept map as JSON, if `spec` requests it and something was packed.

    Raises:
        ConfigError: the prompt or the settings do not fit this model.
        Failed: a check failed that makes further checks pointless.
    """
    arguments = parse(spec["arguments"])
    config = _configured(on_check, arguments)
    settings = active_settings(config.additional_config)
    if settings is None:
        why = f", because {OFF_SWITCH} is set" if is_switched_off() else ""
        on_check(Check(name="compression", ok=True, detail=f"off: vLLM runs unchanged{why}"))
        return None
    sizes = sizes_of(config)
    limits = Limits(
        settings=settings.variants[0],
        layers=sizes.layers,
        block_size=config.cache_config.block_size,
        max_model_len=config.model_config.max_model_len,
        request_args=override_args(settings),
        page_tokens=_page_tokens(config, settings.variants[0]),
        draft_layers=sizes.draft_layers,
        draft_slots=sizes.draft_slots,
    )
    if spec["tokens"] is not None and not spec["exact"]:
        # Reject a length that is not compressed before the engine starts, which takes minutes.
        _plan(limits, limits.request(spec["tokens"]))
    engine = _started(on_check, config)
    try:
        require(on_check, runner(engine, config))
        # vLLM may choose the block size while the engine starts.
        block = config.cache_config.block_size
        rounded = limits.settings.in_whole_blocks(block)
        limits = dataclasses.replace(
            limits,
            block_size=block,
            settings=rounded,
            page_tokens=_page_tokens(config, rounded),
        )
        prompt = prompt_of(engine, config, limits, spec)
        limits = dataclasses.replace(limits, spans=prompt.protected)
        request = limits.request(len(prompt.ids))
        plan = _plan(limits, request)
        try:
            outcome = trial_outcome.run(engine, prompt, limits, buckets=spec["buckets"] or 1)
        except Exception as e:
            on_check(Check(name="worker", ok=False, detail=f"the prompt failed: {sentence(e)}"))
            return None
        for check in trial_outcome.check_outcome(outcome, request, plan, limits.draft_slots):
            on_check(check)
        if not spec["buckets"]:
            return None
        groups, stages = groups_of(config), len(stages_of(config))
        numbers = groups.full if groups.num_uncompressed else ()
        name = str(config.model_config.model)
        kept_map = trial_outcome.kept_map(
            outcome, request, name, parts=prompt.parts, numbers=numbers, stages=stages
        )
        return None if kept_map is None else kept_map.to_json()
    finally:
        engine.engine_core.shutdown()


def _page_tokens(config: VllmConfig, settings: CompressionConfig) -> int | None:
    """Return the tokens in a packed page; None if it holds the tokens of an ordinary page."""
    itemsize = config.model_config.dtype.itemsize
    return packed_page_tokens(settings, config.cache_config.block_size, itemsize)


def _plan(limits: Limits, request: PlannedRequest) -> PagePlan:
    """Return the page plan of a request's prompt.

    Raises:
        ConfigError: the prompt stays uncompressed.
    """
    if request.plan is None:
        raise ConfigError(
            f"these settings do not compress a prompt of {request.prompt} tokens; use one of"
            f" {limits.shortest()} tokens"
        )
    return request.plan


def parse(arguments: list[str]) -> EngineArgs:
    """Parse vLLM's flags, including ours, with settings under which one short request compresses.

    Sets --kv-pressure to 0, because a single prompt in an empty pool would stay uncompressed. Sets
    --kv-decode-budget, if given, to its minimum, so that a short output is packed.
    """
    engine_args = EngineArgs.from_cli_args(parser().parse_args(arguments))
    settings = active_settings(engine_args.additional_config)
    additional_config = engine_args.additional_config or {}
    if settings is not None:
        overrides = {"pressure": 0.0} if settings.pressure else dict[str, Any]()
        if settings.decode.budget is not None:
            minimums = [variant.min_decode_budget for variant in settings.variants]
            overrides["decode_budget"] = max(minimums)
        additional_config = attach_settings(additional_config, settings.with_values(**overrides))
    # The original object exits the process if the model is not supported; a copy raises an error,
    # which `_configured` reports as a failed check.
    return dataclasses.replace(engine_args, additional_config=additional_config)


def _configured(on_check: CheckCallback, arguments: EngineArgs) -> VllmConfig:
    """Return vLLM's config, and report a check of the model.

    Raises:
        Failed: vLLM or compression rejects the model.
    """
    try:
        config = arguments.create_engine_config()
    except KVCompressError as e:
        on_check(Check(name="model", ok=False, detail=str(e)))
    except Exception as e:
        on_check(Check(name="model", ok=False, detail=f"vLLM rejects it: {sentence(e)}"))
    else:
        architecture = ", ".join(config.model_config.architectures or [])
        support = _support(active_settings(config.additional_config), config.model_config.dtype)
        on_check(Check(name="model", ok=True, detail=f"{architecture}: {support}"))
        return config
    raise Failed


def _support(settings: CompressionConfig | None, dtype: torch.dtype) -> str:
    """Return how the model is served, and whether decoding in k4v3 is slow on this machine."""
    if settings is None:
        return "uncompressed"
    support = f"supported by {settings.compress}"
    if not (settings.packs_k4v3 and current_platform.is_cpu()):
        return support
    # Imported late because it imports vLLM's CPU worker.
    from vllm_kvcompress.engine.worker.cpu import runs_amx

    if runs_amx(dtype):
        support += (
            "; with AMX and bfloat16, a decode step in k4v3 took 1.2 times as long as with as many"
            " tokens in 16 bits (one run of an earlier version)"
        )
    return support


def _started(on_check: CheckCallback, config: VllmConfig) -> LLMEngine:
    """Return a started engine, and report a check of its start.

    Raises:
        Failed: the engine did not start.
    """
    started_at = time.monotonic()
    try:
        engine = LLMEngine.from_vllm_config(config)
    except Exception as e:
        on_check(Check(name="engine", ok=False, detail=f"it did not start: {sentence(e)}"))
        raise Failed from None
    seconds = time.monotonic() - started_at
    on_check(Check(name="engine", ok=True, detail=f"started in {seconds:.0f} s on {_device()}"))
    return engine


def _device() -> str:
    if current_platform.is_cuda():
        return str(current_platform.get_device_name())
    return f"{platform.machine()} CPU"


def runner(engine: LLMEngine, config: VllmConfig) -> Check:
    """Return a check that lists the running classes and tests that our worker is one of them."""
    core = engine.engine_core.engine_core
    ranks = core.model_executor.collective_rpc(_classes)
    (worker, _, model_runner, backends), scheduler = ranks[0], type(core.scheduler).__name__
    layout = getattr(config.cache_config, "kv_cache_layout", None)
    detail = (
        f"{worker}, {scheduler}, {model_runner}, attention {', '.join(backends)}, cache layout"
        f" {layout or 'the default'}, blocks of {config.cache_config.block_size} tokens"
    )
    if not all(rank[1] for rank in ranks):
        detail += ": this worker does not compress; remove --worker-cls"
    return Check(name="classes", ok=all(rank[1] for rank in ranks), detail=detail)


def _classes(wrapper: Any) -> tuple[str, bool, str, list[str]]:
    """Return a rank's worker class, whether it compresses, its model runner and its backends."""
    worker = wrapper.worker
    version = "V2" if hasattr(worker.model_runner, "req_states") else "V1"
    groups = [group for groups in worker.model_runner.attn_groups for group in groups]
    backends = sorted({group.backend.get_name() for group in groups})
    compresses = getattr(worker, "compressor", None) is not None
    return type(worker).__name__, compresses, f"Model Runner {version}", backends
