"""All commands on the documentation's pages exist, and their parsers accept the arguments."""

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import typer.main
from typer._click.exceptions import BadOptionUsage, MissingParameter

from vllm_kvcompress.cli import app
from vllm_kvcompress.settings.config import CompressionConfig

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "deploy", "docker", "benchmarks/results")
PAGES = sorted(
    str(page.relative_to(ROOT))
    for folder in FOLDERS
    for page in (ROOT / folder).glob("*.md")
    if page.name != "CHANGELOG.md"  # it names commands of earlier versions
)
PROGRAMS = ("vllm", "kvcompress", "make", "python", "kubectl", "docker")
# bash expands a page's variables, quotes and comments. These functions stand for the programs, and
# without a PATH nothing else runs.
SHELL = r"""
PATH=
show() { printf '%s\0' "$@"; printf '\n\0'; }
vllm() { show vllm "$@"; }
kvcompress() { show kvcompress "$@"; }
make() { show make "$@"; }
python() { show python "$@"; }
kubectl() { while [ $# -gt 1 ]; do if [ "$1" = -- ]; then shift; "$@"; return; fi; shift; done; }
docker() { [ "$1" = run ] && while [ $# -gt 0 ]; do case "$1" in vllm-kvcompress:*) shift
  if [ $# -gt 1 ]; then show vllm serve "$@"; fi; return;; esac; shift; done; }
"""
PARSE_ONLY = """
import argparse, os, runpy, sys
class Parsed(BaseException): pass
for name in ("parse_args", "parse_known_args"):
    def parsing(self, *args, _parse=getattr(argparse.ArgumentParser, name), **kwargs):
        parsed = _parse(self, *args, **kwargs)
        if sys._getframe(1).f_code.co_filename != argparse.__file__:
            raise Parsed
        return parsed
    setattr(argparse.ArgumentParser, name, parsing)
environment = dict(os.environ)
for line in sys.stdin.read().split("\\n\\0"):
    words = line.split("\\0")[:-1]
    if not words:
        continue
    is_module = words[0] == "-m"
    name = words[1] if is_module else words[0]
    sys.argv = [name, *(words[2:] if is_module else words[1:])]
    sys.path[0] = "" if is_module else os.path.dirname(name)
    os.environ.clear()
    os.environ.update(environment)
    try:
        (runpy.run_module if is_module else runpy.run_path)(name, run_name="__main__")
    except Parsed:
        continue
    except SystemExit as e:
        print(words, "exit", e)
    else:
        print(words, "parse no arguments")
"""
PLACEHOLDERS = {"TOKENS": "1", "...": None, "FILES": "FILE"}


@cache
def commands(page: str) -> tuple[tuple[str, ...], ...]:
    """Return the programs and arguments of all commands on a page."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"(?:^(?: {4,}\S.*)?\n)+", text, re.MULTILINE)
    blocks += re.findall(r"^ *```(?:sh|bash|console)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    starts = re.compile(rf"^(?:\w+=\S+ )*(?:{'|'.join(PROGRAMS)}) ")
    for span in re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)):
        if starts.match(span):
            blocks.append(re.sub(r"\s+", " ", span))
    found: list[tuple[str, ...]] = []
    for block in blocks:
        prompts_removed = re.sub(r"^(\s*)\$ ", r"\1", block, flags=re.MULTILINE)
        shell = ["/bin/bash", "-c", SHELL + prompts_removed]
        with tempfile.TemporaryDirectory() as folder:  # for what a redirection writes
            done = subprocess.run(shell, capture_output=True, text=True, cwd=folder, check=False)
        for line in done.stdout.split("\n\0"):
            words = [PLACEHOLDERS.get(word, word) for word in line.split("\0")[:-1]]
            if len(words) > 1:
                found.append(tuple(word for word in words if word is not None))
    return tuple(dict.fromkeys(found))


def of(program: str, page: str | None = None) -> list[tuple[str, ...]]:
    """Return the arguments of all commands of a program, on one page or on all pages."""
    pages = PAGES if page is None else [page]
    found = [command for page in pages for command in commands(page)]
    return [tuple(words) for name, *words in dict.fromkeys(found) if name == program]


def test_the_pages_have_commands_of_each_kind():
    counts = {program: len(of(program)) for program in ("vllm", "kvcompress", "make", "python")}
    assert min(counts.values()) >= 10, counts
    assert ("plan", "Llama-3.1-8B-Instruct") in {words[:2] for words in of("kvcompress")}


def test_all_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"\$\((?:addprefix [^,]*,\$\(|if \$\()?([A-Z]+)\b", makefile))
    for target, *assignments in of("make"):
        assert target in targets
        assert {word.partition("=")[0] for word in assignments} <= variables


def test_kvcompress_accepts_its_commands():
    click = typer.main.get_command(app)
    for name, *arguments in of("kvcompress"):
        if name == "--version":
            continue
        command = click.commands[name]
        try:
            command.make_context(name, arguments)
        except (MissingParameter, BadOptionUsage):  # text such as `kvcompress plan --kv-lookahead`
            known = {option for parameter in command.params for option in parameter.opts}
            assert known >= {word for word in arguments if word.startswith("--")}


def test_vllm_serve_accepts_its_commands():
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    for words in of("vllm"):
        parsed = parser.parse_args(list(words))
        CompressionConfig.parse((parsed.additional_config or {}).get("kvcompress", {}))


def test_programs_of_this_repository_accept_their_commands():
    ours = [words for words in of("python") if "benchmarks" in " ".join(words[:2])]
    assert len(ours) > 10
    lines = "\n\0".join("".join(f"{word}\0" for word in words) for words in ours)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    options = dict(text=True, capture_output=True, cwd=ROOT, env=environment, check=False)
    done = subprocess.run([sys.executable, "-c", PARSE_ONLY], input=lines, **options)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]
