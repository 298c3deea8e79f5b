"""VllmHook `configure`: read ``additional_config["kvcompress"]`` and select our classes.

Runs once, in the process that builds the VllmConfig, before the model loads. Without our settings
vLLM's configuration is returned unchanged.
"""

import functools
from contextlib import nullcontext
from typing import Any

import vllm
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_kvcompress.engine.layers import groups_of
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
from vllm_kvcompress.planning.packed_pages import CPU_BLOCK_WITH_GROUPS
from vllm_kvcompress.refusals.server import RUST_FRONT_END
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.off_switch import OFF_SWITCH, is_switched_off, without_compression
from vllm_kvcompress.settings.packed_dtype import AUTO, K4V3
from vllm_kvcompress.settings.whole_blocks import in_whole_blocks

logger = init_logger("vllm.kvcompress")

# vLLM's default on a CPU.
_CPU_BLOCK = 128
_INSTALLED = "_kvcompress_configure"


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
    _log_settings(
        settings,
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        block=0 if groups_of(config).stateful else int(config.cache_config.block_size or 0),
    )
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


def _log_settings(settings: CompressionConfig, *, prefix_caching: bool, block: int) -> None:
    """Log the settings at startup.

    Args:
        settings: settings of the engine.
        prefix_caching: whether prefix caching is on.
        block: tokens per KV block; 0 if vLLM chooses it later. Default lengths are then rounded to
            whole blocks later too.
    """
    unrounded = ", rounded to whole KV blocks,"
    settings = in_whole_blocks(settings, block) if block else settings
    named = set(settings.allow_override) - {"off"}
    on_request = "only for requests that name a method or an alias"
    logger.info(
        "KV-cache compression is on: %s%s, for prompts of at least %d tokens",
        settings.compress if settings.enabled else on_request,
        f", budget {settings.budget}" if settings.enabled or named else "",
        settings.resolved_min_prompt,
    )
    if packages := package_summary():
        logger.info("methods of other packages: %s", packages)
    for variant in settings.variants:
        if variant.resolved_packed_dtype != AUTO:
            logger.info(
                "%s at a budget of %s packs kept tokens in %s",
                variant.compress,
                variant.budget,
                variant.resolved_packed_dtype,
            )
        if variant.packs_outputs:
            logger.info(
                "%s packs output tokens in %s every %d output tokens, rounded up to whole pages",
                variant.compress,
                variant.resolved_packed_dtype,
                variant.decode.interval,
            )
    if settings.allow_override:
        bounds = " or ".join(f"{low} to {high}" for low, high in settings.budget_bounds)
        logger.info(
            "requests may choose the methods %s, with %s",
            ", ".join(settings.allow_override),
            f"budgets {bounds}" if bounds else "any budget",
        )
    if settings.alias:
        logger.info("further model names: %s", ", ".join(map(str, settings.alias)))
    if settings.pressure:
        logger.info(
            "prompts stay uncompressed while less than %g of the KV pool is in use, counting the"
            " prompt itself",
            settings.pressure,
        )
    for variant in settings.variants:
        # With --kv-allow-override, requests may choose a budget that needs the look-ahead.
        waits = settings.allow_override or not variant.keeps_all_tokens
        if variant.resolved_lookahead and waits:
            logger.info(
                "%s compresses a prompt after %d output tokens%s",
                variant.compress,
                variant.resolved_lookahead,
                ", if its budget drops tokens" if variant.keeps_all_tokens else "",
            )
    if settings.decode.budget is not None:
        logger.info(
            "requests hold at most %d tokens per layer while they generate, and are compressed"
            " again every %d output tokens%s",
            settings.decode.budget,
            settings.decode.interval,
            "" if block or "decode_interval" in settings.given_keys else unrounded[:-1],
        )
    if settings.pieces.max_whole is not None:
        logger.info(
            "prompts of more than %d tokens are compressed every %d tokens%s during prefill, %s",
            settings.pieces.max_whole,
            settings.pieces.length,
            "" if block or "piece" in settings.given_keys else unrounded,
            _scoring(settings),
        )
    for variant in settings.variants:
        parts = variant.parts
        if parameters := published(parts.allocator, settings.model, variant.budget):
            logger.info(
                "using the parameters published for this model: %s %s", parts.allocator, parameters
            )
        if Reads.COLUMN_SUMS in variant.method.reads and prefix_caching:
            logger.info(
                "%s reads attention over the whole prompt, so prompts that it compresses fill the"
                " prefix cache but do not read it",
                variant.compress,
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
