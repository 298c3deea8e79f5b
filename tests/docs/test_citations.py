"""References between code and docs resolve.

Comments cite sections of docs/methods.md by number, test names have the numbers of docs/traps.md,
and the docs name methods, files and tests. These tests fail if one of them was renamed.
"""

import ast
import fnmatch
import os
import re
import runpy
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from vllm_kvcompress.methods.registry import ALLOCATORS, PRESETS, SCORERS, SELECTORS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
METHODS, TRAPS = DOCS / "methods.md", DOCS / "traps.md"
OTHER_PAGES = ("README.md", "CONTRIBUTING.md", "deploy/README.md", "docker/README.md")
PAGES = [*sorted(DOCS.glob("*.md")), *(ROOT / name for name in OTHER_PAGES)]
CODE = ("vllm_kvcompress", "kernels", "tests", "benchmarks")
TABLES = {"Allocator": ALLOCATORS, "Scorer": SCORERS, "Selector": SELECTORS}

NUMBER = r"\d+(?:\.\d+)?"
CITED = re.compile(rf"docs/methods\.md,? ({NUMBER}(?:(?:, | and | to ){NUMBER})*)")
# Citations of documents outside this repository.
OUTSIDE_CITATION = re.compile(
    r"\b(METHODS|ENGINE|TRAPS) (section )?\d|\bREC rows|\b[A-Z]{4,}\.md \d"
)
LINE_BREAK = re.compile(r"\s+#?\s*")  # a citation in a comment can span two lines


def parsed(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(path.read_text())


def inline(path: Path) -> Iterator[Token]:
    return (child for token in parsed(path) for child in token.children or ())


@cache
def headings(path: Path) -> list[str]:
    tokens = parsed(path)
    return [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]


def anchor(heading: str) -> str:
    """Return the anchor that both GitHub and Python-Markdown generate for a heading."""
    return re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-")


def sections(path: Path, level: str) -> dict[str, str]:
    """Return the text below each heading of a level by title, up to the next such heading.

    Args:
        level: regular expression for the number signs of the heading.
    """
    parts = re.split(rf"^({level} .+)$", path.read_text(), flags=re.MULTILINE)
    return {title.lstrip("# "): body for title, body in zip(parts[1::2], parts[2::2], strict=True)}


@cache
def files() -> frozenset[str]:
    """Return all files and folders of the repository as paths relative to its root."""
    found = set()
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [x for x in subfolders if not x.startswith(".") and x != "__pycache__"]
        relative = Path(folder).relative_to(ROOT)
        found.update((relative / name).as_posix() for name in [*subfolders, *names])
    return frozenset(found)


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def texts() -> Iterator[tuple[str, str]]:
    this_file = Path(__file__).relative_to(ROOT).as_posix()
    for name in sorted(files()):
        if name.startswith(CODE) and name.endswith((".py", ".md", ".sh")) and name != this_file:
            yield name, (ROOT / name).read_text()


# -- sections of methods.md -----------------------------------------------------------------------


def numbered() -> dict[str, str]:
    """Return the sections of methods.md by number."""
    return {title.split()[0]: body for title, body in sections(METHODS, "#{2,3}").items()}


def test_every_cited_section_exists():
    cited = [
        (name, number)
        for name, text in texts()
        for match in CITED.finditer(LINE_BREAK.sub(" ", text))
        for number in re.findall(NUMBER, match[1])
    ]
    assert len(cited) > 20
    assert not [citation for citation in cited if citation[1] not in numbered()]


def test_citations_stay_in_the_repository():
    assert not [
        (name, match[0])
        for name, text in texts()
        for match in OUTSIDE_CITATION.finditer(LINE_BREAK.sub(" ", text))
    ]


def test_sections_are_numbered_in_order():
    numbers = [tuple(map(int, number.split("."))) for number in numbered()]
    assert numbers == sorted(set(numbers))


def linked_part(cell: str) -> tuple[str, str]:
    """Return name and anchor of the link at the start of a cell such as ``[`cake`](#23-cake)``."""
    name, target = re.match(r"\[`(\w+)`\]\(#([\w-]+)\)", cell).groups()
    return name, target


def test_the_table_of_presets_matches_the_code():
    body = sections(METHODS, "##")["0 At a glance"]
    rows = {cells[1].strip(" `"): cells[2:] for cells in (x.split(" | ") for x in rows_of(body))}
    assert list(rows) == list(PRESETS)
    section_of_anchor = {anchor(heading): heading.split()[0] for heading in headings(METHODS)}
    for name, (allocator, scorer, window, kept, *_) in rows.items():
        preset = PRESETS[name]
        others = [cell for cell in linked_cells(kept) if linked_part(cell)[0] in SELECTORS]
        (selector,) = others or ["[`topk`](#16-ranking-and-ties)"]
        for role, cell in (("Allocator", allocator), ("Scorer", scorer), ("Selector", selector)):
            linked, target = linked_part(cell)
            assert linked == getattr(preset, role.lower()), (name, role)
            described = described_parts(section_of_anchor[target], role)
            assert f"{role} `{linked}`." in described, (name, role)
        assert window_and_lookahead(window) == (preset.window, preset.lookahead), name
        assert ("with merging" in kept) == bool(preset.merge), name


def linked_cells(text: str) -> list[str]:
    """Return the links in a cell whose text is a name."""
    return re.findall(r"\[`\w+`\]\(#[\w-]+\)", text)


def window_and_lookahead(cell: str) -> tuple[int, int]:
    """Return window and look-ahead of a cell such as ``16, after its [look-ahead](#...) 32``."""
    window, lookahead = re.fullmatch(
        r"(\d+)(?:, after its \[look-ahead\]\(#\S+\) (\d+))?", cell
    ).groups()
    return int(window), int(lookahead or 0)


def rows_of(body: str) -> list[str]:
    """Return the body lines of the first table, with a leading space for `split`."""
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [f" {line}" for line in lines[2:]]


def described_parts(number: str, role: str) -> str:
    """Return the parts of a role that a section describes, such as ``Allocator `cake`.``."""
    found = re.findall(rf"{role} `(\w+)`", numbered()[number])
    return " ".join(f"{role} `{name}`." for name in found)


@pytest.mark.parametrize("role", TABLES)
def test_every_part_of_a_method_has_one_section(role):
    found = re.findall(rf"\b{role} `(\w+)`", "\n".join(numbered().values()))
    assert sorted(found) == sorted(TABLES[role])


# -- traps ----------------------------------------------------------------------------------------


def numbers_of(test: str) -> set[int]:
    """Return the trap numbers in a test name: 4 and 5 for ``test_trap_04_trap_05_what``."""
    return {int(number) for number in re.findall(r"(?<=_trap_)\d\d(?=_)", test)}


def traps() -> dict[int, str]:
    found = sections(TRAPS, "##")
    return {int(re.match(r"Trap (\d+): ", title)[1]): body for title, body in found.items()}


def named_tests(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`([\w/]+\.py)::(\w+)`", text)


def test_traps_are_numbered_without_gaps_and_have_all_parts():
    assert list(traps()) == [*range(1, len(traps()) + 1)]
    for body in traps().values():
        assert body.index("**Broke.**") < body.index("**Here.**") < body.index("**Shown by**")


def test_every_trap_names_a_test_with_its_number():
    for number, body in traps().items():
        numbers_by_test = [numbers_of(test) for _, test in named_tests(body)]
        assert any(number in numbers for numbers in numbers_by_test), number


def test_every_test_with_a_number_is_named_by_its_trap():
    numbered_tests = [
        (name, test)
        for name in files()
        if name.startswith("tests/") and name.endswith(".py")
        for test in functions(name)
        if numbers_of(test)
    ]
    assert len(numbered_tests) > 20
    for name, test in numbered_tests:
        for number in numbers_of(test):
            assert (name, test) in named_tests(traps()[number]), f"trap {number}: {name}::{test}"


# -- links, files and tests -----------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_anchors_resolve(page):
    targets = [
        str(token.attrs.get("href") or token.attrs.get("src"))
        for token in inline(page)
        if token.type in ("link_open", "image")
    ]
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if fragment and file.suffix == ".md":
            assert fragment in map(anchor, headings(file)), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_files_and_tests_exist(page):
    named = [path_in(token.content) for token in inline(page) if token.type == "code_inline"]
    assert not [path for path in named if path is not None and not exists_in_repository(path)]
    for path, test in named_tests(page.read_text()):
        assert test in functions(path), f"{path}::{test}"


def path_in(text: str) -> str | None:
    """Return the path in a code span, alone or before ``::``, or None."""
    path = text.partition("::")[0].rstrip("/")
    if not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*", path) or path.startswith("."):
        return None
    is_source = path.endswith((".py", ".sh", ".svg", ".lock"))
    is_known = path.split("/")[0] in files() or path.endswith((".md", ".json"))
    return path if is_source or ("/" in path and is_known) else None


def exists_in_repository(path: str) -> bool:
    """Return True if a file has this path or ends with it, such as `site/names.yaml`."""
    return any(fnmatch.fnmatch(f"/{file}", f"*/{path}") for file in files())


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("tests/engine/test_traps.py::test_x", "tests/engine/test_traps.py"),
        ("requirements/*.lock", "requirements/*.lock"),
        ("policies/", None),
        ("docs/", None),
        ("deploy/overlays", "deploy/overlays"),
        ("pipeline.py", "pipeline.py"),
        ("/metrics", None),
        ("python benchmarks/bench_engine.py", None),
        (".cache/compat", None),
        ("config.json", None),
    ],
)
def test_code_spans_with_paths_are_recognised(text, path):
    assert path_in(text) == path


def test_a_missing_path_is_detected():
    assert exists_in_repository("engine/startup/vllm_hooks.py")
    assert not exists_in_repository("engine/startup/seam_table.py")
    assert not exists_in_repository("eams.py")


def test_the_architecture_page_names_every_package_and_every_op():
    text = (DOCS / "architecture.md").read_text()
    for file in (ROOT / "vllm_kvcompress").glob("[!_]*.py"):
        assert f"`vllm_kvcompress/{file.name}`" in text, file.name
    for parent in ("vllm_kvcompress/engine", "kernels/kvcompress_kernels"):
        packages = [path.parent for path in (ROOT / parent).glob("*/__init__.py")]
        assert len(packages) > 5
        for package in packages:
            assert f"`{package.relative_to(ROOT).as_posix()}/`" in text, package.name


def test_the_committed_figure_matches_its_script():
    script = runpy.run_path(str(DOCS / "figures" / "request_life.py"))
    assert (DOCS / "request_life.svg").read_text() == script["draw"]()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_use_a_form_that_mkdocs_checks(page):
    """mkdocs does not check links in HTML, and prints reference links without a definition."""
    for token in inline(page):
        wrong = {"html_inline": r"<(a|img)\b", "text": r"\]\[\w"}.get(token.type)
        assert wrong is None or not re.search(wrong, token.content), token.content
