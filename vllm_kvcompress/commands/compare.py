"""``kvcompress compare``: which method and budget an operator's own traffic takes."""

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
from vllm_kvcompress.compare.picture import save_picture
from vllm_kvcompress.compare.report import (
    TABLES,
    Column,
    Report,
    markdown,
    obeyed_columns,
    role_columns,
)
from vllm_kvcompress.compare.summary import By
from vllm_kvcompress.compare.tasks import TASKS, Item, build_items
from vllm_kvcompress.errors import ConfigError, KVCompressError
from vllm_kvcompress.methods.base import choose
from vllm_kvcompress.methods.presets import PRESETS
from vllm_kvcompress.serving.exposition import Host, Refused
from vllm_kvcompress.settings.parsing import parse_budget
from vllm_kvcompress.settings.protection import NONE, WORDS, parse_protect

_INTERRUPTED = 130
_LOG = "server.log"
_BASELINES = ("streamingllm", "random")
"""What a method has to beat: neither reads the prompt."""
_LETTERS_PER_TOKEN = 4
"""Of English, where no tokenizer can be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was typed.

    Args:
        model: a folder to start a server for; None with `url`.
        arguments: further flags of ``vllm serve``, for a folder.
        methods, budgets, tasks: names and numbers with commas between them.
        protect: parts of a chat that each method is compared with and without; None for neither.
        lookaheads: numbers with commas between them; None for what the server takes by itself.
        baselines: show beside the methods what they have to beat.
        length, count, question: of the tasks' prompts.
        max_tokens: of answers to prompts that do not say it.
        out: folder of the run.
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
    by: By | None
    max_tokens: int
    concurrency: int
    out: Path
    keep_text: bool
    kl: bool
    api_key: str | None
    timeout_s: float

    def __post_init__(self) -> None:
        if (self.url is None) == (self.model is None):
            raise ConfigError("give one of --url and --model: a running server, or a folder")
        if self.model is not None and not (self.model / "config.json").is_file():
            raise ConfigError(
                f"--model {self.model} must be a model's folder, with a config.json in it"
            )
        if self.url is not None and self.arguments:
            raise ConfigError(
                "flags of vllm serve are for a server of --model, and --url was given; remove"
                f" {' '.join(self.arguments)}"
            )
        if (self.prompts is None) == (self.tasks is None):
            raise ConfigError(f"give one of --prompts and --tasks; tasks are {', '.join(TASKS)}")
        if not 0 < self.max_drop < 1:
            raise ConfigError(f"--max-drop must be in (0, 1), got {self.max_drop:g}")

    @property
    def cells(self) -> list[Cell]:
        """Every method at every budget, look-ahead and protection, as they were named.

        Raises:
            ConfigError: one is unknown, or budgets are of both kinds.
        """
        methods = _parts("--methods", self.methods)
        for method in methods:
            choose("method", PRESETS, method)
        budgets = list(dict.fromkeys(parse_budget(b) for b in _parts("--budgets", self.budgets)))
        if len({type(budget) for budget in budgets}) > 1:
            raise ConfigError(
                f"--budgets must be all ratios or all whole numbers of tokens, got {self.budgets};"
                " the smallest of both kinds is none"
            )
        ways = [""] if self.protect is None else [NONE, self._protected]
        aheads = [None] if self.lookaheads is None else _whole_numbers(self.lookaheads)
        return [
            Cell(method=m, budget=b, protect=p, lookahead=a)
            for m in methods
            for a in aheads
            for p in ways
            for b in budgets
        ]

    @property
    def _protected(self) -> str:
        words, spans = parse_protect("--protect", self.protect)
        if spans or not words:
            raise ConfigError(
                f"--protect must be some of {', '.join(WORDS)} with commas between them, got"
                f" {self.protect!r}; a prompt's tokens are its own"
            )
        return ",".join(words)

    @property
    def beside(self) -> list[Cell]:
        """What is not asked for by name and stands beside, at every budget."""
        cells = self.cells if self.baselines else []
        named = {cell.method for cell in cells}
        budgets = dict.fromkeys(cell.budget for cell in cells)
        return [Cell(method=m, budget=b) for m in _BASELINES if m not in named for b in budgets]

    @property
    def task_names(self) -> list[str]:
        names = _parts("--tasks", self.tasks or "")
        for name in names:
            choose("task", TASKS, name)
        return names


def run(request: Request, *, as_json: bool) -> None:
    """Compare, and write and print what was found.

    Raises:
        ConfigError: something was typed that means nothing here, or the server refuses it.
        Unreachable: the server does not answer.
        SystemExit: 1 where nothing can be recommended, 130 where it was interrupted, 2 where the
            server or room on the disk was lost on the way. What was done is kept.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    own = [] if request.prompts is None else prompts.read_prompts(
        request.prompts, max_tokens=request.max_tokens
    )  # fmt: skip
    cells, beside = request.cells, request.beside
    names = request.task_names if request.tasks is not None else []
    lost: KVCompressError | None = None
    interrupted = False
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _interrupt))
        comparison = stack.enter_context(
            Comparison(cells, folder=request.out, keep_text=request.keep_text, baselines=beside)
        )
        try:
            client = Client(
                host=Host(
                    stack.enter_context(_server(request, [*cells, *beside], console)),
                    request.api_key,
                ),
                model="",
                timeout_s=request.timeout_s,
            )
            served = comparison.look(client)
            items = own or _built_in(request, names, served.client, comparison.notes)
            comparison.begin(
                items,
                _settings(request, names, served.client.model),
                kl=request.kl,
                by=request.by,
            )
            _ask(comparison, request.concurrency, console)
        except KeyboardInterrupt:
            interrupted = True
        except KVCompressError as e:
            if not comparison.begun:
                raise
            lost = e
        if not comparison.begun:
            console.print("kvcompress: interrupted before anything was asked.")
            raise SystemExit(_INTERRUPTED)
        report = comparison.report(by=request.by, max_drop=request.max_drop)
    try:
        _write(report, request.out, console)
    except OSError as e:
        # What was found is printed at least.
        lost = lost or ConfigError(f"{request.out} cannot have the report ({e}); make room there")
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")
    else:
        _show(report, request.out)
    raise SystemExit(_status(request, comparison, report, lost, interrupted, console))


def _status(
    request: Request,
    comparison: Comparison,
    report: Report,
    lost: KVCompressError | None,
    interrupted: bool,
    console: Console,
) -> int:
    """The exit status, once it is said what is missing."""
    done = f"{comparison.done} of {comparison.total} are done and kept in {request.out}; the same"
    done += " command goes on from there."
    if lost is not None:
        if request.model is not None:
            done += f" The server's log is {request.out / _LOG}."
        console.print(f"kvcompress: error: {str(lost).removesuffix('.')}. {done}")
        return 2
    if interrupted:
        console.print(f"kvcompress: interrupted; {done}")
        return _INTERRUPTED
    return 0 if report.recommendation.cell is not None else 1


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _server(request: Request, cells: Sequence[Cell], console: Console) -> Iterator[str]:
    """The URL of the server to ask: the one that was named, or one that ends with this."""
    if request.url is not None:
        yield request.url
        return
    assert request.model is not None
    log = request.out / _LOG
    console.print(f"Starting vllm serve {request.model}; its log is {log} ...")
    with server.start(request.model, request.arguments, cells, log) as url:
        yield url


def _built_in(
    request: Request, names: Sequence[str], client: Client, notes: list[str]
) -> list[Item]:
    def count_tokens(text: str, /) -> int:
        return client.count_tokens(text)

    def guess(text: str, /) -> int:
        return len(text) // _LETTERS_PER_TOKEN

    counting = count_tokens
    try:
        client.count_tokens("one two three")
    except Refused:
        counting = guess
        notes.append(
            "The server has no /tokenize: prompts are as long as --length at"
            f" {_LETTERS_PER_TOKEN} letters a token, which is a guess."
        )
    return build_items(
        names,
        count=request.count,
        tokens=request.length,
        seed=request.seed,
        question=request.question,
        count_tokens=counting,
        # What several questions about one text lose together counts once in the recommendation.
        questions_per_text=1,
    )


def _settings(request: Request, names: Sequence[str], model: str) -> dict[str, Any]:
    """What must be the same for figures to be put together."""
    settings: dict[str, Any] = {"model": model, "concurrency": request.concurrency}
    settings["kl"] = request.kl
    if names:
        settings["tasks"] = list(names)
        settings |= {"length": request.length, "count": request.count, "seed": request.seed}
        settings["question"] = request.question
    return settings


def _ask(comparison: Comparison, concurrency: int, console: Console) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    done, total = comparison.done, comparison.total
    if done:
        console.print(f"{done} of {total} are there already.")
    with ExitStack() as stack:
        log = not console.is_terminal
        progress = stack.enter_context(
            Progress(*columns, console=console, transient=True, disable=log)
        )
        task = progress.add_task("asking", total=total, completed=done)
        asked = stack.enter_context(closing(comparison.ask(concurrency)))
        for count, cell in enumerate(asked, done + 1):
            progress.update(task, completed=count, description=str(cell))
            # A log takes no bar, and a run without a word looks as if it hung.
            if log and count * 10 // total > (count - 1) * 10 // total:
                console.print(f"{count} of {total} are asked.")


def _write(report: Report, folder: Path, console: Console) -> None:
    (folder / "report.json").write_text(json.dumps(report.to_json(), indent=2) + "\n")
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    try:
        save_picture(report, folder / "report.png")
    except ImportError:
        console.print("kvcompress: no picture: it needs matplotlib; run pip install matplotlib")
    except OSError as e:
        console.print(f"kvcompress: no picture: {e}")


def _show(report: Report, folder: Path) -> None:
    # A server's reason may have brackets, which are no markup.
    console = Console(highlight=False, markup=False)
    console.print(report.title, style="bold")
    for columns in TABLES.values():
        console.print(_table(columns, report))
    if any(summary.obeyed for summary in report.summaries):
        console.print(_table(obeyed_columns(report.summaries, by_rule=False), report))
    if any(summary.roles for summary in report.summaries):
        console.print(_table(role_columns(report.summaries, counts=False), report))
    # In a log a sentence is a line.
    wide = not console.is_terminal
    for note in report.notes:
        console.print(note, soft_wrap=wide)
    style = "bold green" if report.recommendation.cell is not None else "bold red"
    console.print(report.recommendation.sentence, style=style, soft_wrap=wide)
    console.print(f"What each figure means is in {folder / 'report.md'}.", soft_wrap=wide)


def _table(columns: Sequence[Column], report: Report) -> Table:
    table = Table(box=box.HORIZONTALS, header_style="bold", collapse_padding=True, pad_edge=False)
    # Intervals are in the report: a terminal has no room for them.
    rows = [[column.cell(s).partition(" [")[0] for column in columns] for s in report.summaries]
    names, *figures = columns
    for row in rows:
        # What is protected may be said in several lines.
        row[0] = row[0].replace(",", ", ")
    # A name must not be broken anywhere: cake-chunk is not cake.
    table.add_column(
        names.name, min_width=max(len(word) for row in rows for word in row[0].split())
    )
    for number, column in enumerate(figures, 1):
        # Headings may take two lines, and a figure must not.
        parts = [*column.name.split(), *(row[number] for row in rows)]
        table.add_column(column.name, justify="right", width=max(map(len, parts)))
    beside = False
    for summary, row in zip(report.summaries, rows, strict=True):
        if summary.baseline and not beside:
            table.add_section()
            beside = True
        table.add_row(*row, style="dim" if summary.baseline else None)
    return table


def _whole_numbers(text: str) -> list[int]:
    parts = _parts("--lookaheads", text)
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(
            "--lookaheads must be whole numbers of an answer's tokens, 0 or more, with commas"
            f" between them; got {text!r}"
        )
    return list(dict.fromkeys(map(int, parts)))


def _parts(flag: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"{flag} must name at least one, with commas between them; got {text!r}")
    return list(dict.fromkeys(parts))
