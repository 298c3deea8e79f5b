"""Tables of acceptance lengths."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean

from benchmarks.jsonl import Line, by_key
from vllm_kvcompress.compare.statistics import estimate

ALONE = "vLLM alone"
LOOKAHEAD_TOKENS = 33
"""Output tokens that the full cache gives with the default look-ahead."""
_HEADER = (
    "| setting | acceptance length | relative to vLLM alone | the same, from token 34 on"
    " | bytes kept | output tokens | equal outputs, with and without drafts |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def acceptance_length(line: Line, skipped: int = 0) -> float:
    """Return output tokens per draft step: accepted drafts plus 1, as vLLM counts.

    Steps without drafts do not count, such as the last one of a look-ahead.

    Args:
        line: a request under one setting.
        skipped: output tokens at the start that do not count. Steps that verify drafts behind them
            do.
    """
    accepted: Sequence[int] = line["accepted"]
    # The prefill gives the first output token, and each step its accepted drafts and one more.
    starts = accumulate((count + 1 for count in accepted), initial=1)
    counted = [
        count for start, count in zip(starts, accepted, strict=False) if start >= max(skipped, 1)
    ]
    return 1 + fmean(counted)


def tables(found: Sequence[Line]) -> str:
    """Return a table with one row per setting, in Markdown.

    The length is the mean over requests. The ratio is of two means over the same requests, and its
    bootstrap draws requests.
    """
    drafted = by_key([line for line in found if line.get("accepted") is not None], "setting")
    plain = {
        (line["setting"], line["request"]): line["output"]
        for line in found
        if "setting" in line and line["accepted"] is None
    }
    rows = [
        _row(name, lines, by_key(drafted[ALONE], "request"), plain)
        for name, lines in drafted.items()
    ]
    return "\n".join([_HEADER, *rows])


def _row(
    name: str,
    lines: Sequence[Line],
    alone: Mapping[str, Sequence[Line]],
    plain: Mapping[tuple[str, str], Sequence[int]],
) -> str:
    def ratio(length: Callable[[Line], float], of: Sequence[Line]) -> str:
        if not of:
            return ""
        found = estimate(
            [length(line) for line in of],
            range(len(of)),
            sizes=[length(alone[line["request"]][0]) for line in of],
        )
        return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"

    long = [line for line in lines if len(line["output"]) > 2 * LOOKAHEAD_TOKENS]
    kept = [line["kept"] for line in lines if line["kept"]]
    share = fmean(each["kept_bytes"] / each["uncompressed_bytes"] for each in kept) if kept else 1.0
    compared = [line for line in lines if (name, line["request"]) in plain]
    equal = sum(line["output"] == plain[name, line["request"]] for line in compared)
    cells = [
        name,
        f"{fmean(map(acceptance_length, lines)):.2f}",
        *(
            ("", "")
            if name == ALONE
            else (
                ratio(acceptance_length, lines),
                ratio(lambda line: acceptance_length(line, LOOKAHEAD_TOKENS), long),
            )
        ),
        f"{share:.2f}, {len(kept)} of {len(lines)} compressed",
        f"{fmean(len(line['output']) for line in lines):.0f}",
        f"{equal} of {len(compared)}",
    ]
    return f"| {' | '.join(cells)} |"
