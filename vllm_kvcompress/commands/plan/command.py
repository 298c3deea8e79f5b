"""``kvcompress plan``: compute the forecast for a model and a workload."""

from dataclasses import replace
from typing import Any

from vllm_kvcompress.commands.plan.concurrency import forecast, planned_request, sizes_on_rank
from vllm_kvcompress.commands.plan.drafts import Drafts, drafts_of
from vllm_kvcompress.commands.plan.forecast import DEVICES_WITH_K4V3, PlanResult, Workload
from vllm_kvcompress.commands.plan.gpu_memory import GIB, defaults_for, estimate
from vllm_kvcompress.commands.plan.model_shape import (
    ITEMSIZE,
    ModelShape,
    read_config,
    shape_of,
)
from vllm_kvcompress.commands.plan.next_turn import next_hits, warm_conversations
from vllm_kvcompress.commands.plan.options import PlanOptions
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods.registry import RECOMMENDED, RECOMMENDED_BUDGETS
from vllm_kvcompress.planning.model_traits import text_config, traits_of
from vllm_kvcompress.planning.packed_pages import CPU_BLOCK_WITH_GROUPS
from vllm_kvcompress.planning.states import hybrid_block_size
from vllm_kvcompress.refusals.rule import refuse
from vllm_kvcompress.refusals.server import SERVER, Server
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.packed_dtype import K4V3
from vllm_kvcompress.settings.parsing import with_default_method
from vllm_kvcompress.settings.protection import WORDS

# vLLM's default block sizes.
_BLOCK_SIZE = {"cuda": 16, "cpu": 128}


def make_plan(options: PlanOptions) -> PlanResult:
    """Return the forecast for a model and requests of one length.

    Without a method, a budget and a format, it is for the recommended ones: on a CPU in k4v3 if
    that can be used, else at the default budget in the cache's dtype.

    Raises:
        ConfigError: An option is invalid, or the model cannot be served with compression.
    """
    choices = {"compress", "allocator", "scorer", "budget", "packed_dtype"}
    if options.device in DEVICES_WITH_K4V3 and not options.settings.keys() & choices:
        budget = str(RECOMMENDED_BUDGETS["balanced"])
        try:
            return _plan(replace(options, budget=budget, packed_dtype=K4V3))
        except ConfigError:
            # The reason may be k4v3. If it is not, the same error follows.
            pass
    return _plan(options)


def _plan(options: PlanOptions) -> PlanResult:
    settings = _checked_settings(options)
    _check_options(options)
    config = read_config(options.model)
    shape = shape_of(
        config,
        options.dtype,
        cache_dtype=options.cache_dtype,
        disable_sliding_window=options.disable_sliding_window,
        prefix_caching=options.prefix_caching is not False,
    )
    block_size = _block_size(options, config, shape, settings)
    drafts = drafts_of(options.speculative, options.model, config)
    _refuse_unsupported(options, config, shape, settings, block_size, drafts)
    settings = settings.in_whole_blocks(block_size)
    defaults = defaults_for(options.device, options.gpu_gib, options.ranks * options.stages)
    sizes = sizes_on_rank(shape, options, block_size, defaults, drafts)
    estimated = estimate(options, config, shape, sizes, drafts)
    pool_bytes = None if options.memory_gib is None else int(options.memory_gib * GIB)
    if estimated is not None:
        pool_bytes = estimated.kv_cache_bytes
    load = Workload(prompt=options.length, output=options.output, protected=options.protected)
    # vLLM caches windows and states only at boundaries of the prompt.
    caches_output = options.prefix_caching is not False and not shape.groups.num_uncompressed
    request = planned_request(settings, sizes, load)
    planned = forecast(
        settings, sizes, load, pool_bytes=pool_bytes, tables_from_pool=options.device == "cuda"
    )
    reuses = caches_output and settings.reuses_pages
    return PlanResult(
        options=options,
        shape=shape,
        drafts=drafts,
        settings=settings,
        forecast=planned,
        next_hits=next_hits(request) if caches_output else None,
        warm=warm_conversations(request, sizes, planned) if reuses else None,
        defaults=defaults,
        estimated=estimated,
    )


def _checked_settings(options: PlanOptions) -> CompressionConfig:
    given = with_default_method(options.settings)
    if options.protected:
        # --protected implies --kv-protect with all parts, unless the settings have their own.
        given = {"protect": WORDS, **given}
    settings = CompressionConfig.parse(given)
    if not settings.active:
        raise ConfigError(
            f"kvcompress plan needs a compression method; give one, such as --kv-compress"
            f" {RECOMMENDED}"
        )
    return settings


def _block_size(
    options: PlanOptions, config: dict[str, Any], shape: ModelShape, settings: CompressionConfig
) -> int:
    """Return the tokens per KV block: as requested, or more if a layer's state is larger."""
    default = _BLOCK_SIZE[options.device]
    if options.device == "cpu" and settings.packs_k4v3:
        default = CPU_BLOCK_WITH_GROUPS
    block_size = options.block_size or default
    if not shape.groups.stateful:
        return block_size
    token_bytes = 2 * max(shape.kv_heads // options.ranks, 1) * shape.head_dim * shape.stored
    return hybrid_block_size(
        text_config(config),
        options.ranks,
        shape.itemsize,
        token_bytes,
        block_size,
        state_dtype=options.state_dtype,
        on_cpu=options.device == "cpu",
    )


def _check_options(options: PlanOptions) -> None:
    """Raise ConfigError for options that are invalid for every model."""
    if options.device not in _BLOCK_SIZE:
        raise ConfigError(f"--device must be one of {sorted(_BLOCK_SIZE)}, got {options.device!r}")
    if options.device != "cuda" and options.gpu_gib is not None:
        raise ConfigError(
            "--gpu-memory needs --device cuda, got --device cpu; give --kv-memory (vLLM's default"
            " on a CPU is half of the machine's memory, or VLLM_CPU_KVCACHE_SPACE)"
        )
    if options.state_dtype not in ("auto", *ITEMSIZE):
        raise ConfigError(
            f"--mamba-ssm-cache-dtype must be auto or one of {sorted(ITEMSIZE)}, got"
            f" {options.state_dtype!r}"
        )
    if options.protected > options.length:
        raise ConfigError(
            f"--protected must be at most --len {options.length}, got {options.protected}"
        )
    if not 0 < options.utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization must be in (0, 1], got {options.utilization:g}"
        )
    tokens = options.length + options.output
    if options.longest is not None and options.longest < tokens:
        raise ConfigError(
            f"--max-model-len must be at least --len plus --max-tokens, {tokens} tokens; got"
            f" {options.longest}"
        )


def _refuse_unsupported(
    options: PlanOptions,
    config: dict[str, Any],
    shape: ModelShape,
    settings: CompressionConfig,
    block_size: int,
    drafts: Drafts,
) -> None:
    """Raise ConfigError if the settings cannot compress this model's cache."""
    traits = replace(traits_of(config), dtype=shape.dtype, cache=options.cache_dtype)
    if options.disable_sliding_window:
        traits = replace(traits, window=None)
    server = Server(
        settings=settings,
        model=traits,
        name=options.model,
        head_dim=shape.head_dim,
        itemsize=shape.stored,
        block_size=block_size,
        max_model_len=options.longest,
        options=_vllm_options(options, drafts),
    )
    refuse(SERVER, server)
    drafts.refuse_another_shape(shape)


def _vllm_options(options: PlanOptions, drafts: Drafts) -> dict[str, Any]:
    """Return the set options of vLLM, as in `Server.options`."""
    found = {
        "--mamba-cache-mode": "align" if options.prefix_caching else None,
        "--no-enable-prefix-caching": options.prefix_caching is False,
        "--tensor-parallel-size": options.ranks if options.ranks > 1 else None,
        "--pipeline-parallel-size": options.stages if options.stages > 1 else None,
        **drafts.facts,
    }
    return {flag: value for flag, value in found.items() if value}
