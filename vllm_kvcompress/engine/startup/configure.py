"""VllmHook `configure`: read ``additional_config["kvcompress"]`` and select our classes.

Runs once, in the process that builds the VllmConfig, before the model loads. Without our settings
vLLM's configuration is returned unchanged.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_kvcompress.engine.device_memory import sizes_of
from vllm_kvcompress.engine.layers import draft_layers_of, groups_of
from vllm_kvcompress.engine.messages.outputs import default_usage_to_none
from vllm_kvcompress.engine.messages.settings import (
    attach_settings,
    has_settings,
    parsed_settings,
    raw_settings,
    refuse_misspelt_settings,
)
from vllm_kvcompress.engine.startup.cli_args import ending_the_command, from_command
from vllm_kvcompress.engine.startup.refusals import SCHEDULERS, WORKERS, refuse_unsupported
from vllm_kvcompress.engine.startup.vllm_hooks import check, check_all
from vllm_kvcompress.errors import ConfigError, KVCompressError, VllmHookError
from vllm_kvcompress.methods.base import Reads
from vllm_kvcompress.methods.entry_points import package_summary
from vllm_kvcompress.methods.registry import published
from vllm_kvcompress.planning.memory import host_slots
from vllm_kvcompress.planning.packed_pages import CPU_BLOCK_WITH_GROUPS
from vllm_kvcompress.refusals.server import RUST_FRONT_END
from vllm_kvcompress.refusals.tested import CONNECTORS, OFFLOADING_KEYS
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.off_switch import OFF_SWITCH, is_switched_off, without_compression
from vllm_kvcompress.settings.packed_dtype import AUTO, K4V3

logger = init_logger("vllm.kvcompress")

# vLLM's default on a CPU.
_CPU_BLOCK = 128
_INSTALLED = "_kvcompress_configure"
# vLLM takes the class with its connector's name from this module.
_OFFLOADING_MODULE = "vllm_kvcompress.engine.scheduling.offloading"


def configure(config: VllmConfig, settings: CompressionConfig) -> None:
    """Select the compressing worker and scheduler for `config`, or refuse before the model loads.

    Raises:
        ConfigError: compression does not support the model or an option.
        VllmHookError: compression does not support this vLLM.
    """
    check_all(vllm.__version__)
    refuse_unsupported(config, settings)
    if groups_of(config).stateful:
        check("worker.batch_rows", version=vllm.__version__)
    if draft_layers_of(config):
        check("worker.draft_builders", version=vllm.__version__)
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector in CONNECTORS:
        check("worker.pulls", version=vllm.__version__)
    offloads = transfer is not None and transfer.kv_connector in OFFLOADING_KEYS
    if offloads:
        check("scheduling.offloading", version=vllm.__version__)
        config.kv_transfer_config = dataclasses.replace(
            transfer, kv_connector_module_path=_OFFLOADING_MODULE
        )
    parallel, scheduler = config.parallel_config, config.scheduler_config
    if current_platform.is_cuda():
        # Imported here because it loads the attention backends.
        from vllm_kvcompress.engine.startup.backend_choice import choose_backend

        choose_backend(config)
    if current_platform.is_cpu() and settings.packs_k4v3:
        _choose_smaller_blocks(config)
    parallel.worker_cls = WORKERS.get(parallel.worker_cls, parallel.worker_cls)
    scheduler.scheduler_cls = SCHEDULERS[bool(scheduler.async_scheduling)]
    if settings.model is None:
        settings = settings.with_values(model=str(config.model_config.model))
    config.additional_config = attach_settings(config.additional_config, settings)
    block = 0 if groups_of(config).stateful else int(config.cache_config.block_size or 0)
    if block:
        # Refuse less host memory than one slot. Without a block size yet, the worker refuses it.
        host_slots(settings.park, sizes_of(config).block_bytes)
    caches = {"prefix cache": config.cache_config.enable_prefix_caching, "host memory": offloads}
    used_caches = [name for name, is_used in caches.items() if is_used]
    for line in _startup_lines(settings, caches=used_caches, block=block):
        logger.info("%s", line)
    # Imported here: only the process that receives requests needs this module.
    from vllm_kvcompress.engine.frontend.modalities import warning_of

    if warning := warning_of(config):
        logger.warning(warning)


def _choose_smaller_blocks(config: VllmConfig) -> None:
    """Replace vLLM's default of 128 tokens per block on a CPU, unless the user chose a size.

    A packed page holds 4 blocks' tokens, and layers divide their budget in pages. Pages of 512
    tokens would flatten the shares of an allocator and be mostly empty after short prompts.
    """
    cache = config.cache_config
    if cache.user_specified_block_size or cache.block_size != _CPU_BLOCK:
        return
    cache.block_size = CPU_BLOCK_WITH_GROUPS
    logger.info(
        "KV blocks have %d tokens instead of %d, because a packed page in k4v3 holds several"
        " blocks' tokens; --block-size overrides this",
        CPU_BLOCK_WITH_GROUPS,
        _CPU_BLOCK,
    )


def _startup_lines(
    settings: CompressionConfig, *, caches: Sequence[str], block: int
) -> Iterator[str]:
    """Yield the lines that say at startup how the engine compresses.

    Args:
        settings: settings of the engine.
        caches: where prompts are stored for later ones, of "prefix cache" and "host memory".
        block: tokens per KV block; 0 if vLLM chooses it later. Default lengths are then rounded to
            whole blocks later too.
    """
    unrounded = ", rounded to whole KV blocks"
    settings = settings.in_whole_blocks(block) if block else settings
    on_request = "only for requests that name a method or an alias"
    has_budget = settings.enabled or set(settings.allow_override) - {"off"}
    yield (
        f"KV-cache compression is on: {settings.compress if settings.enabled else on_request}"
        f"{f', budget {settings.budget}' if has_budget else ''}, for prompts of at least"
        f" {settings.resolved_min_prompt} tokens"
    )
    if packages := package_summary():
        yield f"methods of other packages: {packages}"
    for variant in settings.variants:
        name, packed_dtype = variant.compress, variant.resolved_packed_dtype
        if packed_dtype != AUTO:
            yield f"{name} at a budget of {variant.budget} packs kept tokens in {packed_dtype}"
        if variant.packs_outputs:
            yield (
                f"{name} packs output tokens in {packed_dtype} every {variant.decode.interval}"
                " output tokens, rounded up to whole pages"
            )
    if settings.allow_override:
        bounds = " or ".join(f"{low} to {high}" for low, high in settings.budget_bounds)
        yield (
            f"requests may choose the methods {', '.join(settings.allow_override)}, with"
            f" {f'budgets {bounds}' if bounds else 'any budget'}"
        )
    if settings.alias:
        yield f"further model names: {', '.join(map(str, settings.alias))}"
    if settings.park is not None:
        yield f"pages of preempted requests wait in up to {settings.park} GiB of host memory"
    if settings.pressure:
        yield (
            f"prompts stay uncompressed while less than {settings.pressure:g} of the KV pool is in"
            " use, counting the prompt itself"
        )
    for variant in settings.variants:
        # With --kv-allow-override, requests may choose a budget that needs the look-ahead.
        waits = settings.allow_override or not variant.keeps_all_tokens
        if variant.resolved_lookahead and waits:
            yield (
                f"{variant.compress} compresses a prompt after {variant.resolved_lookahead} output"
                f" tokens{', if its budget drops tokens' if variant.keeps_all_tokens else ''}"
            )
    if settings.decode.budget is not None:
        is_rounded = block or "decode_interval" in settings.given_keys
        yield (
            f"requests hold at most {settings.decode.budget} tokens per layer while they generate,"
            f" and are compressed again every {settings.decode.interval} output tokens"
            f"{'' if is_rounded else unrounded}"
        )
    if settings.pieces.max_whole is not None:
        is_rounded = block or "piece" in settings.given_keys
        yield (
            f"prompts of more than {settings.pieces.max_whole} tokens are compressed every"
            f" {settings.pieces.length} tokens{'' if is_rounded else f'{unrounded},'} during"
            f" prefill, {_scoring(settings)}"
        )
    for variant in settings.variants:
        allocator = variant.parts.allocator
        if parameters := published(allocator, settings.model, variant.budget):
            yield f"using the parameters published for this model: {allocator} {parameters}"
        if Reads.COLUMN_SUMS in variant.method.reads and caches:
            yield (
                f"{variant.compress} reads attention over the whole prompt, so prompts that it"
                f" compresses fill the {' and '.join(caches)} but do not read"
                f" {'it' if len(caches) == 1 else 'them'}"
            )


def _scoring(settings: CompressionConfig) -> str:
    """Return a phrase for how the tokens of a piece are scored."""
    variants = (settings,) if settings.enabled else settings.variants
    if all(variant.resolved_packed_dtype == K4V3 for variant in variants):
        return "and keep all tokens"
    first, last = settings.scoring_query_counts
    if not last:
        return "scored by their own last tokens"
    return f"scored by the prompt's {f'first {first} and ' if first else ''}last {last} tokens"


def _refuse_rust_front_end(flag: str) -> None:
    """Raise ConfigError for a flag that needs vLLM's Python API server, if another one is used."""
    if envs.VLLM_USE_RUST_FRONTEND:
        raise ConfigError(f"{flag}: {RUST_FRONT_END.reason}; {RUST_FRONT_END.fix}")


def _install_aliases(*, or_warn: bool) -> None:
    """Install the hooks that serve the model under further names.

    Args:
        or_warn: log a warning instead of raising an error.

    Raises:
        ConfigError: vLLM's Python API server is not in use.
        VllmHookError: this vLLM lacks a hook.
    """
    try:
        _refuse_rust_front_end("--kv-alias")
        check("frontend.aliases", version=vllm.__version__)
    except KVCompressError as e:
        if not or_warn:
            raise
        logger.warning("the server starts without its aliases: %s", e)
        return
    from vllm_kvcompress.engine.frontend import aliases

    aliases.install()


def _install_off(settings: CompressionConfig) -> None:
    """Install what a server needs whose settings turn compression off, if this vLLM allows it.

    Requests pass no hook of ours, unless it serves aliases or reports usage.
    """
    default_usage_to_none()
    try:
        check("frontend.api", "frontend.usage", "frontend.metrics", version=vllm.__version__)
    except VllmHookError as e:
        logger.warning("vllm:kv_compress_off and notes on ignored settings are missing: %s", e)
        return
    from vllm_kvcompress.engine.frontend import metrics

    metrics.install()
    if settings.usage:
        from vllm_kvcompress.engine.frontend import ignored_settings

        ignored_settings.install()


def _install_frontend(settings: CompressionConfig) -> None:
    """Install the hooks of the API server: request checks, usage and metrics.

    Without compression, a vLLM without the basic hooks is served unchanged. A vLLM without the hook
    of a setting that is used is refused.

    Raises:
        ConfigError: a setting needs vLLM's Python API server, and another one is in use.
        VllmHookError: this vLLM lacks the hook of a setting.
    """
    if settings.protection.words:
        _refuse_rust_front_end("--kv-protect")
    default_usage_to_none()
    if settings.usage:
        from vllm_kvcompress.engine.frontend import usage

        usage.install()
    try:
        check(
            "frontend.api",
            "frontend.protection.chat_parts",
            "frontend.metrics",
            version=vllm.__version__,
        )
    except VllmHookError:
        return
    # Imported here: engine and worker processes do not need these modules.
    from vllm_kvcompress.engine.frontend import api, metrics
    from vllm_kvcompress.engine.frontend.protection import chat_parts

    api.install()
    chat_parts.install()
    metrics.install()
    if settings.active:
        check("frontend.stop_strings", version=vllm.__version__)
        from vllm_kvcompress.engine.frontend import stop_strings

        stop_strings.install()


def install() -> None:
    """Wrap ``EngineArgs.create_engine_config``; safe to call twice."""
    if getattr(EngineArgs, _INSTALLED, False):
        return
    create = EngineArgs.create_engine_config

    @functools.wraps(create)
    def creating(self: Any, *args: Any, **kwargs: Any) -> VllmConfig:
        refusing = ending_the_command if from_command(self) else nullcontext
        with refusing():
            # Refuse wrong settings before vLLM reads the model.
            if switched_off := is_switched_off():
                settings = without_compression(raw_settings(self.additional_config))
                self.additional_config = attach_settings(self.additional_config, settings)
            else:
                refuse_misspelt_settings(self.additional_config)
            settings = parsed_settings(self.additional_config)
        active = settings if settings.active else None
        config = create(self, *args, **kwargs)
        with refusing():
            if active is not None:
                check_all(vllm.__version__)
            if switched_off:
                logger.warning("KV-cache compression is off, because %s is set", OFF_SWITCH)
            if settings.alias:
                _install_aliases(or_warn=switched_off)
            if active is None and has_settings(self.additional_config):
                _install_off(settings)
            else:
                _install_frontend(settings)
        if active is not None:
            with refusing():
                configure(config, active)
        return config

    EngineArgs.create_engine_config = creating
    setattr(EngineArgs, _INSTALLED, True)
