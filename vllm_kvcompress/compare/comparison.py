"""A comparison run: check the server, send the prompts, resume earlier runs, build the report."""

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
from vllm_kvcompress.compare.summary import (
    Measure,
    Summary,
    best_baseline_without_extra_loss,
    default_measure,
    low_bit_notes,
    recommend,
    summarise,
)
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.serving.exposition import PREFIX, Metrics, Refused


class Comparison:
    """A run of prompts times cells on one server, stored in one folder.

    Attributes:
        started: whether `start` succeeded, so that a report can be built.
        notes: sentences that the report must include.
        num_done, num_total: finished and all pairs of a prompt and a cell.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        *,
        folder: Path,
        keep_text: bool,
        baselines: Sequence[Cell] = (),
    ) -> None:
        """Open and lock the folder of the run.

        Args:
            cells: the methods to compare, with their budgets.
            folder: created if missing.
            keep_text: also store prompts and outputs.
            baselines: cells to show next to `cells`. Those that the server refuses are left out.

        Raises:
            ConfigError: The folder cannot be written, or another run uses it.
        """
        self._method_cells = list(cells)
        self._baselines = list(baselines)
        self._others: dict[str, Client] = {}
        self._keep_text = keep_text
        self._journal = Journal(folder, keep_text=keep_text)
        self._outcomes: list[Outcome] = []
        self._pending: list[runner.PendingPrompt] = []
        self._refusals: dict[str, dict[str, str]] = {}
        self._metrics_before: Metrics | None = None
        self._kl = False
        self._settings: Mapping[str, Any] = {}
        self.started = False
        self.notes: list[str] = []
        self.num_total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.__exit__()

    @property
    def _cells(self) -> list[Cell]:
        return [*self._method_cells, *self._baselines]

    @property
    def num_done(self) -> int:
        return len(self._outcomes)

    def check_server(self, client: Client) -> preflight.Server:
        """Check that the server accepts every cell before any prompt is sent.

        Raises:
            Unreachable: The server does not respond.
            ConfigError: The server cannot compress, or refuses a cell.
        """
        self._server = preflight.check_server(client, self._method_cells, self._baselines)
        self._baselines = list(self._server.baselines)
        self.notes += self._server.notes
        return self._server

    def check_others(self, clients: Mapping[str, Client]) -> None:
        """Check other servers of the same model; their uncompressed outputs are compared, too.

        Call it after `check_server`.

        Args:
            clients: by `Cell.server`.

        Raises:
            Unreachable: A server does not respond.
            ConfigError: A server serves another model.
        """
        for server, client in clients.items():
            cell, checked, notes = preflight.check_other(client, self._server.client, server)
            if any(cell.method == other.method for other in self._baselines):
                cell = dataclasses.replace(cell, method=f"{cell.method} at {cell.server}")
            self._baselines.append(cell)
            self._others[cell.server] = checked
            self.notes += notes

    def start(self, items: Sequence[Item], settings: Mapping[str, Any], *, kl: bool) -> None:
        """Start the run, or load an earlier one and find which prompts are left.

        Args:
            items: the prompts.
            settings: further settings that an earlier run must share to be resumed.
            kl: also compare token probabilities.

        Raises:
            ConfigError: The folder holds a different run.
        """
        keys = prompts.keys(items)
        # Answers are part of the digest: a corrected answer would mix old and new scores.
        known = (
            (key, item.answers, item.rules, *((item.match,) if item.match != "words" else ()))
            for key, item in zip(keys, items, strict=True)
        )
        descriptions = sorted(map(str, known))
        digest = hashlib.sha256("\n".join(descriptions).encode(errors="backslashreplace"))
        self._settings = {
            **settings,
            "prompts": digest.hexdigest(),
            "server settings": dict(self._server.settings),
            "top_logprobs": self._server.client.top_logprobs if kl else 0,
        }
        self._load(self._journal.open(self._settings, self._method_cells, self._baselines))
        done = {(o.key, o.cell) for o in self._outcomes}
        self.num_total = len(items) * len(self._cells)
        for item, key in zip(items, keys, strict=True):
            cells = [cell for cell in self._cells if (key, cell) not in done]
            if cells:
                self._pending.append(runner.PendingPrompt(item=item, key=key, cells=cells))
        self._kl = kl
        if kl:
            self.notes.append(_KL)
        self._metrics_before = preflight.read_metrics(self._server.client.host)
        self.started = True

    def run(self, concurrency: int) -> Generator[Cell, None, None]:
        """Run the pending prompts and yield the cell of each result once it is on disk.

        Raises:
            Unreachable: The server is gone.
        """
        compressed_before = self._journal.invalidate_compressed_count()
        client, others = self._server.client, self._others
        if not self._kl:
            client = dataclasses.replace(client, top_logprobs=0)
            others = {
                server: dataclasses.replace(each, top_logprobs=0) for server, each in others.items()
            }
        results = runner.run_prompts(
            client, self._pending, concurrency=concurrency, kl=self._kl, others=others
        )
        try:
            with closing(results):
                for result in results:
                    self._record(result)
                    yield result.cell
        finally:
            self._journal.set_compressed_count(_sum(compressed_before, self._newly_compressed()))

    def report(self, *, by: Measure | None, max_drop: float) -> Report:
        """Return the report over all results so far."""
        # After an interrupt, the journal may have a line that is not in memory.
        self._load(self._journal.outcomes())
        measure = by or default_measure(self._outcomes)
        summaries = summarise(
            self._cells,
            self._outcomes,
            by=measure,
            none_compressed=self._journal.compressed_count == 0,
            baselines=self._baselines,
        )
        recommendation = recommend(summaries, by=measure, max_drop=max_drop)
        complete = self.num_done == self.num_total
        notes = [*self.notes, *self._result_notes(summaries, complete, measure)]
        if self._others or self._server.client.dtype_bytes == 1.0:
            notes += low_bit_notes(summaries, recommendation)
        if baseline := best_baseline_without_extra_loss(summaries, recommendation):
            notes.append(_BASELINE_AS_GOOD.format(best=recommendation.cell, baseline=baseline.cell))
        return Report(
            title=f"KV-cache compression on {self._settings['model']}:"
            f" {self.num_total // len(self._cells):,} prompts",
            summaries=summaries,
            recommendation=recommendation,
            complete=complete,
            notes=notes,
            settings=dict(self._settings),
        )

    def _load(self, found: Sequence[Outcome]) -> None:
        # The journal may also hold baselines that this run does not compare.
        self._outcomes = list({(o.key, o.cell): o for o in found if o.cell in self._cells}.values())

    def _record(self, result: runner.CellResult) -> None:
        prompt = result.prompt
        if result.refusal is not None:
            kind = _refusal_kind(result.refusal)
            self._refusals.setdefault(kind, {})[prompt.key] = result.refusal.reason
        if result.outcome is None:
            return
        self._journal.add(result.outcome)
        self._outcomes.append(result.outcome)
        for cell, text in ((FULL, result.full_text), (result.cell, result.text)):
            self._journal.add_text(prompt.item, prompt.key, cell, text)

    def _newly_compressed(self) -> int | None:
        """Return the prompts compressed since `start`, by the server's counter, or None.

        The counter includes prompts of other clients.
        """
        after = preflight.read_metrics(self._server.client.host)
        if self._metrics_before is None or after is None or after.info is None:
            return None
        name = f"{PREFIX}planned_requests_total"
        return round(after.total(name) - self._metrics_before.total(name))

    def _result_notes(self, summaries: Sequence[Summary], complete: bool, by: Measure) -> list[str]:
        notes = []
        num_prompts = self.num_total // len(self._cells)
        if not complete:
            notes.append(
                f"This run is incomplete: {self.num_done:,} of {self.num_total:,} results are in"
                " the figures."
            )
        for kind, reasons in self._refusals.items():
            # The server's reason may quote the prompt.
            reason = "Add --keep-text to see the reason."
            if self._keep_text:
                reason = f"The reason for one of them: {next(iter(reasons.values()))}"
            notes.append(
                f"The server refused {len(reasons):,} of {num_prompts:,} prompts ({kind}). The"
                f" figures leave them out. {reason}"
            )
        measured = [s for s in summaries if s.asked]
        if measured and all(s.compressed is None for s in measured):
            notes.append(
                "The server does not report which prompts it compressed: start it with --kv-usage."
                " The figures cover all prompts, including uncompressed ones."
            )
        uncompressed = [str(s.cell) for s in measured if s.compressed == 0 and not s.baseline]
        if uncompressed:
            min_prompt = self._server.settings.get("min_prompt")
            short = (
                ""
                if min_prompt is None
                else f" It never compresses prompts of fewer than {int(min_prompt):,} tokens."
            )
            notes.append(
                f"WARNING: the server compressed no prompt with {', '.join(uncompressed)}.{short}"
                " It also skips prompts whose output ends within the method's look-ahead. Lower"
                " --kv-min-prompt on the server, or use longer prompts and outputs."
            )
        scored = {o.key for o in self._outcomes if o.score is not None}
        unscored = {o.key for o in self._outcomes} - scored
        if scored and unscored:
            notes.append(
                f"Scores, and a recommendation by score, cover the {len(scored):,} prompts with a"
                f" known answer; {len(unscored):,} have none. The other figures cover both."
            )
        full = max((s.full_score.mean for s in measured if s.full_score), default=1.0)
        if by == "score" and 0 < full < _LOW_FULL_SCORE:
            notes.append(
                f"The full cache itself scores only {full:.2f}. Prompts that it cannot answer"
                " cannot get worse, so a small drop means little here."
            )
        return notes


_LOW_FULL_SCORE = 0.5
_BASELINE_AS_GOOD = (
    "{baseline} loses no more than {best}: on these prompts it matters little which tokens are"
    " kept. On other prompts it may."
)
_KL = (
    "KL and top-1 cover the output tokens up to and including the first difference between the two"
    " outputs. After it, the two sides have different texts. If outputs diverge early, that is few"
    " tokens."
)


def _refusal_kind(refusal: Refused) -> str:
    """Return a description of a refusal that does not quote the server's reason."""
    too_long = re.search(r"maximum (context|model) length|max_model_len", refusal.reason)
    return f"status {refusal.status}{', too long for its context' if too_long else ''}"


def _sum(earlier: int | None, new: int | None) -> int | None:
    return None if earlier is None or new is None else earlier + new
