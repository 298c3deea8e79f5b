"""A real engine, started from the flags of ``vllm serve``, and one prompt through it."""

import dataclasses
import platform
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_kvcompress.doctor.checks import Check, Failed, Tell, require
from vllm_kvcompress.doctor.probe_prompt import Limits
from vllm_kvcompress.engine.diagnosis import probe
from vllm_kvcompress.engine.diagnosis.installation import parser, sentence
from vllm_kvcompress.engine.diagnosis.trial_prompt import prompt_of
from vllm_kvcompress.engine.layers import groups_of, layers_together, stages_of
from vllm_kvcompress.engine.messages.settings import active_settings, attach_settings
from vllm_kvcompress.errors import ConfigError, KVCompressError
from vllm_kvcompress.methods.page_plan import PagePlan
from vllm_kvcompress.settings.overrides import how_to_ask
from vllm_kvcompress.settings.whole_blocks import in_whole_blocks


def try_model(spec: dict[str, Any], tell: Tell) -> dict[str, Any] | None:
    """Configure and start the engine, and put one prompt through it.

    Args:
        spec: as in `engine.diagnosis.doctor.examine`.

    Returns:
        The kept map as JSON, if `spec` asks for it and something was packed.

    Raises:
        ConfigError: what was typed means nothing for this model.
        Failed: a check that says all there is to say.
    """
    arguments = parse(spec["arguments"])
    config = _configured(tell, arguments)
    settings = active_settings(config.additional_config)
    if settings is None:
        tell(Check(name="compression", ok=True, detail="off: nothing of vLLM is replaced"))
        return None
    limits = Limits(
        settings=settings.variants[0],
        layers=layers_together(config),
        block_size=config.cache_config.block_size,
        longest=config.model_config.max_model_len,
        asks=how_to_ask(settings),
    )
    if spec["tokens"] is not None and not spec["exact"]:
        # A length that would be left whole is refused before minutes are spent on the engine.
        _plan(limits, spec["tokens"])
    engine = _started(tell, config)
    try:
        require(tell, runner(engine, config))
        # vLLM may have chosen it while it started
        block = config.cache_config.block_size
        fitting = in_whole_blocks(limits.settings, block)
        limits = dataclasses.replace(limits, block_size=block, settings=fitting)
        prompt = prompt_of(engine, config, limits, spec)
        limits = dataclasses.replace(limits, spans=prompt.protected)
        plan = _plan(limits, len(prompt.ids))
        try:
            outcome = probe.run(engine, prompt, limits, buckets=spec["buckets"] or 1)
        except Exception as e:
            tell(Check(name="worker", ok=False, detail=f"the prompt failed: {sentence(e)}"))
            return None
        for check in probe.judge(outcome, plan, limits):
            tell(check)
        if not spec["buckets"]:
            return None
        own, stages = groups_of(config), len(stages_of(config))
        numbers = own.full if own.others else ()
        name = str(config.model_config.model)
        kept_map = probe.kept_map(
            *(outcome, plan, limits, name), parts=prompt.parts, numbers=numbers, stages=stages
        )
        return None if kept_map is None else kept_map.to_json()
    finally:
        engine.engine_core.shutdown()


def _plan(limits: Limits, tokens: int) -> PagePlan:
    plan = limits.plan(tokens)
    if plan is None:
        raise ConfigError(
            f"a prompt of {tokens} tokens is left whole by these settings; give one of"
            f" {limits.shortest()} tokens"
        )
    return plan


def parse(arguments: list[str]) -> EngineArgs:
    """vLLM's own reading of its flags, ours among them.

    Without --kv-pressure: a lone prompt in an empty pool would be left whole. And with the smallest
    decode budget, where there is one: a short answer is packed again then.
    """
    engine_args = EngineArgs.from_cli_args(parser().parse_args(arguments))
    settings = active_settings(engine_args.additional_config)
    more = engine_args.additional_config or {}
    if settings is not None:
        eager = {"pressure": 0.0} if settings.pressure else dict[str, Any]()
        if settings.decode_budget is not None:
            least = [variant.least_decode_budget for variant in settings.variants]
            eager["decode_budget"] = max(least)
        more = attach_settings(more, settings.model_copy(update=eager))
    # a copy, which does not end the command where the model is refused: that is a finding
    return dataclasses.replace(engine_args, additional_config=more)


def _configured(tell: Tell, arguments: EngineArgs) -> VllmConfig:
    try:
        config = arguments.create_engine_config()
    except KVCompressError as e:
        tell(Check(name="model", ok=False, detail=str(e)))
    except Exception as e:
        tell(Check(name="model", ok=False, detail=f"vLLM refuses it: {sentence(e)}"))
    else:
        kind = ", ".join(config.model_config.architectures or [])
        settings = active_settings(config.additional_config)
        verdict = "served whole" if settings is None else f"can be served with {settings.compress}"
        tell(Check(name="model", ok=True, detail=f"{kind}: {verdict}"))
        return config
    raise Failed


def _started(tell: Tell, config: VllmConfig) -> LLMEngine:
    began = time.monotonic()
    try:
        engine = LLMEngine.from_vllm_config(config)
    except Exception as e:
        tell(Check(name="engine", ok=False, detail=f"it did not start: {sentence(e)}"))
        raise Failed from None
    took = time.monotonic() - began
    tell(Check(name="engine", ok=True, detail=f"started in {took:.0f} s on {_device()}"))
    return engine


def _device() -> str:
    if current_platform.is_cuda():
        return str(current_platform.get_device_name())
    return f"{platform.machine()} CPU"


def runner(engine: LLMEngine, config: VllmConfig) -> Check:
    """Which of vLLM's classes run, and whether ours are among them."""
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
    worker = wrapper.worker
    version = "V2" if hasattr(worker.model_runner, "req_states") else "V1"
    groups = [group for groups in worker.model_runner.attn_groups for group in groups]
    backends = sorted({group.backend.get_name() for group in groups})
    compresses = getattr(worker, "compressor", None) is not None
    return type(worker).__name__, compresses, f"Model Runner {version}", backends
