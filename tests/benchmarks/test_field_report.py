"""The systems at equal bytes are what the product recommends, and their report adds up."""

import json

import pytest

from benchmarks.evidence import report
from benchmarks.evidence.cells import AFTER_LOOKAHEAD, REASONS, RULER, cells
from benchmarks.evidence.compressed_cache import settings_at
from benchmarks.evidence.systems import BYTES, FP8_EVICTING, K4V3, SIXTEEN_BITS, systems
from vllm_kvcompress.methods.registry import RECOMMENDED


@pytest.mark.parametrize("lookahead", [True, False])
def test_evicting_systems_are_the_recommended_preset(lookahead):
    found = systems(lookahead=lookahead)
    for name, packed_dtype in ((SIXTEEN_BITS, "auto"), (FP8_EVICTING, "auto"), (K4V3, "k4v3")):
        settings = settings_at(found[name], 0.5)
        assert (settings.compress, settings.resolved_packed_dtype) == (RECOMMENDED, packed_dtype)
        assert settings.resolved_lookahead == (32 if lookahead else 0)
        assert set(json.loads(found[name])["bytes"]) <= set(BYTES)


def line(task, method, budget=0.2, **changes):
    made = {
        "model": "m", "question": "last", "tokens": 100, "seed": 0, "dtype": "float32",
        "machine": "x", "commit": "c", "task": task, "item": f"{task}/0", "group": None,
        "method": method, "budget": budget, "score": 0.5, "full": 1.0, "same": False, "kl": 0.2,
        "kept": 0.3, "bytes": 0.19,
    }  # fmt: skip
    return made | changes


def reasons(number, **changes):
    made = {
        "item": f"squad_reasons/{number}", "full": 0.0, "score": 0.0, "answer_f1": 0.5,
        "answer_same": False, "kl_at": [0.5] * 31 + [0.1] * 4, "agreed_at": "0" * 31 + "1110",
        "full_length": 36, "full_loops": False, "similarity": 1.0, "length": 36, "loops": False,
    }  # fmt: skip
    return line("squad_reasons", SIXTEEN_BITS, **{**made, **changes})


RESULTS = [
    line("niah_single_1", "full", 1.0, score=1.0),
    line("niah_single_1", SIXTEEN_BITS),
    line("vt", "full", 1.0, score=0.2),
    line("vt", SIXTEEN_BITS, score=0.2, full=0.2),
    line("qa_1", "full", 1.0, score=0.0),
    line("niah_single_1", "fp8", 1.0, score=1.0, bytes=0.5),
    line("squad_reasons", "full", 1.0, score=0.0),
    reasons(0),
    reasons(1, answer_f1=1.0, answer_same=True),
    reasons(2, packed=False, bytes=1.0, kl_at=[], agreed_at="", answer_f1=1.0, answer_same=True),
]


def test_tasks_of_a_family_are_one_cell():
    found = {(cell.task, cell.method): cell for cell in cells(RESULTS)}
    assert found[RULER, SIXTEEN_BITS].score.mean == pytest.approx(0.7 / 1.2)
    cell = found[REASONS, SIXTEEN_BITS]
    assert cell.answer_f1.mean == pytest.approx(2.5 / 3)
    assert cell.answer_same.mean == pytest.approx(2 / 3)
    assert cell.bytes == 0.19  # of the compressed prompts
    assert cell.along[AFTER_LOOKAHEAD].kl.mean == pytest.approx(0.1)
    assert not any(task == "all tasks" for task, _ in found)


def test_the_report_compares_systems_by_family_by_bytes_and_by_task(tmp_path):
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, RESULTS)))
    report.main([str(tmp_path / "r.jsonl"), "--out", str(tmp_path / "field")])
    text = (tmp_path / "field.md").read_text()
    assert "| m: RULER | 100% |  | 58% |" in text
    assert "| m: reasons, F1 |  |  | 83% |" in text
    assert "| m: reasons, KL |  |  | 0.100 |" in text
    assert (
        "gets right, at least in part: `niah_single_1` 1 of 1, `vt` 1 of 1, `qa_1` 0 of 1." in text
    )
    tables = {}
    for part in text.split(", by bytes:\n\n")[:-1]:
        name = part.rsplit("\n", 1)[-1].partition(", ")[0]
        tables[name] = text.split(f"{part}, by bytes:\n\n", 1)[1].partition("\n\n")[0]
    assert "| `fp8` | 1 | 0.500 | 100.0% (100.0% to 100.0%) |" in tables[RULER]
    assert f"| `{SIXTEEN_BITS}` | 0.2 | 0.190 | 58.3% (" in tables[RULER]
    assert f"| `{SIXTEEN_BITS}` | 0.2 | 0.190 | 100.0% (" in tables["vt"]
    assert "| method | budget | bytes | KL | equal tokens | F1 | same |" in tables[REASONS]
    assert "| 0.100 (0.100 to 0.100) | 75.0% (75.0% to 75.0%) | 83% (" in tables[REASONS]
