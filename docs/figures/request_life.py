"""Draw docs/request_life.svg: the life of a compressed request in scheduler, worker and page pool.

The script writes plain SVG text, so its output is the same everywhere:

    python docs/figures/request_life.py
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

OUT = Path(__file__).parents[1] / "request_life.svg"

WIDTH, HEIGHT = 1260, 758
GUTTER, COLUMN, GAP = 124, 272, 8
INK, QUIET, RULE, LANE = "#1f2933", "#616e7c", "#cbd2d9", "#f5f7fa"
ACCENT, OTHERS, FREE = "#0b4f8a", "#d3d9e0", "#ffffff"
LIGHT = ("#c3daf0", "#bfe5dc", "#fbe0b4", "#e9c8dc")  # by the layer that reads the page
STRONG = ("#2f78bd", "#219583", "#dd8f1d", "#ad4a83")
FONT = "-apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', Arial, sans-serif"

LAYERS, BLOCKS, FULL, TAIL = 4, 10, 5, 6  # blocks are numbered from 1
KEPT = (3, 2, 2, 1)  # pages that each layer keeps: 8 in all
DESTINATION = (8, 9)  # K = 2 blocks
CELL_W, CELL_H = 24, 26

SCHEDULER_Y, MESSAGES_Y, WORKER_Y, POOL_Y = 84, 204, 264, 402
LANE_H, POOL_H = 114, 254


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A column of the figure: an event and the contents of the pool."""

    title: str
    subtitle: str
    scheduler: tuple[str, ...]
    down: str = ""
    up: str = ""
    worker: tuple[str, ...]
    pool: tuple[str, ...]


MOMENTS = (
    Moment(
        title="The prompt is computed",
        subtitle="chunk by chunk",
        scheduler=(
            "Decides once whether the prompt is",
            "compressed, and if not, why.",
            "Allocates blocks as vLLM does.",
        ),
        down="plan: observe",
        worker=(
            "Attention reads the full cache.",
            "Each layer keeps its last w queries,",
            "or adds up its column sums.",
        ),
        pool=("The prompt's blocks fill up,", "one page in each layer at a time."),
    ),
    Moment(
        title="The prefill ends",
        subtitle="one step: plan, score, pack",
        scheduler=(
            "Computes from lengths how many pages",
            "are kept in K blocks. Takes K blocks,",
            "sends the plan, and frees the",
            "prompt's full blocks at once.",
        ),
        down="plan: compress",
        up="report: done",
        worker=(
            "Attention reads the full cache, also for",
            "the first output token. Then it scores",
            "all layers, divides the pages, selects",
            "tokens and moves them.",
        ),
        pool=("8 pages, packed into K = 2 blocks.", "The tail stays where it is."),
    ),
    Moment(
        title="It decodes",
        subtitle="many steps",
        scheduler=(
            "Gives freed blocks to other requests.",
            "Compares each report with its plan.",
            "A missing report stops the engine.",
        ),
        up="report: tokens kept per layer",
        worker=(
            "Each layer has its own block table:",
            "its packed pages, then the tail.",
            "New tokens go where vLLM puts them.",
        ),
        pool=("The request holds 4 blocks, not 7.", "Block 2 is reused, for output tokens."),
    ),
    Moment(
        title="It ends",
        subtitle="finished, aborted or preempted",
        scheduler=("Frees the destination blocks,", "the tail and the output's blocks."),
        down="requests that ended",
        worker=("Drops the request's page tables.",),
        pool=("The request holds no block.",),
    ),
)


def main() -> None:
    OUT.write_text(draw(), encoding="utf-8")


def draw() -> str:
    """Return the figure as SVG."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-labelledby="title description" font-family="{FONT}">'
    )
    about = (
        "Four moments from left to right: the prompt is computed, its prefill ends, it decodes, it"
        " ends. Rows: what the scheduler does, what travels, what the worker does, and what the"
        " page pool holds."
    )
    marker = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7"'
        f' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{ACCENT}"/></marker></defs>'
    )
    lines = [
        head,
        '<title id="title">One compressed request\'s life</title>',
        f'<desc id="description">{about}</desc>',
        marker,
        _box(0.5, 0.5, WIDTH - 1, HEIGHT - 1, "#ffffff", stroke=RULE, round_=12),
        *_lanes(),
    ]
    for number, moment in enumerate(MOMENTS):
        lines += _column(number, moment)
    lines += [*_legend(), "</svg>", ""]
    return "\n".join(lines)


def _left(number: int) -> int:
    return GUTTER + number * (COLUMN + GAP)


def _lanes() -> Iterator[str]:
    width = WIDTH - GUTTER - 16
    for y, height, name in (
        (SCHEDULER_Y, LANE_H, "Scheduler"),
        (WORKER_Y, LANE_H, "Worker"),
        (POOL_Y, POOL_H, "Page pool"),
    ):
        yield _box(GUTTER, y, width, height, LANE, round_=8)
        yield _text(20, y + 30, name, size=14, weight=600)
    yield _text(20, (MESSAGES_Y + WORKER_Y) / 2 + 2, "what travels", size=12, colour=QUIET)
    yield _text(20, POOL_Y + 54, "a row: where", size=12, colour=QUIET)
    yield _text(20, POOL_Y + 70, "a page lies", size=12, colour=QUIET)
    yield _text(20, POOL_Y + 98, "a colour: which", size=12, colour=QUIET)
    yield _text(20, POOL_Y + 114, "layer reads it", size=12, colour=QUIET)


def _column(number: int, moment: Moment) -> Iterator[str]:
    left = _left(number)
    yield from _title(number, moment)
    yield from _lines(left + 16, SCHEDULER_Y + 30, moment.scheduler)
    yield from _lines(left + 16, WORKER_Y + 30, moment.worker)
    top, bottom = MESSAGES_Y - 2, WORKER_Y - 4
    middle = (top + bottom) / 2 + 4
    down, up = left + 28, left + (156 if moment.down else 28)
    if moment.down:
        yield _arrow(down, top, bottom)
        yield _text(down + 12, middle, moment.down, size=12, colour=ACCENT, weight=600)
    if moment.up:
        yield _arrow(up, bottom, top)
        yield _text(up + 12, middle, moment.up, size=12, colour=ACCENT, weight=600)
    yield from _pool(number, left + 17, POOL_Y + 40)
    yield from _lines(left + 16, POOL_Y + POOL_H - 40, moment.pool, colour=QUIET)


def _title(number: int, moment: Moment) -> Iterator[str]:
    left, top, height, tip = _left(number), 16, 52, 12
    right = left + COLUMN
    notch = f"L{left + tip} {top + height / 2:g}" if number else ""
    fill, ink, under = (ACCENT, "#ffffff", "#d6e6f5") if number == 1 else ("#e4e9ef", INK, QUIET)
    edge, middle, bottom = right - 4, f"{top + height / 2:g}", top + height
    outline = f"M{left} {top}H{edge}L{edge + tip} {middle}L{edge} {bottom}H{left}{notch}z"
    yield f'<path d="{outline}" fill="{fill}"/>'
    yield _text(left + 24, top + 23, moment.title, size=15, weight=700, colour=ink)
    yield _text(left + 24, top + 41, moment.subtitle, size=12, colour=under)


def _pool(number: int, left: float, top: float) -> Iterator[str]:
    """Draw the pool: rows are the layers that store a page, columns are vLLM's blocks."""
    for block in range(1, BLOCKS + 1):
        x = left + (block - 1) * CELL_W
        yield _text(x + CELL_W / 2 - 1, top - 8, str(block), size=11, colour=QUIET, middle=True)
        for layer in range(LAYERS):
            y = top + layer * CELL_H
            fill, share = _page(number, layer, block)
            yield _box(x, y, CELL_W - 2, CELL_H - 2, FREE, stroke=RULE)
            if share:
                yield _box(x, y, (CELL_W - 2) * share, CELL_H - 2, fill)
    if number == 1:
        below = top + LAYERS * CELL_H + 6
        end = left + (DESTINATION[0] - 1) * CELL_W + CELL_W - 1
        start = left + FULL * CELL_W / 2
        low = below + 26
        curve = f"M{start:g} {below}C{start:g} {low} {end:g} {low} {end:g} {below + 2}"
        yield (
            f'<path d="{curve}" fill="none" stroke="{ACCENT}" stroke-width="1.8"'
            ' marker-end="url(#tip)"/>'
        )


def _page(number: int, layer: int, block: int) -> tuple[str, float]:
    """Return the colour of a page at a moment and its filled share."""
    if number == 0:
        return LIGHT[layer], 1.0 if block <= FULL - 1 else 0.0
    if number == 1 and block <= FULL:
        return LIGHT[layer], 1.0
    if number in (1, 2) and block in DESTINATION:
        reader = _reader(layer, block)
        return (STRONG[reader], 1.0) if reader is not None else ("", 0.0)
    if number in (1, 2) and block == TAIL:
        return LIGHT[layer], 0.55 if number == 1 else 1.0
    if number == 2 and block == 2:
        return LIGHT[layer], 0.4
    if number >= 2 and block in (1, 3, 4):
        return OTHERS, 1.0
    return "", 0.0


def _reader(layer: int, block: int) -> int | None:
    """Return the layer that reads a destination page; pages are assigned block by block."""
    index = DESTINATION.index(block) * LAYERS + layer
    owners = [reader for reader, pages in enumerate(KEPT) for _ in range(pages)]
    return owners[index] if index < len(owners) else None


def _legend() -> Iterator[str]:
    x, y = GUTTER + 4.0, POOL_Y + POOL_H + 28
    yield _text(20, y + 10, "Pages", size=14, weight=600)
    for layer in range(LAYERS):
        yield _box(x, y, 14, 14, LIGHT[layer])
        yield _box(x + 16, y, 14, 14, STRONG[layer])
        yield _text(x + 36, y + 12, f"read by layer {layer}", size=12.5)
        x += 150
    yield _box(x, y, 14, 14, OTHERS)
    yield _text(x + 22, y + 12, "another request's", size=12.5)
    yield _box(x + 158, y, 14, 14, FREE, stroke=RULE)
    yield _text(x + 180, y + 12, "free", size=12.5)
    note = (
        "Light: as prefill or decode wrote it. Strong: packed. Any layer can read any page,"
        " so 2 blocks hold 3, 2, 2 and 1 pages for the four layers."
    )
    yield _text(GUTTER + 4, y + 40, note, size=12.5, colour=QUIET)


def _lines(x: float, y: float, lines: tuple[str, ...], colour: str = INK) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield _text(x, y + number * 21, line, size=13, colour=colour)


def _arrow(x: float, start: float, end: float) -> str:
    return (
        f'<line x1="{x:g}" y1="{start:g}" x2="{x:g}" y2="{end:g}" stroke="{ACCENT}"'
        ' stroke-width="1.8" marker-end="url(#tip)"/>'
    )


def _box(
    x: float, y: float, w: float, h: float, fill: str, *, stroke: str = "none", round_: int = 2
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{round_}" fill="{fill}"'
        f' stroke="{stroke}"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float,
    colour: str = INK,
    weight: int = 400,
    middle: bool = False,
) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}"'
        f' font-weight="{weight}"{anchor}>{escape(text)}</text>'
    )


if __name__ == "__main__":
    main()
