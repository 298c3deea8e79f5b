"""``kvcompress compare``: find the method and budget that your own prompts tolerate."""

import dataclasses
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_kvcompress.compare import prompts, server
from vllm_kvcompress.compare.client import Cell, Client
from vllm_kvcompress.compare.comparison import Comparison
from vllm_kvcompress.compare.journal import replace_file
from vllm_kvcompress.compare.limits import find_limits, planned_lines, planned_tasks
from vllm_kvcompress.compare.picture import draw, why_empty
from vllm_kvcompress.compare.report import (
    TABLES,
    Column,
    Report,
    markdown,
    rule_columns,
)
from vllm_kvcompress.compare.summary import Measure
from vllm_kvcompress.compare.tasks import TASKS, Item, build_items
from vllm_kvcompress.errors import ConfigError, KVCompressError
from vllm_kvcompress.methods.base import choose
from vllm_kvcompress.methods.registry import PRESETS
from vllm_kvcompress.planning.cache_dtypes import LOW_BIT_CACHES
from vllm_kvcompress.serving.exposition import Host, Refused
from vllm_kvcompress.settings.packed_dtype import AUTO
from vllm_kvcompress.settings.parsing import parse_budget_and_format
from vllm_kvcompress.settings.protection import NONE, WORDS, parse_protect

_INTERRUPTED = 130
_LOG, _CHART = "server.log", "report.png"
_BASELINES = ("streamingllm", "random")
"""Methods that choose tokens without reading the prompt."""
_CHARACTERS_PER_TOKEN = 4
"""Estimate for English text, used if the server has no tokenizer endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """Arguments of ``kvcompress compare``.

    Args:
        url: address of a running server, None with `model`.
        model: folder of a model to start a server for, None with `url`.
        arguments: further flags of ``vllm serve`` for `model`.
        prompts: JSONL file of prompts, None with `tasks`.
        tasks, methods: names separated by commas.
        budgets: budgets separated by commas, each optionally followed by a format as in
            ``0.4:k4v3``.
        length, count, question, seed: options of the tasks' prompts.
        protect: parts of a chat to run each method with and without. None for the server's
            default.
        lookaheads: numbers separated by commas. None for the server's default.
        baselines: also run the baselines.
        max_drop: largest acceptable loss.
        by: loss measure, None for the default.
        max_tokens: output tokens for prompts without their own ``max_tokens``.
        concurrency: prompts to run at once.
        out: folder of the run.
        keep_text: also store prompts and outputs.
        kl: also compare token probabilities.
        timeout_s: seconds without data from the server after which a request fails.
        against: addresses of other servers of the same model, such as one with an fp8 KV cache, or
            with `model`, KV cache dtypes to start other servers with.
    """

    url: str | None
    model: Path | None
    arguments: Sequence[str]
    prompts: Path | None
    tasks: str | None
    length: int
    count: int
    question: Literal["last", "first"]
    seed: int
    methods: str
    budgets: str
    protect: str | None
    lookaheads: str | None
    baselines: bool
    max_drop: float
    by: Measure | None
    max_tokens: int
    concurrency: int
    out: Path
    keep_text: bool
    kl: bool
    api_key: str | None
    timeout_s: float
    against: Sequence[str] = ()

    def __post_init__(self) -> None:
        if (self.url is None) == (self.model is None):
            raise ConfigError("give either --url (a running server) or --model (a folder)")
        if self.model is not None and not (self.model / "config.json").is_file():
            raise ConfigError(
                f"--model must be a model folder that contains a config.json, got {self.model}"
            )
        if self.url is not None and self.arguments:
            raise ConfigError(
                f"flags of vllm serve need --model, got --url; remove {' '.join(self.arguments)}"
            )
        if (self.prompts is None) == (self.tasks is None):
            raise ConfigError(f"give either --prompts or --tasks; the tasks are {', '.join(TASKS)}")
        for other in self.against:
            if other in LOW_BIT_CACHES and self.model is None:
                raise ConfigError(
                    f"--against {other} starts a server and needs --model; start one yourself with"
                    f" --kv-cache-dtype {other}, and give its address"
                )
            if other not in LOW_BIT_CACHES:
                # Checked here, because --model starts a server before the address is used.
                Host(other, flag="--against")
        urls = [url.rstrip("/") for url in (*self.against, self.url or "")]
        if len(set(urls)) < len(urls):
            raise ConfigError(
                "--against must name other servers than --url, each once; got"
                f" {', '.join(self.against)}{f' and --url {self.url}' if self.url else ''}; remove"
                " the repeated one"
            )
        if not 0 < self.max_drop < 1:
            raise ConfigError(f"--max-drop must be in (0, 1), got {self.max_drop:g}")

    @property
    def cells(self) -> list[Cell]:
        """Return every combination of method, look-ahead, protection and budget, in that order.

        Raises:
            ConfigError: A name or number is invalid, or budgets mix ratios and tokens.
        """
        methods = _parts("--methods", self.methods)
        for method in methods:
            choose("method", PRESETS, method)
        budgets = [parse_budget_and_format(text) for text in _parts("--budgets", self.budgets)]
        if len({type(budget) for budget, _ in budgets}) > 1:
            raise ConfigError(
                "--budgets must be all ratios or all whole numbers of tokens, because ratios and"
                f" tokens cannot be ranked together; got {self.budgets}"
            )
        protections = [""] if self.protect is None else [NONE, self._protected_parts]
        lookaheads = [None] if self.lookaheads is None else _whole_numbers(self.lookaheads)
        # If one budget names a format, the others have the KV cache's dtype.
        default_format = AUTO if any(packed_dtype for _, packed_dtype in budgets) else ""
        return [
            Cell(
                method=method,
                budget=budget,
                protect=protect,
                lookahead=lookahead,
                packed_dtype=packed_dtype or default_format,
            )
            for method in methods
            for lookahead in lookaheads
            for protect in protections
            for budget, packed_dtype in dict.fromkeys(budgets)
        ]

    @property
    def _protected_parts(self) -> str:
        words, spans = parse_protect("--protect", self.protect)
        if spans or not words:
            raise ConfigError(
                f"--protect must name some of {', '.join(WORDS)}, separated by commas; token spans"
                f" differ between prompts and are not allowed here, got {self.protect!r}"
            )
        return ",".join(words)

    @property
    def baseline_cells(self) -> list[Cell]:
        """Return the baselines that `methods` does not name, at every budget and format."""
        cells = self.cells if self.baselines else []
        named = {cell.method for cell in cells}
        kept = dict.fromkeys((cell.budget, cell.packed_dtype) for cell in cells)
        return [
            Cell(method=method, budget=budget, packed_dtype=packed_dtype)
            for method in _BASELINES
            if method not in named
            for budget, packed_dtype in kept
        ]

    @property
    def task_names(self) -> list[str]:
        names = _parts("--tasks", self.tasks or "")
        for name in names:
            choose("task", TASKS, name)
        return names


def run(request: CompareRequest, *, as_json: bool) -> None:
    """Run the comparison, write the report files and print the report.

    Raises:
        ConfigError: An argument is invalid, or the server refuses a cell.
        Unreachable: The server does not respond.
        SystemExit: 0 with a recommendation, 1 without one, 2 if the server was lost or the disk
            became full during the run, 130 if interrupted. Finished results are kept.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    user_items = [] if request.prompts is None else prompts.read_prompts(
        request.prompts, max_tokens=request.max_tokens
    )  # fmt: skip
    cells, baselines = request.cells, request.baseline_cells
    names = request.task_names if request.tasks is not None else []
    planned = planned_lines(user_items) or planned_tasks(names, request.count)
    for sentence in find_limits(planned, by=request.by, max_drop=request.max_drop):
        console.print(f"kvcompress: {sentence}")
    failure: KVCompressError | None = None
    interrupted = False
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _interrupt))
        comparison = stack.enter_context(
            Comparison(cells, folder=request.out, keep_text=request.keep_text, baselines=baselines)
        )
        try:
            client = Client(
                host=Host(
                    stack.enter_context(_server(request, [*cells, *baselines], console)),
                    request.api_key,
                ),
                model="",
                timeout_s=request.timeout_s,
            )
            others = {
                other: stack.enter_context(_other_server(request, other, console))
                for other in request.against
            }
            checked = comparison.check_server(client)
            comparison.check_others(
                {
                    other: dataclasses.replace(client, host=Host(url, request.api_key, "--against"))
                    for other, url in others.items()
                }
            )
            items = user_items or _task_items(request, names, checked.client, comparison.notes)
            comparison.start(
                items,
                _settings(request, names, checked.client.model),
                kl=request.kl,
            )
            _run_with_progress(comparison, request.concurrency, console)
        except KeyboardInterrupt:
            interrupted = True
        except KVCompressError as e:
            if not comparison.started:
                raise
            failure = e
        if not comparison.started:
            console.print("kvcompress: interrupted before any prompt was sent.")
            raise SystemExit(_INTERRUPTED)
        report = comparison.report(by=request.by, max_drop=request.max_drop)
    try:
        _write(report, request.out, console, private=request.keep_text)
    except OSError as e:
        # Still print the report.
        failure = failure or ConfigError(
            f"the report cannot be written to {request.out} ({e}); free some disk space"
        )
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")
    else:
        _print_report(report, request.out)
    raise SystemExit(_status(request, comparison, report, failure, interrupted, console))


def _status(
    request: CompareRequest,
    comparison: Comparison,
    report: Report,
    failure: KVCompressError | None,
    interrupted: bool,
    console: Console,
) -> int:
    """Print what is missing and return the exit status."""
    saved = f"{comparison.num_done} of {comparison.num_total} results are saved in {request.out};"
    saved += " run the same command to resume."
    if failure is not None:
        if request.model is not None:
            saved += f" The server's log is {request.out / _LOG}."
        console.print(f"kvcompress: error: {str(failure).removesuffix('.')}. {saved}")
        return 2
    if interrupted:
        console.print(f"kvcompress: interrupted; {saved}")
        return _INTERRUPTED
    return 0 if report.recommendation.cell is not None else 1


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _server(request: CompareRequest, cells: Sequence[Cell], console: Console) -> Iterator[str]:
    """Yield the URL of the running server, or of one that runs until the context exits."""
    if request.url is not None:
        yield request.url
        return
    assert request.model is not None
    log = request.out / _LOG
    console.print(f"Starting vllm serve {request.model}; its log is {log} ...")
    with server.start(request.model, request.arguments, cells, log) as url:
        yield url


@contextmanager
def _other_server(request: CompareRequest, other: str, console: Console) -> Iterator[str]:
    """Yield the URL `other`, or of a server with the KV cache dtype `other`, as `_server` does."""
    if other not in LOW_BIT_CACHES:
        yield other
        return
    assert request.model is not None
    log = request.out / f"server-{other}.log"
    console.print(f"Starting vllm serve {request.model} --kv-cache-dtype {other}; its log is {log}")
    with server.start_low_bit(request.model, other, request.arguments, log) as url:
        yield url


def _task_items(
    request: CompareRequest, names: Sequence[str], client: Client, notes: list[str]
) -> list[Item]:
    def count_tokens(text: str, /) -> int:
        return client.count_tokens(text)

    def estimate_tokens(text: str, /) -> int:
        return len(text) // _CHARACTERS_PER_TOKEN

    counter = count_tokens
    try:
        client.count_tokens("one two three")
    except Refused:
        counter = estimate_tokens
        notes.append(
            "The server has no /tokenize endpoint: --length is estimated at"
            f" {_CHARACTERS_PER_TOKEN} characters per token."
        )
    return build_items(
        names,
        count=request.count,
        tokens=request.length,
        seed=request.seed,
        question=request.question,
        count_tokens=counter,
        # Several questions about one text count as one independent sample.
        questions_per_text=1,
    )


def _settings(request: CompareRequest, names: Sequence[str], model: str) -> dict[str, Any]:
    """Return the settings that an earlier run must share to be resumed."""
    settings: dict[str, Any] = {"model": model, "concurrency": request.concurrency}
    settings["kl"] = request.kl
    if names:
        settings["tasks"] = list(names)
        settings |= {"length": request.length, "count": request.count, "seed": request.seed}
        settings["question"] = request.question
    return settings


def _run_with_progress(comparison: Comparison, concurrency: int, console: Console) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    num_done, num_total = comparison.num_done, comparison.num_total
    if num_done:
        console.print(f"Resuming: {num_done} of {num_total} results were saved earlier.")
    with ExitStack() as stack:
        # Without a terminal, a line after each tenth of the results replaces the progress bar.
        no_terminal = not console.is_terminal
        progress = stack.enter_context(
            Progress(*columns, console=console, transient=True, disable=no_terminal)
        )
        bar = progress.add_task("running", total=num_total, completed=num_done)
        results = stack.enter_context(closing(comparison.run(concurrency)))
        for count, cell in enumerate(results, num_done + 1):
            progress.update(bar, completed=count, description=str(cell))
            if no_terminal and count * 10 // num_total > (count - 1) * 10 // num_total:
                console.print(f"{count} of {num_total} results are done.")


def _write(report: Report, folder: Path, console: Console, *, private: bool) -> None:
    """Write the report's files.

    Args:
        private: only their owner can read them, because the server's reasons may quote prompts.
    """

    def write(name: str, data: bytes) -> None:
        replace_file(folder / name, data, private=private)

    write("report.json", f"{json.dumps(report.to_json(), indent=2)}\n".encode())
    write("report.md", markdown(report).encode())
    # The chart of an earlier run would contradict this report.
    (folder / _CHART).unlink(missing_ok=True)
    if reason := why_empty(report):
        console.print(f"kvcompress: no chart: {reason}")
        return
    try:
        write(_CHART, draw(report))
    except ImportError:
        console.print("kvcompress: no chart, because matplotlib is missing; pip install matplotlib")
    except OSError as e:
        console.print(f"kvcompress: no chart: {e}")


def _print_report(report: Report, folder: Path) -> None:
    # The server's reason may contain brackets, which rich would read as markup.
    console = Console(highlight=False, markup=False)
    console.print(report.title, style="bold")
    for columns in TABLES.values():
        console.print(_table(columns, report))
    if any(summary.obeyed for summary in report.summaries):
        console.print(_table(rule_columns(report.summaries, by_rule=False), report))
    # Without a terminal, keep each sentence on one line.
    soft_wrap = not console.is_terminal
    for note in report.notes:
        console.print(note, soft_wrap=soft_wrap)
    style = "bold green" if report.recommendation.cell is not None else "bold red"
    console.print(report.recommendation.sentence, style=style, soft_wrap=soft_wrap)
    console.print(f"{folder / 'report.md'} explains the figures.", soft_wrap=soft_wrap)


def _table(columns: Sequence[Column], report: Report) -> Table:
    table = Table(box=box.HORIZONTALS, header_style="bold", collapse_padding=True, pad_edge=False)
    # Intervals are in report.md only: they do not fit a terminal.
    rows = [[column.text(s).partition(" [")[0] for column in columns] for s in report.summaries]
    name_column, *figure_columns = columns
    for row in rows:
        # A space after each comma lets the list of protected parts wrap.
        row[0] = row[0].replace(",", ", ")
    # Names must not be cut: a cut cake-chunk would read as cake.
    table.add_column(
        name_column.name, min_width=max(len(word) for row in rows for word in row[0].split())
    )
    for number, column in enumerate(figure_columns, 1):
        # Headings may wrap, figures must not.
        parts = [*column.name.split(), *(row[number] for row in rows)]
        table.add_column(column.name, justify="right", width=max(map(len, parts)))
    in_baselines = False
    for summary, row in zip(report.summaries, rows, strict=True):
        if summary.baseline and not in_baselines:
            table.add_section()
            in_baselines = True
        table.add_row(*row, style="dim" if summary.baseline else None)
    return table


def _whole_numbers(text: str) -> list[int]:
    parts = _parts("--lookaheads", text)
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(
            "--lookaheads must be whole numbers of output tokens, 0 or more, separated by commas;"
            f" got {text!r}"
        )
    return list(dict.fromkeys(map(int, parts)))


def _parts(flag: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"{flag} must have at least one value, separated by commas; got {text!r}")
    return list(dict.fromkeys(parts))
