"""From the first look at a server to the report; a run can be left and gone on with."""

import dataclasses
import hashlib
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

from vllm_kvcompress.compare import preflight, prompts, runner
from vllm_kvcompress.compare.client import FULL, Cell, Client
from vllm_kvcompress.compare.journal import Journal
from vllm_kvcompress.compare.outcome import Outcome
from vllm_kvcompress.compare.report import Report
from vllm_kvcompress.compare.summary import By, Summary, default_by, recommend, summarise, unbeaten
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.serving.exposition import PREFIX, Metrics, Refused


class Comparison:
    """Prompts in cells, at one server, in one folder.

    Attributes:
        begun: whether there is a run to report of.
        notes: what the report must say, a sentence each.
        done, total: prompts times cells.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        folder: Path,
        keep_text: bool,
        baselines: Sequence[Cell] = (),
    ) -> None:
        """Take the folder.

        Args:
            baselines: cells that stand beside `cells`, where the server takes them.

        Raises:
            ConfigError: it cannot be written, or is another's.
        """
        self._named = list(cells)
        self._baselines = list(baselines)
        self._keep_text = keep_text
        self._journal = Journal(folder, keep_text=keep_text)
        self._outcomes: list[Outcome] = []
        self._works: list[runner.Work] = []
        self._refused: dict[str, dict[str, str]] = {}
        self._before: Metrics | None = None
        self._kl = False
        self._settings: Mapping[str, Any] = {}
        self.begun = False
        self.notes: list[str] = []
        self.total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.__exit__()

    @property
    def _cells(self) -> list[Cell]:
        return [*self._named, *self._baselines]

    @property
    def done(self) -> int:
        return len(self._outcomes)

    def look(self, client: Client) -> preflight.Served:
        """Ask the server whether it can be compared, before any prompt is sent.

        Raises:
            Unreachable, ConfigError: it cannot.
        """
        self._served = preflight.look(client, self._named, self._baselines)
        self._baselines = list(self._served.baselines)
        self.notes += self._served.notes
        return self._served

    def begin(
        self, items: Sequence[Item], settings: Mapping[str, Any], *, kl: bool, by: By | None
    ) -> None:
        """Find what is left to ask.

        Args:
            settings: what must be the same for figures to be put together, beside the prompts.
            kl: whether to compare what is likely as well.
            by: the measure that was asked for.

        Raises:
            ConfigError: the folder has a run that this is not, or `by` cannot be had.
        """
        if by == "score" and not any(item.known for item in items):
            raise ConfigError("--by score needs prompts with an answer, and none has one")
        keys = prompts.keys(items)
        # An answer that was corrected would be scored beside the old one's scores.
        known = ((key, item.answers, item.rules) for key, item in zip(keys, items, strict=True))
        told = sorted(map(str, known))
        digest = hashlib.sha256("\n".join(told).encode(errors="backslashreplace")).hexdigest()
        self._settings = {
            **settings,
            "prompts": digest,
            "server settings": dict(self._served.settings),
            "top_logprobs": self._served.client.top if kl else 0,
        }
        self._take(self._journal.open(self._settings, self._named, self._baselines))
        done = {(o.key, o.cell) for o in self._outcomes}
        self.total = len(items) * len(self._cells)
        for item, key in zip(items, keys, strict=True):
            cells = [cell for cell in self._cells if (key, cell) not in done]
            if cells:
                self._works.append(runner.Work(item=item, key=key, cells=cells))
        self._kl = kl
        if kl:
            self.notes.append(_KL)
        self._before = preflight.counted(self._served.client.host)
        self.begun = True

    def ask(self, concurrency: int) -> Generator[Cell, None, None]:
        """Ask for what is left; each cell of each prompt as it is done and written.

        Raises:
            Unreachable: the server is gone.
        """
        counted = self._journal.forget_count()
        client = self._served.client
        if not self._kl:
            client = dataclasses.replace(client, top=0)
        asking = runner.ask_all(client, self._works, concurrency=concurrency, kl=self._kl)
        try:
            with closing(asking):
                for asked in asking:
                    self._note(asked)
                    yield asked.cell
        finally:
            self._journal.count(_sum(counted, self._risen()))

    def report(self, *, by: By | None, max_drop: float) -> Report:
        """What is known by now."""
        # An interrupt may have come between a line and its place in here.
        self._take(self._journal.outcomes())
        measure = by or default_by(self._outcomes)
        summaries = summarise(
            self._cells,
            self._outcomes,
            by=measure,
            none_compressed=self._journal.counted == 0,
            baselines=self._baselines,
        )
        recommendation = recommend(summaries, by=measure, max_drop=max_drop)
        complete = self.done == self.total
        notes = [*self.notes, *self._remarks(summaries, complete, measure)]
        if beside := unbeaten(summaries, recommendation):
            notes.append(_UNBEATEN.format(best=recommendation.cell, beside=beside.cell))
        return Report(
            title=f"KV-cache compression on {self._settings['model']}:"
            f" {self.total // len(self._cells):,} prompts",
            summaries=summaries,
            recommendation=recommendation,
            complete=complete,
            notes=notes,
            settings=dict(self._settings),
        )

    def _take(self, found: Sequence[Outcome]) -> None:
        # Of baselines that are not asked for now, or that the server no longer takes, it has more.
        self._outcomes = list({(o.key, o.cell): o for o in found if o.cell in self._cells}.values())

    def _note(self, asked: runner.Asked) -> None:
        if asked.refusal is not None:
            self._refused.setdefault(_why(asked.refusal), {})[asked.work.key] = asked.refusal.reason
        if asked.outcome is None:
            return
        self._journal.add(asked.outcome)
        self._outcomes.append(asked.outcome)
        work = asked.work
        for cell, text in ((FULL, asked.full), (asked.cell, asked.text)):
            self._journal.add_text(work.item, work.key, cell, text)

    def _risen(self) -> int | None:
        """Prompts that the server compressed since `begin`, for us or others."""
        after = preflight.counted(self._served.client.host)
        if self._before is None or after is None or after.info is None:
            return None
        name = f"{PREFIX}planned_requests_total"
        return round(after.total(name) - self._before.total(name))

    def _remarks(self, summaries: Sequence[Summary], complete: bool, by: By) -> list[str]:
        remarks = []
        prompts = self.total // len(self._cells)
        if not complete:
            remarks.append(
                f"This is not all: {self.done:,} of {self.total:,} are done. Figures are of those."
            )
        for why, reasons in self._refused.items():
            # A server may quote the prompt in its reason.
            said = "With --keep-text its reason is said."
            if self._keep_text:
                said = f"Its reason, of one of them: {next(iter(reasons.values()))}"
            remarks.append(
                f"The server refused {len(reasons):,} of {prompts:,} prompts ({why}); where it did,"
                f" they are in no figure. {said}"
            )
        asked = [s for s in summaries if s.asked]
        if asked and all(s.compressed is None for s in asked):
            remarks.append(
                "The server does not say what it compressed and kept: start it with --kv-usage."
                " Figures are of all prompts, those that it left whole among them."
            )
        compressed = [o for o in self._outcomes if o.kept_tokens is not None]
        if missing := sum(not o.by_role for o in compressed):
            remarks.append(
                f"What was kept of each role is not told of {missing:,} of {len(compressed):,}"
                " compressed answers: not where a prompt was packed piece by piece or in two"
                " steps, where an answer of few tokens ended before a GPU's report, and by no"
                " server without kv_by_role."
            )
        whole = [str(s.cell) for s in asked if s.compressed == 0 and not s.baseline]
        if whole:
            least = self._served.settings.get("min_prompt")
            short = "" if least is None else f" Prompts below {int(least):,} tokens are."
            remarks.append(
                f"WARNING: nothing was compressed by {', '.join(whole)}: the server left every"
                f" prompt whole.{short} Prompts whose answer ends within the method's look-ahead"
                " are too. Lower --kv-min-prompt there, or take longer prompts and answers."
            )
        scored = {o.key for o in self._outcomes if o.score is not None}
        unscored = {o.key for o in self._outcomes} - scored
        if scored and unscored:
            remarks.append(
                f"Scores are of the {len(scored):,} prompts with a known answer; {len(unscored):,}"
                " have none."
            )
        full = max((s.full_score.mean for s in asked if s.full_score), default=1.0)
        if by == "score" and full < _KNOWS_LITTLE:
            remarks.append(
                f"The full cache itself scores {full:.2f}: on prompts that it cannot answer there"
                " is little to lose, and a small drop says little."
            )
        return remarks


_KNOWS_LITTLE = 0.5
_UNBEATEN = (
    "{beside} loses no more than {best}: on these prompts the choice of tokens decides little, and"
    " on others it may."
)
_KL = (
    "KL and top-1 are over the tokens up to and with the first that differs between two answers:"
    " behind it they would judge different texts. Where answers part early, that is few tokens."
)


def _why(refusal: Refused) -> str:
    """What can be said of a refusal without its reason."""
    long = re.search(r"maximum (context|model) length|max_model_len", refusal.reason)
    return f"status {refusal.status}{', too long for its context' if long else ''}"


def _sum(earlier: int | None, now: int | None) -> int | None:
    return None if earlier is None or now is None else earlier + now
