"""Settings that do not fit each other or the method."""

from typing import TYPE_CHECKING

from vllm_kvcompress.methods.preset import misused_part, scores_by_window
from vllm_kvcompress.refusals.rule import Rule

if TYPE_CHECKING:
    from vllm_kvcompress.settings.config import CompressionConfig

MAX_PROBE = 1024
"""Maximum tokens of a probe."""
MIN_CHUNKS = 2
"""Chunks that a decode budget must hold in addition to its window, for methods that keep chunks.
With one chunk, `cake-chunk` repeated one word endlessly."""


def _few_queries(settings: "CompressionConfig") -> tuple[str, int, int, str, str] | None:
    """Return a window with too few queries to score, its minimum, value, use, and another fix."""
    minimum, ahead = settings.method.min_window, settings.lookahead.tokens
    use = "the attention of these queries"
    if minimum > 1:
        use = f"a variance over at least {minimum} queries"
    windows = {"lookahead": ahead or minimum, "window": settings.resolved_window}
    if settings.decode.budget is not None:
        windows["decode_window"] = settings.resolved_decode_window
    for key, tokens in windows.items():
        if tokens < minimum:
            return key, minimum, tokens, use, ", or to 0" if key == "lookahead" else ""
    return None


def _setting_without_effect(settings: "CompressionConfig") -> tuple[str, str] | None:
    """Return a setting that does nothing without a flag, and that flag."""
    given = settings.given_keys
    if settings.decode.budget is None:
        if "decode_interval" in given and not settings.packs_k4v3:
            return "--kv-decode-interval", "--kv-decode-budget or --kv-packed-dtype k4v3"
        if "decode_window" in given:
            return "decode_window", "--kv-decode-budget"
    for key in ("piece", "probe", "probe_first") if settings.pieces.max_whole is None else ():
        if key in given:
            return f"--kv-{key.replace('_', '-')}", "--kv-max-whole"
    return None


_SINGLE = ", or choose a method that keeps single tokens, such as streamingllm"
REQUESTS: "tuple[Rule[CompressionConfig], ...]" = (
    Rule(
        when=lambda s: s.budget_bounds and not s.allow_override,
        reason="budget_bounds needs allow_override, without which requests cannot choose a budget",
        fix="add --kv-allow-override all, or remove budget_bounds",
    ),
)
"""Rules for what requests may choose."""

METHOD: "tuple[Rule[CompressionConfig], ...]" = (
    Rule(
        when=lambda s: misused_part(
            s.parts, s.method.allocator, s.method.scorer, s.method.selector
        ),
        reason="{found[0]}",
        fix="{found[1]}",
    ),
    Rule(
        when=lambda s: s.decode.budget is not None and s.lookahead.slots is not None,
        reason="lookahead_slots={it.lookahead.slots} cannot be combined with --kv-decode-budget,"
        " which stores the last queries of every request",
        fix="remove lookahead_slots",
    ),
    Rule(
        name="`--kv-lookahead` with methods that do not score by the latest queries",
        when=lambda s: s.lookahead.tokens and not scores_by_window(s.method.reads),
        reason="lookahead={it.lookahead.tokens} needs a method that scores a prompt with its"
        " latest queries, and {it.compress!r} does not",
        fix="set lookahead to 0, or choose another method",
        because="a few queries of the output would change nothing",
    ),
    Rule(
        when=_few_queries,
        reason="{found[0]} must be at least {found[1]} for {it.compress!r}, got {found[2]}, because"
        " its allocator or scorer reads {found[3]}",
        fix="set {found[0]} to at least {found[1]}{found[4]}",
    ),
    Rule(
        when=_setting_without_effect,
        reason="{found[0]} needs {found[1]}",
        fix="set {found[1]}, or remove {found[0]}",
    ),
    Rule(
        when=lambda s: s.decode.budget is not None and s.resolved_decode_window > s.decode.interval,
        reason="decode_window must be at most decode_interval={it.decode.interval}, because the"
        " engine stores the queries of one interval, got {it.resolved_decode_window}",
        fix="set decode_window to {it.decode.interval} or less",
    ),
    Rule(
        when=lambda s: (
            s.decode.budget is not None
            and s.decode.budget < s.min_decode_budget
            and (
                (f"{MIN_CHUNKS} chunks of {s.chunk_size} tokens", _SINGLE)
                if s.chunk_size
                else ("one more", "")
            )
        ),
        reason="decode_budget={it.decode.budget} tokens per layer cannot hold the decode window of"
        " {it.resolved_decode_window} tokens and {found[0]}",
        fix="set decode_budget to at least {it.min_decode_budget}{found[1]}",
    ),
    Rule(
        when=lambda s: s.pieces.probe_first and not s.pieces.probe,
        reason="--kv-probe-first needs --kv-probe above 0, got --kv-probe 0 and --kv-probe-first"
        " {it.pieces.probe_first}",
        fix="set --kv-probe above 0, or remove --kv-probe-first",
    ),
    Rule(
        when=lambda s: s.pieces.probe + s.pieces.probe_first > MAX_PROBE,
        reason=f"probe and probe_first must be at most {MAX_PROBE} tokens together, got"
        " {it.pieces.probe} and {it.pieces.probe_first}",
        fix="lower one of them",
    ),
    Rule(
        when=lambda s: s.pieces.max_whole is not None and s.pieces.length <= s.resolved_window,
        reason="piece must be above the observation window of {it.resolved_window}, got"
        " {it.pieces.length}",
        fix="set piece above {it.resolved_window}, for example to 4096",
    ),
    Rule(
        when=lambda s: (
            s.pieces.max_whole is not None
            and s.pieces.probe + s.pieces.probe_first > s.pieces.length
        ),
        reason="probe and probe_first are computed after every piece and must be at most piece"
        " together, got {it.pieces.probe} and {it.pieces.probe_first} with piece"
        " {it.pieces.length}",
        fix="raise piece, or lower one of them",
    ),
    Rule(
        when=lambda s: s.pieces.max_whole is not None and s.pieces.max_whole < s.min_prompt,
        reason="max_whole must be at least min_prompt={it.min_prompt}, because shorter prompts stay"
        " uncompressed, got {it.pieces.max_whole}",
        fix="raise max_whole, or lower min_prompt",
    ),
    Rule(
        name="`--kv-reuse` with `--kv-max-whole` or `--kv-decode-interval`",
        when=lambda s: (
            s.packed.reuse != "off"
            and (
                (s.pieces.max_whole and "--kv-max-whole")
                or ("decode_interval" in s.given_keys and "--kv-decode-interval")
            )
        ),
        reason="--kv-reuse {it.packed.reuse} sets when to pack prompts and outputs, got {found}"
        " too",
        fix="remove {found}, or --kv-reuse",
        because="`--kv-reuse` sets when tokens are packed",
    ),
    Rule(
        name="`--kv-packed-dtype k4v3` with `--kv-decode-budget`",
        when=lambda s: s.resolved_packed_dtype == "k4v3" and s.decode.budget is not None,
        reason="packed_dtype=k4v3 cannot be combined with --kv-decode-budget {it.decode.budget},"
        " because repeated compression would quantise packed tokens again",
        fix="remove --kv-decode-budget, or set packed_dtype to auto",
        because="packed tokens would be quantised again",
    ),
    Rule(
        name="`--kv-packed-dtype k4v3` with `--kv-max-whole` and a budget other than 1.0",
        when=lambda s: (
            s.resolved_packed_dtype == "k4v3"
            and s.pieces.max_whole is not None
            and not s.keeps_all_tokens
        ),
        reason="packed_dtype=k4v3 with --kv-max-whole {it.pieces.max_whole} needs a budget of 1.0,"
        " got budget={it.budget}, because tokens that a piece keeps would be quantised again when"
        " later pieces drop some of them",
        fix="set the budget to 1.0, remove --kv-max-whole, or set packed_dtype to auto",
        because="tokens that a piece keeps would be quantised again when later pieces drop some",
    ),
    Rule(
        when=lambda s: (
            isinstance(s.budget, int)
            and s.budget <= s.resolved_window
            and ("; write 1.0 to keep every token" if s.budget == 1 else "",)
        ),
        reason="budget={it.budget} tokens per layer cannot hold the observation window of"
        " {it.resolved_window} and at least one more token",
        fix="raise budget above {it.resolved_window}, or lower window{found[0]}",
    ),
)
"""Rules for settings that compress requests without a choice."""
