"""Why an engine cannot pack anything more than once, in sentences."""

from collections.abc import Iterable

from vllm_kvcompress.methods.presets import PRESETS
from vllm_kvcompress.planning.cache_dtypes import FLOAT8_CACHES
from vllm_kvcompress.planning.model_traits import WITH_CACHED_STATES
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.method_of import method_of, probe_tokens


def why_not_again(settings: CompressionConfig, block_size: int | None) -> str | None:
    """Why answers cannot be bounded, or prompts packed piece by piece; None if they can.

    Args:
        block_size: tokens in a KV block; None where that is not known yet.
    """
    asked = {
        "--kv-decode-budget": (settings.decode_budget, "bound answers"),
        "--kv-max-whole": (settings.max_whole, "pack prompts"),
    }
    for flag, (given, purpose) in asked.items():
        for variant in settings.variants if given is not None else ():
            if reason := method_of(variant).why_whole:
                return (
                    f"{flag} cannot {purpose} by {variant.compress!r}: {reason}; choose from"
                    f" {_possible()}, or remove {flag}"
                )
    return why_not_in_blocks(settings, block_size) if block_size else None


def why_not_in_blocks(settings: CompressionConfig, block_size: int) -> str | None:
    """Why an interval or a piece does not end with a block, in a sentence; None if both do."""
    asked = {
        "--kv-decode-interval": (settings.decode_budget, settings.decode_interval),
        "--kv-piece": (settings.max_whole, settings.piece),
    }
    for flag, (given, tokens) in asked.items():
        if given is not None and tokens % block_size:
            return (
                f"{flag} must be a multiple of the KV block, which has {block_size} tokens here,"
                f" got {tokens}; set it to {max(tokens // block_size, 1) * block_size}"
            )
    return None


def why_not_merged(settings: CompressionConfig, stored: str | None, cure: str) -> str | None:
    """Why what merges tokens cannot be asked for, in a sentence; None if nothing forbids it.

    Args:
        stored: what the KV cache holds, by vLLM's name; None for the model's own dtype.
        cure: the flags that set that.
    """
    if stored not in FLOAT8_CACHES:
        return None
    for variant in settings.variants:
        if method_of(variant).merge:
            return (
                f"{variant.compress!r} merges tokens, which a KV cache in {stored} would have to"
                f" quantise anew; choose a method that does not merge, or set {cure}"
            )
    return None


def why_not_probed(settings: CompressionConfig) -> str | None:
    """Why prompts in pieces cannot be probed where layers keep a state; None if none would be."""
    if settings.max_whole is None or not any(map(probe_tokens, settings.variants)):
        return None
    return (
        "a probe's rows would advance the states, which cannot be taken back; set --kv-probe 0,"
        f" got {settings.probe}"
        + (f" with --kv-probe-first {settings.probe_first}" if settings.probe_first else "")
    )


def why_states_not_cached(architectures: Iterable[str] | None) -> str | None:
    """Why the prefix cache must be off for a model whose layers keep a state; None if it may be on.

    Args:
        architectures: the model's names in its configuration.
    """
    if WITH_CACHED_STATES & set(architectures or ()):
        return None
    return (
        "states that are kept inside a step are not tested, since vLLM's own CPU build ends"
        " there (IndexError in mamba_mixer2.py); add --no-enable-prefix-caching"
    )


def why_no_room_for_probe(
    settings: CompressionConfig,
    requests: int,
    *rooms: tuple[str, int | None],
) -> str | None:
    """Why a chunk that ends a piece may never find room for its probe; None if it will.

    Args:
        requests: that one step may have a token of.
        rooms: flags, each with the tokens that it leaves a step, or a chunk of a step where it is
            about long prefills; None or 0 where it leaves all.
    """
    probe = max(probe_tokens(variant) for variant in settings.variants)
    for flag, room in rooms if probe else ():
        alone = "prefill" in flag
        least = probe + (1 if alone else requests)
        if room and room < least:
            whose = "one token" if alone else "a token of each request"
            return (
                f"a step must have room for {whose} and for a probe of {probe} tokens behind it;"
                f" set {flag} to at least {least}, got {room}, or lower"
                + ("" if alone else " --max-num-seqs,")
                + " --kv-probe or --kv-probe-first"
            )
    return None


def _possible() -> list[str]:
    presets = {name: CompressionConfig.parse({"compress": name}) for name in PRESETS}
    return sorted(name for name, own in presets.items() if not method_of(own).why_whole)


def why_never_reached(settings: CompressionConfig, longest: int) -> str | None:
    """Say which number of tokens no prompt can reach; None where each can be.

    Args:
        longest: the most tokens that a prompt and its output may have together.
    """
    lows = [low for low, _ in settings.budget_bounds]
    least = max((low for low in lows if isinstance(low, int)), default=None)
    given = settings.min_prompt if "min_prompt" in settings.model_fields_set else None
    lengths = {
        "--kv-budget": settings.budget if isinstance(settings.budget, int) else None,
        "the smallest of --kv-budget-bounds": least,
        "--kv-decode-budget": settings.decode_budget,
        "--kv-min-prompt": given,
    }
    for alias in settings.alias:
        budget = alias.budget if isinstance(alias.budget, int) else None
        lengths[f"the budget of --kv-alias {alias.name}"] = budget
    for name, tokens in lengths.items():
        if tokens is not None and tokens > longest:
            return (
                f"{name} must be at most --max-model-len {longest}, since no prompt is longer and"
                f" nothing would be compressed, got {tokens}; lower it, or raise --max-model-len"
            )
    return None
