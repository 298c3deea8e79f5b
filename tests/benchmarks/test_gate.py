"""The quality gate passes the recommended settings on a real model and fails worse methods."""

import json
from dataclasses import replace

import pytest

from benchmarks.evidence import gate
from benchmarks.evidence.cells import AFTER_LOOKAHEAD, POSITION_RANGES, cells
from benchmarks.evidence.reference_model import ReferenceModel
from vllm_kvcompress.methods.registry import RECOMMENDED_BUDGETS
from vllm_kvcompress.settings.config import CompressionConfig

SETTINGS = [*RECOMMENDED_BUDGETS, gate.SIXTEEN_BITS]


@pytest.fixture(scope="module")
def short(demo_model):
    return gate.measure_cells(ReferenceModel(demo_model), "demo", gate.SIZES["short"])


@pytest.fixture(scope="module")
def floors():
    return json.loads(gate.FLOORS.read_text())


def test_the_recommended_settings_stay_above_their_floors(short, floors):
    assert gate.check(short, floors["short"]) == []


@pytest.mark.parametrize("name", list(gate.GROUPS))
def test_a_worse_method_fails_the_gate(short, floors, name):
    group = gate.GROUPS[name]
    worse = dict.fromkeys([*SETTINGS, gate.BASELINE], short[name][gate.BASELINE])
    faults = gate.check({**short, name: worse}, floors["short"])
    assert all(fault.startswith(f"{name}: ") for fault in faults)
    rule = {"share": "must reach a share of at least", "kl": "nats per token from"}
    failed = [fault for fault in faults if rule[group.baseline_fails] in fault]
    assert len(failed) == len(SETTINGS)


def test_floors_that_a_worse_method_passes_fail_the_gate(short):
    low = {name: {"share": 0.0, "kl": 99.0} for name in SETTINGS}
    faults = gate.check(short, dict.fromkeys(gate.GROUPS, low))
    assert len(faults) == len(SETTINGS) * len(gate.GROUPS)
    assert 'would let {"compress": "random", "budget": 0.2} pass' in faults[0]


@pytest.mark.parametrize("lookahead", [True, False])
def test_the_gate_checks_the_settings_that_the_product_recommends(lookahead):
    found = {
        name: CompressionConfig.parse(json.loads(raw))
        for name, raw in gate.recommended_settings(lookahead=lookahead).items()
    }
    budgets = {name: config.budget for name, config in found.items()}
    assert budgets == {**RECOMMENDED_BUDGETS, gate.SIXTEEN_BITS: 0.2}
    for name, config in found.items():
        assert config.resolved_packed_dtype == ("auto" if name == gate.SIXTEEN_BITS else "k4v3")
        evicts = config.budget < 1
        expected = POSITION_RANGES[AFTER_LOOKAHEAD].start if lookahead and evicts else 0
        assert config.resolved_lookahead == expected


@pytest.mark.parametrize("size", list(gate.SIZES))
def test_each_gate_has_floors_for_all_its_settings(floors, size):
    assert floors[size].keys() == gate.GROUPS.keys()
    for group in floors[size].values():
        assert set(group) == set(SETTINGS)
        for floor in group.values():
            assert 0.2 < floor["share"] <= 1.0
            assert 0.0 < floor["kl"] < 3.0


def test_the_gate_compares_the_mean_with_the_floor(short, floors):
    cell, floor = short["ruler"]["safe"], floors["short"]["ruler"]["safe"]["share"]
    below = replace(cell, score=replace(cell.score, mean=floor - 0.01))
    swapped = {**short["ruler"], "safe": below}
    assert len(gate.check({**short, "ruler": swapped}, floors["short"])) == 1


def line(**changes):
    made = {
        "model": "m", "question": "last", "tokens": 100,
        "task": "a", "group": "a/0", "item": "a/0/0", "method": "x", "budget": 0.1,
        "score": 0.5, "full": 1.0, "same": False, "kl": 0.2, "kept": 0.1,
    }  # fmt: skip
    return made | changes


def test_cells_weight_prompts_by_the_full_caches_score():
    found = {
        cell.task: cell
        for cell in cells(
            [
                line(),
                line(item="a/0/1", score=0.25, full=0.25, kl=None, same=True),
                line(task="b", group="b/0", item="b/0/0", score=0.0, full=1.0, kl=0.4),
                line(method="full", budget=1.0),
            ]
        )
    }
    assert found["a"].score.mean == pytest.approx(0.75 / 1.25)
    assert found["a"].score.independent == 1
    assert found["a"].kl.prompts == 1
    assert found["all tasks"].score.mean == pytest.approx(0.75 / 2.25)
    assert found["all tasks"].score.independent == 2
    assert found["all tasks"].same.mean == pytest.approx(1 / 3)


def test_prompts_with_different_seeds_are_independent():
    (cell, _) = cells([line(seed=1), line(seed=1, item="a/0/1"), line(seed=2)])
    assert (cell.score.prompts, cell.score.independent) == (3, 2)


def test_plain_texts_have_no_score_and_no_combined_cell():
    found = cells([line(task="texts", group=None, full=0.0, score=0.0)])
    assert [(cell.task, cell.score) for cell in found] == [("texts", None)]
    assert found[0].kl.mean == pytest.approx(0.2)


def ordinary(**changes):
    made = {
        "task": "summary", "group": "summary/0", "item": "summary/0/0", "full": 0.0, "score": 0.0,
        "kl_at": [0.1] * 31 + [0.2] * 32 + [0.4] * 8, "agreed_at": "1" * 63 + "0" * 8,
        "full_length": 72, "full_loops": False, "packed": True,
        "similarity": 0.5, "length": 36, "loops": True,
    }  # fmt: skip
    return line(**(made | changes))


def test_cells_have_divergence_by_position_in_the_output():
    short = ordinary(
        group="points/0", item="points/0/0", task="points", kl_at=[0.6] * 33, agreed_at="0" * 33,
        full_length=34, packed=False, kept=1.0, similarity=1.0, length=34, loops=False,
    )  # fmt: skip
    found = {cell.task: cell for cell in cells([ordinary(), short, line()])}
    both = found["ordinary requests"]
    assert both.along["1 to 32"].kl.mean == pytest.approx(31 * (0.1 + 0.6) / 64)
    assert both.along["33 to 64"].kl.mean == pytest.approx((32 * 0.2 + 2 * 0.6) / 34)
    assert both.along["33 to 64"].top1.mean == pytest.approx(32 / 34)
    assert both.along["from 65"].kl.mean == pytest.approx(0.4)
    assert both.along["from 65"].top1.mean == 0.0
    assert both.along["from 65"].kl.independent == 1
    assert both.along["from 33"].kl.mean == pytest.approx((6.4 + 1.2 + 3.2) / 42)
    assert (both.loops, both.full_loops) == (0.5, 0.0)
    assert both.similarity.mean == pytest.approx(0.75)
    assert both.length.mean == pytest.approx(70 / 106)
    assert both.score is None
    assert found["all tasks"].score.prompts == 1
    assert found["a"].along == {}
    assert found["points"].same.prompts == 1
