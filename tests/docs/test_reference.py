"""Files that `make reference` writes from the declared settings are up to date."""

import dataclasses
import runpy
from pathlib import Path

import pytest

from vllm_kvcompress.settings.config import KEYS

ROOT = Path(__file__).parents[2]
REFERENCE = runpy.run_path(str(ROOT / "packaging" / "reference.py"))
GENERATED = dict(REFERENCE["generated"]())


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_a_generated_file_is_up_to_date(path):
    assert path.read_text() == GENERATED[path], "run make reference"


def test_every_setting_has_a_help_text():
    for setting in KEYS.values():
        assert setting.help.endswith("."), setting.key
        assert not (setting.per_engine and setting.per_method), setting.key


def test_a_changed_declaration_changes_each_file():
    changed = dataclasses.replace(KEYS["budget"], help="Another text.", deployed="0.7")
    assert "Another text." in REFERENCE["_flag_row"](changed)
    assert '"Another text."' in REFERENCE["_entry"](changed)
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
