"""Summary of each cell over all prompts, and the recommended cell."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Literal

from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.compare.measures import POSITION_RANGES, total
from vllm_kvcompress.compare.outcome import Outcome
from vllm_kvcompress.compare.statistics import (
    Estimate,
    RuleResults,
    mean,
    prompts_needed,
    shares_obeyed,
    unseen_share,
)
from vllm_kvcompress.planning.cache_dtypes import ALTERNATIVES, share_of_bytes

Measure = Literal["score", "agreement", "similarity"]
"""A loss measure, as in ``--by``."""
_RUINED_KL = 0.1
"""KL of an fp8 cache, in nats per token, from which it is not usable.

Measured were 0.004 to 0.014 on models that it suits, and 0.17 to 1.14 on one that it does not.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Medians over prompts in seconds. Token times are None if every output has one token."""

    full_first_token_s: float
    first_token_s: float
    full_token_s: float | None
    token_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionStats:
    """Next-token comparison over one range of output positions.

    Args:
        places: compared tokens.
        same_first: share of them with the full cache's most likely token.
        kl: KL in nats per token, a lower bound.
    """

    places: int
    same_first: Estimate
    kl: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of one cell over all prompts.

    Figures cover compressed prompts only if the server reports which prompts it compressed, and
    all prompts otherwise.

    Args:
        asked: prompts with a completion.
        compressed: compressed prompts among them. None if unknown.
        kept: share of their tokens that was kept. None if the server does not report it.
        bytes: bytes of their KV cache, relative to an uncompressed cache in the model's dtype. None
            if the server does not report them.
        exact, similarity: agreement with the full cache's outputs.
        diverged: median number of tokens before the first difference, over outputs that differ.
        places: compared tokens, which `same_first` and `kl` are means over.
        same_first: share of them with the full cache's most likely token.
        kl: KL in nats per token, a lower bound.
        along: the same by `measures.POSITION_RANGES`, for ranges with any compared token.
        length: output length divided by the full cache's.
        loops, full_loops: share of outputs that repeat themselves.
        score, full_score: mean scores over prompts with a known answer.
        drop: mean of ``full_score - score``, paired by prompt.
        loss: the loss by the chosen measure: `drop`, or 1 minus the agreement or similarity. None
            by score if the full cache scores 0, because its score cannot fall.
        times: median timings. None without any prompt.
        tasks: `score` and `full_score` of each task, if there are several tasks.
        obeyed: share of rules obeyed, by task and by ``task: rule`` (`shares_obeyed`).
        baseline: whether the cell is a baseline, which is never recommended.
    """

    cell: Cell
    asked: int
    compressed: int | None
    kept: float | None
    exact: Estimate | None
    similarity: Estimate | None
    diverged: float | None
    places: int
    same_first: Estimate | None
    kl: Estimate | None
    along: dict[str, PositionStats]
    length: Estimate | None
    loops: float | None
    full_loops: float | None
    score: Estimate | None
    full_score: Estimate | None
    drop: Estimate | None
    loss: Estimate | None
    times: Times | None
    tasks: dict[str, tuple[float, float]]
    obeyed: dict[str, Estimate]
    baseline: bool
    bytes: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the figures by field name, with the cell's fields and the bound of the loss."""
        fields = asdict(self)
        return {**fields.pop("cell"), **fields, "bound": self.loss.bound if self.loss else None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The recommended cell. The field names are keys of ``report.json``.

    Args:
        by: loss measure.
        max_drop: largest acceptable loss.
        cell: the recommended cell, or None if no cell is within `max_drop`.
        sentence: the recommendation in words, or why there is none.
    """

    by: Measure
    max_drop: float
    cell: Cell | None
    sentence: str


def summarise(
    cells: Iterable[Cell],
    outcomes: Sequence[Outcome],
    *,
    by: Measure,
    none_compressed: bool,
    baselines: Container[Cell] = (),
) -> list[Summary]:
    """Return the summary of each cell, in the order of `cells`.

    Args:
        by: loss measure.
        none_compressed: whether the server's counters show that it compressed no prompt.
        baselines: the cells that are baselines.
    """
    reports_kept = any(outcome.kept_tokens is not None for outcome in outcomes)
    # Sorted, so that the intervals of a resumed run do not depend on the order of completion.
    ordered = sorted(outcomes, key=lambda each: each.key)
    return [
        _summary(
            cell,
            [outcome for outcome in ordered if outcome.cell == cell],
            by,
            known=(reports_kept or none_compressed) and not cell.server,
            baseline=cell in baselines,
        )
        for cell in cells
    ]


def recommend(summaries: Sequence[Summary], *, by: Measure, max_drop: float) -> Recommendation:
    """Return the cell with the least memory whose loss is within `max_drop` with 95 % confidence.

    Memory is the bytes that the server reports, to a hundredth, or the budget if it reports none.
    If several methods qualify at it, returns the one with the smallest loss, or the first of
    equals. Never returns a baseline, which could only win by chance.
    """
    # A cell that compressed no prompt says nothing. Cells of unknown compression come last.
    candidates = [
        (s, s.loss)
        for s in sorted(summaries, key=lambda s: s.compressed is None)
        if not s.baseline and s.loss and s.compressed != 0
    ]
    within = [(s, loss) for s, loss in candidates if loss.bound <= max_drop]
    cell = None
    if within:
        by_bytes = all(s.bytes is not None for s, _ in within)
        best, loss = min(
            within,
            key=lambda found: (
                round(found[0].bytes or 0.0, 2) if by_bytes else found[0].cell.memory,
                found[1].mean,
            ),
        )
        cell = best.cell
        kept = "" if best.kept is None else f", which keeps {best.kept:.1%} of the tokens"
        if best.bytes is not None:
            kept += f"{' in' if kept else ','} {best.bytes:.0%} of the bytes"
        sentence = (
            f"Run {cell}{kept}: its loss by {by} is {loss.mean:.3f}, and at most"
            f" {loss.bound:.3f} at 95 % confidence, within {max_drop:g}."
        )
    elif not candidates:
        sentence = "No recommendation: the server completed no prompt."
        if any(s.asked for s in summaries):
            sentence = "No recommendation: no prompt is known to have been compressed."
        if scores_nothing(summaries, by):
            sentence = f"No recommendation: {SCORES_NOTHING}"
    elif unseen_share(independent := max(loss.independent for _, loss in candidates)) > max_drop:
        noun = "prompt is" if independent == 1 else "prompts are"
        sentence = (
            f"No recommendation: {independent} independent {noun} too few to confirm a drop of"
            f" at most {max_drop:g} at 95 % confidence. At least {prompts_needed(max_drop)} are"
            " needed."
        )
    else:
        nearest, loss = min(candidates, key=lambda found: found[1].bound)
        sentence = (
            f"No recommendation: no method at any budget keeps the loss by {by} within"
            f" {max_drop:g} at 95 % confidence. The nearest is {nearest.cell}, with a loss of at"
            f" most {loss.bound:.3f}. Try a larger budget."
        )
    return Recommendation(by=by, max_drop=max_drop, cell=cell, sentence=sentence)


SCORES_NOTHING = (
    "the full cache scores 0 on every prompt, so its score cannot fall. Correct the answers or"
    " match of the prompts, or use --by similarity."
)


def scores_nothing(summaries: Iterable[Summary], by: Measure) -> bool:
    """Return whether the loss is the drop of a score that is 0 with the full cache already."""
    full = [s.full_score.mean for s in summaries if s.full_score is not None]
    return by == "score" and bool(full) and not any(full)


def best_baseline_without_extra_loss(
    summaries: Sequence[Summary], recommendation: Recommendation
) -> Summary | None:
    """Return the best baseline that loses no more than the recommended cell at its budget.

    Returns None if there is no recommendation or no such baseline.
    """
    best = _recommended(summaries, recommendation)
    if best is None or best.loss is None:
        return None
    baselines = [
        s
        for s in summaries
        if s.baseline
        and not s.cell.server
        and (s.cell.budget, s.cell.packed_dtype) == (best.cell.budget, best.cell.packed_dtype)
        and s.loss
        and s.loss.mean <= best.loss.mean
    ]
    return min(baselines, key=lambda s: s.loss.mean if s.loss else 0.0, default=None)


def _recommended(summaries: Sequence[Summary], recommendation: Recommendation) -> Summary | None:
    return next((s for s in summaries if s.cell == recommendation.cell), None)


def low_bit_notes(summaries: Sequence[Summary], recommendation: Recommendation) -> list[str]:
    """Return sentences that say whether a low-bit cache is close enough without compression.

    One sentence per other server, or how to measure one if there is none.
    """
    others = [s for s in summaries if s.cell.server]
    if not others:
        formats = [
            f"{name} ({share:.0%} of the bytes)"
            for name in ALTERNATIVES
            if (share := share_of_bytes(name)) is not None
        ]
        return [
            "Not measured: vLLM's own low-bit caches keep all tokens, for example"
            f" {', '.join(formats)}. fp8 ruins some models, so measure it: add --against fp8 with"
            " --model, or --against with the address of a second server that has --kv-cache-dtype."
        ]
    best = _recommended(summaries, recommendation)
    return [
        _low_bit_note(other, other.loss, best, recommendation) for other in others if other.loss
    ]


def _low_bit_note(
    other: Summary, loss: Estimate, best: Summary | None, recommendation: Recommendation
) -> str:
    name, size, max_drop = other.cell.method, _size(other), recommendation.max_drop
    found = (
        f"its loss by {recommendation.by} is {loss.mean:.3f}, at most {loss.bound:.3f} at 95 %"
        " confidence"
    )
    if other.kl is not None:
        found += f", and its KL {other.kl.mean:.3f} nats per token"
    if loss.bound > max_drop:
        may_be_close = loss.mean <= max_drop and (other.kl is None or other.kl.mean <= _RUINED_KL)
        verdict = "is not close enough"
        if may_be_close and unseen_share(loss.independent) > max_drop:
            verdict = f"looks close, but {loss.independent} prompts are too few to be sure"
        return f"{name} ({size}) {verdict}: {found}. The loss may be at most {max_drop:g}."
    if best is None:
        return f"{name} ({size}) is close enough, without compression: {found}."
    condition = f"{size} is small enough"
    if other.bytes is None:
        condition = "it saves enough memory, which is not known"
    elif best.bytes is not None and best.bytes >= other.bytes:
        return (
            f"Use {name}, without compression: it takes {size}, no more than {best.cell}, and"
            f" {found}."
        )
    return (
        f"Use {name} if {condition}. It keeps all tokens: {found}. {best.cell} takes {_size(best)}."
    )


def _size(summary: Summary) -> str:
    return "unknown bytes" if summary.bytes is None else f"{summary.bytes:.0%} of the bytes"


def default_measure(outcomes: Sequence[Outcome]) -> Measure:
    """Return "score" if any prompt has a known answer, else "similarity"."""
    return "score" if any(o.score is not None for o in outcomes) else "similarity"


def _summary(
    cell: Cell, outcomes: Sequence[Outcome], by: Measure, *, known: bool, baseline: bool
) -> Summary:
    """Return the summary of one cell.

    Args:
        known: whether the server reports which prompts it compressed.
    """
    compressed = [o for o in outcomes if o.kept_tokens is not None]
    measured = compressed if known else list(outcomes)
    scored = [o for o in measured if o.score is not None]
    everywhere = _at_places(measured, slice(None))
    drop = _mean(scored, lambda o: (o.full_score or 0.0) - (o.score or 0.0))
    by_position = {
        name: _at_places(measured, slice(number, number + 1))
        for number, name in enumerate(POSITION_RANGES)
    }
    losses: dict[Measure, Estimate | None] = {
        "score": drop,
        "agreement": _mean(measured, lambda o: 1.0 - o.exact),
        "similarity": _mean(measured, lambda o: 1.0 - o.similarity),
    }
    loss = None if by == "score" and drop and not any(o.full_score for o in scored) else losses[by]
    diverged_at = [o.shared for o in measured if not o.exact]
    prompt_tokens = sum(o.prompt_tokens for o in compressed)
    return Summary(
        cell=cell,
        baseline=baseline,
        bytes=_mean_bytes(outcomes if cell.server else compressed),
        asked=len(outcomes),
        compressed=len(compressed) if known else None,
        kept=sum(o.kept_tokens or 0 for o in compressed) / prompt_tokens if prompt_tokens else None,
        exact=_mean(measured, lambda o: float(o.exact)),
        similarity=_mean(measured, lambda o: o.similarity),
        diverged=median(diverged_at) if diverged_at else None,
        places=everywhere.places if everywhere else 0,
        same_first=everywhere.same_first if everywhere else None,
        kl=everywhere.kl if everywhere else None,
        along={name: stats for name, stats in by_position.items() if stats},
        # An empty output of the full cache has no length to compare with.
        length=_mean(
            [o for o in measured if o.full_length], lambda o: o.length, lambda o: o.full_length
        ),
        loops=fmean(o.loops for o in measured) if measured else None,
        full_loops=fmean(o.full_loops for o in measured) if measured else None,
        score=_mean(scored, lambda o: o.score or 0.0),
        full_score=_mean(scored, lambda o: o.full_score or 0.0),
        drop=drop,
        loss=loss,
        times=_times(measured),
        tasks=_tasks(scored),
        obeyed=shares_obeyed(RuleResults(o.task, o.rules, o.drawn_with) for o in measured),
    )


def _mean_bytes(outcomes: Sequence[Outcome]) -> float | None:
    """Return the mean share of bytes per prompt token, or None if a prompt's is not known."""
    prompt_tokens = sum(o.prompt_tokens for o in outcomes)
    if not prompt_tokens or any(o.bytes is None for o in outcomes):
        return None
    return sum((o.bytes or 0.0) * o.prompt_tokens for o in outcomes) / prompt_tokens


def _at_places(outcomes: Sequence[Outcome], ranges: slice) -> PositionStats | None:
    """Return the next-token comparison over these `POSITION_RANGES`; None without any token."""
    pairs = [(o.drawn_with, total((o.by_place or ())[ranges])) for o in outcomes]
    pairs = [(group, each) for group, each in pairs if each.places]
    same_first = mean(pairs, lambda p: p[1].same_first, lambda p: p[0], lambda p: p[1].places)
    kl = mean(pairs, lambda p: p[1].kl, lambda p: p[0], lambda p: p[1].places)
    if same_first is None or kl is None:
        return None
    places = sum(each.places for _, each in pairs)
    return PositionStats(places=places, same_first=same_first, kl=kl)


def _mean(
    outcomes: Sequence[Outcome],
    value: Callable[[Outcome], float],
    size: Callable[[Outcome], float] | None = None,
) -> Estimate | None:
    """Return the mean of `value` per unit of `size`, or None without outcomes."""
    return mean(outcomes, value, lambda o: o.drawn_with, size)


def _times(outcomes: Sequence[Outcome]) -> Times | None:
    if not outcomes:
        return None
    # Token times are paired: a single-token output on either side leaves its pair out.
    pairs = [
        (o.full_token_s, o.token_s)
        for o in outcomes
        if o.full_token_s is not None and o.token_s is not None
    ]
    return Times(
        full_first_token_s=median(o.full_first_token_s for o in outcomes),
        first_token_s=median(o.first_token_s for o in outcomes),
        full_token_s=median(full for full, _ in pairs) if pairs else None,
        token_s=median(compressed for _, compressed in pairs) if pairs else None,
    )


def _tasks(scored: Sequence[Outcome]) -> dict[str, tuple[float, float]]:
    names = dict.fromkeys(o.task for o in scored)
    if len(names) < 2:
        return {}
    return {
        name: (
            fmean(o.score or 0.0 for o in scored if o.task == name),
            fmean(o.full_score or 0.0 for o in scored if o.task == name),
        )
        for name in names
    }
