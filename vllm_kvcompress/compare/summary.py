"""All prompts of a cell in figures, and which cell may be run."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Literal

from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.compare.measures import PLACES
from vllm_kvcompress.compare.obeyed import Ruled, shares_obeyed
from vllm_kvcompress.compare.outcome import Outcome
from vllm_kvcompress.compare.statistics import Estimate, estimate, needed, unseen

By = Literal["score", "agreement", "similarity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Medians over prompts, in seconds, in this run; None where no answer tells."""

    full_first_token_s: float
    first_token_s: float
    full_token_s: float | None
    token_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Along:
    """What is lost in some places of answers, of the text that both share there.

    Args:
        places: tokens.
        same_first: share of them whose most likely token is the full cache's.
        kl: nats per token, a lower bound.
    """

    places: int
    same_first: Estimate
    kl: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What became of all prompts in one cell.

    Figures are of the prompts that were compressed, where the server says which; else of all.

    Args:
        asked: prompts that were answered.
        compressed: how many of them were compressed; None where nobody can know.
        kept: share of their tokens that was kept; None where the server does not say.
        roles: of each role its tokens in all of them, and the share that was kept; empty likewise.
        exact, similarity: of greedy answers with the full cache's.
        diverged: median of the tokens until the first difference, of answers that have one.
        places: tokens that both answers share, which `same_first` and `kl` are of.
        same_first: share of them whose most likely token is the full cache's.
        kl: nats per token, a lower bound.
        along: the same by `measures.PLACES`, where there are any.
        length: of the answers over the full cache's.
        loops, full_loops: share of answers that end in a loop.
        score, full_score: over prompts whose answers are known, as `drop`, their difference.
        loss: what the recommendation is about: the drop, or 1 less what is agreed.
        bound: with 95 % confidence the loss is not above it.
        tasks: of each task `score` and `full_score`, where there are several.
        obeyed: of rules, by task and by ``task: rule`` (`shares_obeyed`).
        baseline: whether it only stands beside, for what a method has to beat.
    """

    method: str
    budget: float | int
    protect: str
    lookahead: int | None
    asked: int
    compressed: int | None
    kept: float | None
    roles: dict[str, tuple[int, float]]
    exact: Estimate | None
    similarity: Estimate | None
    diverged: float | None
    places: int
    same_first: Estimate | None
    kl: Estimate | None
    along: dict[str, Along]
    length: Estimate | None
    loops: float | None
    full_loops: float | None
    score: Estimate | None
    full_score: Estimate | None
    drop: Estimate | None
    loss: Estimate | None
    bound: float | None
    times: Times | None
    tasks: dict[str, tuple[float, float]]
    obeyed: dict[str, Estimate]
    baseline: bool = False

    @property
    def cell(self) -> Cell:
        return Cell(
            method=self.method,
            budget=self.budget,
            protect=self.protect,
            lookahead=self.lookahead,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Which cell may be run.

    Args:
        by: the measure.
        max_drop: loss that is accepted.
        cell: the one to run; None where none is within.
        sentence: what that means, or why there is none.
    """

    by: By
    max_drop: float
    cell: Cell | None
    sentence: str


def summarise(
    cells: Iterable[Cell],
    outcomes: Sequence[Outcome],
    *,
    by: By,
    none_compressed: bool,
    baselines: Container[Cell] = (),
) -> list[Summary]:
    """Each cell's figures, in the order of `cells`.

    Args:
        by: what the loss is measured by.
        none_compressed: the server's counters say that it compressed no prompt at all.
        baselines: those of `cells` that only stand beside.
    """
    tells = any(outcome.kept_tokens is not None for outcome in outcomes)
    by_cell: dict[Cell, list[Outcome]] = {}
    # In one order, whatever came first: a run that was interrupted has the same intervals.
    for outcome in sorted(outcomes, key=lambda each: each.key):
        by_cell.setdefault(outcome.cell, []).append(outcome)
    return [
        replace(
            _summary(cell, by_cell.get(cell, []), by, known=tells or none_compressed),
            baseline=cell in baselines,
        )
        for cell in cells
    ]


def recommend(summaries: Sequence[Summary], *, by: By, max_drop: float) -> Recommendation:
    """The smallest budget whose loss is within `max_drop` with 95 % confidence.

    Of several methods at that budget, the one with the smaller loss; of equals, the first named.
    Never a baseline: it can only win by luck.
    """
    methods = [s for s in summaries if not s.baseline and s.loss is not None]
    judged = [s for s in methods if s.bound is not None and s.compressed]
    judged += [s for s in methods if s.compressed is None]
    within = [s for s in judged if s.bound is not None and s.bound <= max_drop]
    if within:
        best = min(within, key=lambda s: (s.budget, s.loss.mean if s.loss else 0.0))
        return Recommendation(
            by=by, max_drop=max_drop, cell=best.cell, sentence=_may_run(best, by, max_drop)
        )
    if not judged:
        sentence = (
            "No recommendation: nothing that was asked is known to have been compressed."
            if any(s.asked for s in summaries)
            else "No recommendation: no prompt was answered."
        )
        return Recommendation(by=by, max_drop=max_drop, cell=None, sentence=sentence)
    most = max(s.loss.independent for s in judged if s.loss)
    if unseen(most) > max_drop:
        noun = "prompt" if most == 1 else "prompts"
        sentence = (
            f"No recommendation: {most} independent {noun} can show no drop of {max_drop:g} or"
            f" less at 95 % confidence, however they are answered. It takes {needed(max_drop)}."
        )
    else:
        nearest = min(judged, key=lambda s: s.bound or 0.0)
        sentence = (
            f"No recommendation: no method at any budget keeps the loss by {by} within"
            f" {max_drop:g} at 95 % confidence. The nearest is {nearest.cell}: at most"
            f" {nearest.bound:.3f}. Try a larger budget."
        )
    return Recommendation(by=by, max_drop=max_drop, cell=None, sentence=sentence)


def unbeaten(summaries: Sequence[Summary], recommendation: Recommendation) -> Summary | None:
    """A baseline that loses no more than what is recommended, at its budget; the best of them."""
    best = next((s for s in summaries if s.cell == recommendation.cell), None)
    if best is None or best.loss is None:
        return None
    beside = [
        s
        for s in summaries
        if s.baseline and s.budget == best.budget and s.loss and s.loss.mean <= best.loss.mean
    ]
    return min(beside, key=lambda s: s.loss.mean if s.loss else 0.0, default=None)


def default_by(outcomes: Sequence[Outcome]) -> By:
    """The score where answers are known, else the similarity."""
    return "score" if any(o.score is not None for o in outcomes) else "similarity"


def _may_run(best: Summary, by: By, max_drop: float) -> str:
    assert best.loss is not None
    kept = "" if best.kept is None else f", which keeps {best.kept:.1%} of the tokens"
    return (
        f"Run {best.cell}{kept}: its loss by {by} is {best.loss.mean:.3f}, and at most"
        f" {best.bound:.3f} at 95 % confidence, within {max_drop:g}."
    )


def _summary(cell: Cell, outcomes: Sequence[Outcome], by: By, *, known: bool) -> Summary:
    assert cell.budget is not None
    compressed = [o for o in outcomes if o.kept_tokens is not None]
    judged = compressed if known else list(outcomes)
    scored = [o for o in judged if o.score is not None]
    along = [o for o in judged if o.places]
    drop = _over(scored, lambda o: (o.full_score or 0.0) - (o.score or 0.0))
    exact = _over(judged, lambda o: float(o.exact))
    similarity = _over(judged, lambda o: o.similarity)
    losses: dict[By, Estimate | None] = {
        "score": drop,
        "agreement": _over(judged, lambda o: 1.0 - o.exact),
        "similarity": _over(judged, lambda o: 1.0 - o.similarity),
    }
    loss = losses[by]
    parted = [o.shared for o in judged if not o.exact]
    prompt_tokens = sum(o.prompt_tokens for o in compressed)
    return Summary(
        method=cell.method,
        budget=cell.budget,
        protect=cell.protect,
        lookahead=cell.lookahead,
        asked=len(outcomes),
        compressed=len(compressed) if known else None,
        kept=sum(o.kept_tokens or 0 for o in compressed) / prompt_tokens if prompt_tokens else None,
        roles=_roles(compressed),
        exact=exact,
        similarity=similarity,
        diverged=median(parted) if parted else None,
        places=sum(o.places or 0 for o in along),
        same_first=_over(along, lambda o: o.same_first or 0, lambda o: o.places or 0),
        kl=_over(along, lambda o: o.kl or 0.0, lambda o: o.places or 0),
        along=_along(judged),
        # An empty answer of the full cache has no length to compare with.
        length=_over(
            [o for o in judged if o.full_length], lambda o: o.length, lambda o: o.full_length
        ),
        loops=fmean(o.loops for o in judged) if judged else None,
        full_loops=fmean(o.full_loops for o in judged) if judged else None,
        score=_over(scored, lambda o: o.score or 0.0),
        full_score=_over(scored, lambda o: o.full_score or 0.0),
        drop=drop,
        loss=loss,
        bound=None if loss is None else max(loss.upper, unseen(loss.independent)),
        times=_times(judged),
        tasks=_tasks(scored),
        obeyed=shares_obeyed(Ruled(o.task, o.rules, o.drawn_with) for o in judged),
    )


def _roles(outcomes: Sequence[Outcome]) -> dict[str, tuple[int, float]]:
    found: dict[str, tuple[int, float]] = {}
    for role in dict.fromkeys(role for o in outcomes for role in o.by_role):
        own = [o.by_role[role] for o in outcomes if role in o.by_role]
        tokens = sum(count for count, _ in own)
        found[role] = tokens, sum(count * share for count, share in own) / tokens
    return found


def _along(outcomes: Sequence[Outcome]) -> dict[str, Along]:
    found: dict[str, Along] = {}
    for number, name in enumerate(PLACES):
        there = [(o.drawn_with, o.by_place[number]) for o in outcomes if o.by_place]
        there = [(drawn_with, each) for drawn_with, each in there if each.places]
        if not there:
            continue
        groups, sizes = [group for group, _ in there], [each.places for _, each in there]
        found[name] = Along(
            places=sum(sizes),
            same_first=estimate([each.same_first for _, each in there], groups, sizes=sizes),
            kl=estimate([each.kl for _, each in there], groups, sizes=sizes),
        )
    return found


def _over(
    outcomes: Sequence[Outcome],
    value: Callable[[Outcome], float],
    size: Callable[[Outcome], float] = lambda _: 1.0,
) -> Estimate | None:
    if not outcomes:
        return None
    return estimate(
        [value(o) for o in outcomes],
        [o.drawn_with for o in outcomes],
        sizes=[size(o) for o in outcomes],
    )


def _times(outcomes: Sequence[Outcome]) -> Times | None:
    if not outcomes:
        return None
    # An answer of one token on either side leaves its pair out.
    pairs = [
        (o.full_token_s, o.token_s)
        for o in outcomes
        if o.full_token_s is not None and o.token_s is not None
    ]
    return Times(
        full_first_token_s=median(o.full_first_token_s for o in outcomes),
        first_token_s=median(o.first_token_s for o in outcomes),
        full_token_s=median(full for full, _ in pairs) if pairs else None,
        token_s=median(other for _, other in pairs) if pairs else None,
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
