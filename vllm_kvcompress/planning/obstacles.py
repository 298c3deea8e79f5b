"""Why a configuration cannot compress repeatedly, merge, pack in k4v3, probe or cache states.

Each reason is a sentence.
"""

from collections.abc import Iterable

from kvcompress_kernels import k4v3
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.planning.cache_dtypes import FLOAT8_CACHES
from vllm_kvcompress.planning.model_traits import WITH_CACHED_STATES
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.packed_dtype import AUTO, K4V3


def repacking_refusal(settings: CompressionConfig, block_size: int | None) -> str | None:
    """Return why outputs cannot be bounded or prompts packed in pieces, or None if they can.

    Args:
        block_size: tokens in a KV block; None if it is not known yet.
    """
    flags = {
        "--kv-decode-budget": (settings.decode.budget, "bound outputs"),
        "--kv-max-whole": (settings.pieces.max_whole, "pack prompts"),
    }
    for flag, (value, purpose) in flags.items():
        for variant in settings.variants if value is not None else ():
            if reason := variant.method.needs_whole_prompt:
                return (
                    f"{flag} cannot {purpose} by {variant.compress!r}: {reason}; choose from"
                    f" {_repackable_presets()}, or remove {flag}"
                )
    return block_multiple_refusal(settings, block_size) if block_size else None


def block_multiple_refusal(settings: CompressionConfig, block_size: int) -> str | None:
    """Return which interval or piece is not a multiple of the KV block, or None if both are."""
    flags = {
        "--kv-decode-interval": (settings.decode.budget, settings.decode.interval),
        "--kv-piece": (settings.pieces.max_whole, settings.pieces.length),
    }
    for flag, (value, tokens) in flags.items():
        if value is not None and tokens % block_size:
            return (
                f"{flag} must be a multiple of the KV block's {block_size} tokens, got {tokens};"
                f" set it to {max(tokens // block_size, 1) * block_size}"
            )
    return None


def merging_refusal(settings: CompressionConfig, cache_dtype: str | None, fix: str) -> str | None:
    """Return why a method that merges tokens cannot be used with this KV cache, or None if it can.

    Args:
        cache_dtype: vLLM's name of the KV cache's dtype; None for the model's own dtype.
        fix: the flags that set the model's own dtype.
    """
    if cache_dtype not in FLOAT8_CACHES:
        return None
    for variant in settings.variants:
        if variant.method.merge:
            return (
                f"{variant.compress!r} merges tokens, which would have to be quantised again in a"
                f" {cache_dtype} KV cache; choose a method that does not merge, or set {fix}"
            )
    return None


def packed_cache_refusal(
    settings: CompressionConfig, cache_dtype: str | None, fix: str
) -> str | None:
    """Return why kept tokens cannot be packed in k4v3 in this KV cache, or None if they can.

    Args:
        cache_dtype, fix: as in `merging_refusal`.
    """
    if cache_dtype not in FLOAT8_CACHES or not settings.packs_k4v3:
        return None
    return (
        f"packed_dtype={K4V3} cannot be combined with a {cache_dtype} KV cache, because its tokens"
        f" would be quantised twice; set {fix}, or set packed_dtype to {AUTO}"
    )


def packed_shape_refusal(
    settings: CompressionConfig, head_dim: int, block_size: int | None, itemsize: int
) -> str | None:
    """Return why a page cannot hold tokens packed in k4v3, or None if it can.

    None as well if no request can be packed in k4v3.

    Args:
        head_dim: dimension of each head.
        block_size: tokens in a KV block; None if it is not known yet.
        itemsize: bytes of a cached number.
    """
    if not settings.packs_k4v3:
        return None
    rows = k4v3.rows_per_group(itemsize)
    if reason := k4v3.refusal(head_dim, rows, itemsize):
        return f"{reason}; set packed_dtype to {AUTO}"
    if block_size and (reason := k4v3.refusal(head_dim, block_size, itemsize)):
        fix = max(block_size // rows, 1) * rows
        return f"{reason}; set --block-size {fix}, or set packed_dtype to {AUTO}"
    return None


def probe_refusal(settings: CompressionConfig) -> str | None:
    """Return why prompts in pieces cannot use a probe with stateful layers, or None without one."""
    if not any(variant.method.probe_tokens for variant in settings.variants):
        return None
    return (
        "a probe's rows would advance the states, which cannot be rolled back; set --kv-probe 0,"
        f" got {settings.pieces.probe}"
        + (
            f" with --kv-probe-first {settings.pieces.probe_first}"
            if settings.pieces.probe_first
            else ""
        )
    )


def state_caching_refusal(architectures: Iterable[str] | None) -> str | None:
    """Return why a model with stateful layers needs the prefix cache off, or None if it does not.

    Args:
        architectures: the model's architecture names in its configuration.
    """
    if WITH_CACHED_STATES & set(architectures or ()):
        return None
    return (
        "saving states inside a step is not tested, because vLLM's CPU build crashes there"
        " (IndexError in mamba_mixer2.py); add --no-enable-prefix-caching"
    )


def probe_space_refusal(
    settings: CompressionConfig,
    requests: int,
    *limits: tuple[str, int | None],
) -> str | None:
    """Return why a step may never have space for a piece and its probe, or None if it always has.

    Args:
        requests: requests that one step may compute a token of.
        limits: flags with the tokens that each leaves to a step, or to a chunk of a step for flags
            about long prefills; None or 0 if a flag sets no limit.
    """
    probe = max(variant.method.probe_tokens for variant in settings.variants)
    for flag, max_tokens in limits if probe else ():
        per_chunk = "prefill" in flag
        min_tokens = probe + (1 if per_chunk else requests)
        if max_tokens and max_tokens < min_tokens:
            other_tokens = "one token" if per_chunk else "one token per request"
            return (
                f"a step must have space for {other_tokens} and then a probe of {probe} tokens;"
                f" set {flag} to at least {min_tokens}, got {max_tokens}, or lower"
                + ("" if per_chunk else " --max-num-seqs,")
                + " --kv-probe or --kv-probe-first"
            )
    return None


def _repackable_presets() -> list[str]:
    """Return the names of the presets that can compress a prompt that has lost tokens."""
    presets = {name: CompressionConfig.parse({"compress": name}) for name in PRESETS}
    return sorted(name for name, preset in presets.items() if not preset.method.needs_whole_prompt)


def unreachable_length_refusal(settings: CompressionConfig, max_tokens: int) -> str | None:
    """Return why a number of tokens has no effect, because no request is that long, or None.

    Args:
        max_tokens: maximum tokens of a prompt and its output together.
    """
    lows = [low for low, _ in settings.budget_bounds]
    largest_low = max((low for low in lows if isinstance(low, int)), default=None)
    given = settings.given_keys
    lengths = {
        "--kv-budget": settings.budget if isinstance(settings.budget, int) else None,
        "the smallest of --kv-budget-bounds": largest_low,
        "--kv-decode-budget": settings.decode.budget,
        "--kv-decode-interval": settings.decode.interval if "decode_interval" in given else None,
        "--kv-min-prompt": settings.min_prompt if "min_prompt" in given else None,
        "--kv-min-output": settings.min_output,
        "--kv-max-whole": settings.pieces.max_whole,
        "--kv-piece": settings.pieces.length if "piece" in given else None,
    }
    for alias in settings.alias:
        budget = alias.budget if isinstance(alias.budget, int) else None
        lengths[f"the budget of --kv-alias {alias.name}"] = budget
    for name, tokens in lengths.items():
        if tokens is not None and tokens > max_tokens:
            return (
                f"{name} must be at most --max-model-len {max_tokens}, because no request is longer"
                f" and the setting would have no effect; got {tokens}; lower it, or raise"
                " --max-model-len"
            )
    return None
