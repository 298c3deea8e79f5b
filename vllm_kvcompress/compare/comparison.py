"""A comparison run: resume an earlier run, send the prompts, and build the report."""

import hashlib
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from vllm_kvcompress.compare import prompts
from vllm_kvcompress.compare.client import FULL, Cell
from vllm_kvcompress.compare.journal import Journal
from vllm_kvcompress.compare.outcome import Outcome
from vllm_kvcompress.compare.preflight import Servers, read_metrics
from vllm_kvcompress.compare.report import Report
from vllm_kvcompress.compare.runner import CellResult, PendingPrompt, run_prompts
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
from vllm_kvcompress.serving.exposition import PREFIX, Refused

_LOW_FULL_SCORE = 0.5
_KL = (
    "KL and top-1 cover the output tokens up to and including the first difference between the two"
    " outputs. After it, the two sides have different texts. If outputs diverge early, that is few"
    " tokens."
)


class Comparison:
    """A run of prompts times cells, stored in one folder.

    Attributes:
        num_done, num_total: finished and all pairs of a prompt and a cell.
    """

    def __init__(
        self,
        journal: Journal,
        servers: Servers,
        items: Sequence[Item],
        settings: Mapping[str, Any],
        *,
        kl: bool,
        notes: Sequence[str] = (),
    ) -> None:
        """Start the run, or load an earlier one and find which prompts are left.

        Args:
            journal: the files of the run, and of an earlier run if it is resumed.
            items: the prompts.
            settings: further settings that an earlier run must share to be resumed.
            kl: also compare token probabilities.
            notes: sentences that the report must include.

        Raises:
            ConfigError: The folder holds a different run.
        """
        self._journal, self._servers, self._kl = journal, servers, kl
        self._cells = [*servers.cells, *servers.baselines]
        self._notes = [*servers.notes, *notes, *([_KL] if kl else [])]
        self._refusals: dict[str, dict[str, str]] = {}
        keys = prompts.keys(items)
        # Answers are part of the digest: a corrected answer would mix old and new scores.
        known = (
            str((key, item.answers, item.rules, item.match))
            for key, item in zip(keys, items, strict=True)
        )
        digest = hashlib.sha256("\n".join(sorted(known)).encode(errors="backslashreplace"))
        self._settings = {
            **settings,
            "prompts": digest.hexdigest(),
            "server settings": dict(servers.settings),
            "top_logprobs": servers.client.top_logprobs if kl else 0,
        }
        self._load(journal.open(self._settings, servers.cells, servers.baselines))
        done = {(o.key, o.cell) for o in self._outcomes}
        self.num_total = len(items) * len(self._cells)
        left = [[cell for cell in self._cells if (key, cell) not in done] for key in keys]
        self._pending = [
            PendingPrompt(item=item, key=key, cells=cells)
            for item, key, cells in zip(items, keys, left, strict=True)
            if cells
        ]
        self._compressed_before = self._server_count()

    @property
    def num_done(self) -> int:
        return len(self._outcomes)

    def run(self, concurrency: int) -> Generator[Cell, None, None]:
        """Run the pending prompts and yield the cell of each result once it is on disk.

        Raises:
            Unreachable: The server is gone.
        """
        count = self._journal.compressed_count
        # None is the right value if this run is killed.
        self._journal.set_compressed_count(None)
        clients = self._servers.clients
        if not self._kl:
            clients = {server: replace(each, top_logprobs=0) for server, each in clients.items()}
        results = run_prompts(clients, self._pending, concurrency=concurrency, kl=self._kl)
        try:
            with closing(results):
                for result in results:
                    self._record(result)
                    yield result.cell
        finally:
            after = self._server_count()
            if count is not None and self._compressed_before is not None and after is not None:
                self._journal.set_compressed_count(count + after - self._compressed_before)

    def report(self, *, by: Measure | None, max_drop: float) -> Report:
        """Return the report over all results so far.

        Args:
            by: the loss measure, None for the default.
            max_drop: the largest acceptable loss.
        """
        # After an interrupt, the journal may have a line that is not in memory.
        self._load(self._journal.outcomes())
        measure = by or default_measure(self._outcomes)
        summaries = summarise(
            self._cells,
            self._outcomes,
            by=measure,
            none_compressed=self._journal.compressed_count == 0,
            baselines=self._servers.baselines,
        )
        recommendation = recommend(summaries, by=measure, max_drop=max_drop)
        notes = [*self._notes, *self._result_notes(summaries, measure)]
        if len(self._servers.clients) > 1 or self._servers.client.dtype_bytes == 1.0:
            notes += low_bit_notes(summaries, recommendation)
        if baseline := best_baseline_without_extra_loss(summaries, recommendation):
            notes.append(
                f"{baseline.cell} loses no more than {recommendation.cell}: on these prompts it"
                " matters little which tokens are kept. On other prompts it may."
            )
        return Report(
            title=f"KV-cache compression on {self._settings['model']}:"
            f" {self.num_total // len(self._cells):,} prompts",
            summaries=summaries,
            recommendation=recommendation,
            complete=self.num_done == self.num_total,
            notes=notes,
            settings=self._settings,
        )

    def _load(self, found: Sequence[Outcome]) -> None:
        # The journal may also hold baselines that this run does not compare.
        self._outcomes = list({(o.key, o.cell): o for o in found if o.cell in self._cells}.values())

    def _record(self, result: CellResult) -> None:
        prompt = result.prompt
        if result.refusal is not None:
            reasons = self._refusals.setdefault(_refusal_kind(result.refusal), {})
            reasons[prompt.key] = result.refusal.reason
        if result.outcome is None:
            return
        self._journal.add(result.outcome)
        self._outcomes.append(result.outcome)
        for cell, text in ((FULL, result.full_text), (result.cell, result.text)):
            self._journal.add_text(prompt.item, prompt.key, cell, text)

    def _server_count(self) -> int | None:
        """Return how many prompts the server has compressed, those of other clients included.

        None without the plugin's metrics.
        """
        metrics = read_metrics(self._servers.client.host)
        if metrics is None or metrics.info is None:
            return None
        return round(metrics.total(f"{PREFIX}planned_requests_total"))

    def _result_notes(self, summaries: Sequence[Summary], by: Measure) -> list[str]:
        notes = []
        if self.num_done < self.num_total:
            notes.append(
                f"This run is incomplete: {self.num_done:,} of {self.num_total:,} results are in"
                " the figures."
            )
        for kind, reasons in self._refusals.items():
            # The server's reason may quote the prompt.
            reason = "Add --keep-text to see the reason."
            if self._journal.keeps_text:
                reason = f"The reason for one of them: {next(iter(reasons.values()))}"
            notes.append(
                f"The server refused {len(reasons):,} of {self.num_total // len(self._cells):,}"
                f" prompts ({kind}). The figures leave them out. {reason}"
            )
        measured = [s for s in summaries if s.asked]
        if measured and all(s.compressed is None for s in measured):
            notes.append(
                "The server does not report which prompts it compressed: start it with --kv-usage."
                " The figures cover all prompts, including uncompressed ones."
            )
        if uncompressed := [str(s.cell) for s in measured if s.compressed == 0 and not s.baseline]:
            min_prompt = self._servers.settings.get("min_prompt")
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


def _refusal_kind(refusal: Refused) -> str:
    """Return a description of a refusal that does not quote the server's reason."""
    too_long = re.search(r"maximum (context|model) length|max_model_len", refusal.reason)
    return f"status {refusal.status}{', too long for its context' if too_long else ''}"
