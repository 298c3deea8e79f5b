"""Refusals for hybrid models, whose layers keep a recurrent state."""

from collections.abc import Callable, Iterator

import vllm
from packaging.specifiers import SpecifierSet
from vllm.config import VllmConfig

from vllm_kvcompress.engine.layers import groups_of
from vllm_kvcompress.planning.obstacles import probe_refusal, state_caching_refusal
from vllm_kvcompress.settings.config import CompressionConfig

TESTED = SpecifierSet(">=0.32,<0.33")


def state_refusal(config: VllmConfig, settings: CompressionConfig) -> str | None:
    """Return why this configuration of a hybrid model cannot be compressed.

    None if it can, or if the model is not hybrid.
    """
    if not groups_of(config).stateful:
        return None
    return next(filter(None, _reasons(config, settings)), None)


def _reasons(config: VllmConfig, settings: CompressionConfig) -> Iterator[str | None]:
    checks: tuple[Callable[[VllmConfig], str | None], ...] = (
        _version,
        _prefix_cache,
        _replay_buffer,
        _drafts,
    )
    yield from (check(config) for check in checks)
    yield probe_refusal(settings)


def _version(config: VllmConfig) -> str | None:
    if TESTED.contains(vllm.__version__, prereleases=True):
        return None
    return (
        "models whose layers keep a state are tested only on vLLM 0.32; install it, got"
        f" {vllm.__version__}"
    )


def _prefix_cache(config: VllmConfig) -> str | None:
    cache = config.cache_config
    mode = getattr(cache, "mamba_cache_mode", "none")
    refusal = state_caching_refusal(config.model_config.architectures)
    if mode == "align" and refusal is not None:
        return refusal
    if mode == "align" and getattr(cache, "prefix_match_unit", None) is not None:
        return "prefix-cache hits inside a block are not tested; remove --prefix-match-unit"
    if getattr(cache, "enable_mamba_shared_prefix_checkpoint", False):
        return (
            "states at the end of a shared prefix are not tested; remove"
            " --enable-mamba-shared-prefix-checkpoint"
        )
    return None


def _replay_buffer(config: VllmConfig) -> str | None:
    if getattr(config.cache_config, "use_replayssm", False):
        return "states recomputed from a buffer are not tested; remove --use-replayssm"
    return None


def _drafts(config: VllmConfig) -> str | None:
    if config.speculative_config is not None:
        return (
            "drafts for models whose layers keep a state are not tested; remove"
            " --speculative-config"
        )
    return None
