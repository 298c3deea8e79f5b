"""What is not tested with models whose layers keep a state, each refused in one sentence."""

from collections.abc import Callable, Iterator

import vllm
from packaging.specifiers import SpecifierSet
from vllm.config import VllmConfig

from vllm_kvcompress.engine.layers import groups_of
from vllm_kvcompress.planning.obstacles import why_not_probed, why_states_not_cached
from vllm_kvcompress.settings.config import CompressionConfig

TESTED = SpecifierSet(">=0.32,<0.33")


def why_not_with_states(config: VllmConfig, settings: CompressionConfig) -> str | None:
    """Why compression cannot use this configuration of such a model; None of any other model."""
    if not groups_of(config).stateful:
        return None
    return next(filter(None, _reasons(config, settings)), None)


def _reasons(config: VllmConfig, settings: CompressionConfig) -> Iterator[str | None]:
    checks: tuple[Callable[[VllmConfig], str | None], ...] = (
        _version,
        _prefix_cache,
        _buffer,
        _beside,
    )
    yield from (check(config) for check in checks)
    yield why_not_probed(settings)


def _version(config: VllmConfig) -> str | None:
    if TESTED.contains(vllm.__version__, prereleases=True):
        return None
    return (
        "models whose layers keep a state are tested on vLLM 0.32 alone; install it, got"
        f" {vllm.__version__}"
    )


def _prefix_cache(config: VllmConfig) -> str | None:
    cache = config.cache_config
    mode = getattr(cache, "mamba_cache_mode", "none")
    inside = why_states_not_cached(config.model_config.architectures)
    if mode == "align" and inside is not None:
        return inside
    if mode == "align" and getattr(cache, "prefix_match_unit", None) is not None:
        return "prefix-cache hits inside a block are not tested; remove --prefix-match-unit"
    if getattr(cache, "enable_mamba_shared_prefix_checkpoint", False):
        return (
            "states at the end of a shared prefix are not tested; remove"
            " --enable-mamba-shared-prefix-checkpoint"
        )
    return None


def _buffer(config: VllmConfig) -> str | None:
    if getattr(config.cache_config, "use_replayssm", False):
        return "states that are computed again from a buffer are not tested; remove --use-replayssm"
    return None


def _beside(config: VllmConfig) -> str | None:
    if config.speculative_config is not None:
        return "drafts with layers that keep a state are not tested; remove --speculative-config"
    return None
