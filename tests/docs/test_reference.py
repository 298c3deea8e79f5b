"""Files that `make reference` writes from the declared settings are up to date."""

import argparse
import dataclasses
import re
import runpy
from pathlib import Path

import pytest

from vllm_kvcompress.engine.startup.cli_args import add_flags
from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.settings.config import KEYS, CompressionConfig
from vllm_kvcompress.settings.request_options import RequestOptions

ROOT = Path(__file__).parents[2]
REFERENCE = runpy.run_path(str(ROOT / "packaging" / "reference.py"))
GENERATED = dict(REFERENCE["generated"]())


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_a_generated_file_is_up_to_date(path):
    assert path.read_text() == GENERATED[path], "run make reference"


def first_words(title):
    """Return the first word of each row of docs/flags.md's table below a heading."""
    body = (ROOT / "docs" / "flags.md").read_text().partition(f"\n## {title}\n")[2]
    return re.findall(r"^\| `([^` ]+)", body.partition("\n## ")[0], re.MULTILINE)


def test_the_page_of_flags_has_every_flag_and_key():
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    flags = [action.option_strings[0] for action in parser._actions]
    assert first_words("Flags") == flags
    with_flag = {flag.removeprefix("--kv-").replace("-", "_") for flag in flags}
    assert set(first_words("Keys without a flag")) == KEYS.keys() - with_flag
    with pytest.raises(OverrideError) as refused:
        RequestOptions.parse(CompressionConfig.parse({"compress": "cake"}), {"kv_anything": 1})
    known = re.findall(r"'(kv_\w+)'", str(refused.value).partition("may set")[2])
    assert first_words("Keys of a request") == [*known, "kv_alias"]


def test_every_setting_has_a_help_text():
    for setting in KEYS.values():
        assert setting.help.endswith("."), setting.key
        assert not (setting.per_engine and setting.per_method), setting.key


def test_a_changed_declaration_changes_each_file():
    changed = dataclasses.replace(KEYS["budget"], help="Another text.", deployed="0.7")
    assert "Another text." in REFERENCE["_flag_row"](changed)
    assert 'help="Another text."' in REFERENCE["_option"]("Budget", changed)
    assert REFERENCE["_with_values"]("# why\nKV_BUDGET=0.2\n", [changed]) == (
        "# why\nKV_BUDGET=0.7\n"
    )
    manifest = "            - a\n            - --kv-budget=$(KV_BUDGET)\n          envFrom:\n"
    protect = KEYS["protect"]
    assert REFERENCE["_with_arguments"](manifest, [protect, KEYS["usage"]]) == (
        "            - a\n            - --kv-protect=$(KV_PROTECT)\n            - $(KV_USAGE)\n"
        "          envFrom:\n"
    )
    with pytest.raises(ValueError, match="KV_PROTECT"):
        REFERENCE["_with_values"]("KV_BUDGET=0.2\n", [changed, protect])
