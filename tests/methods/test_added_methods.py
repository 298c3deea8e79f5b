"""Methods that other packages add by entry point, through the real metadata and registry."""

import pickle
import sys

import pytest
import torch

from added_methods import ENTRIES, EVENS, forget_added_methods, installed, write_package
from vllm_kvcompress.errors import ConfigError
from vllm_kvcompress.methods import registry
from vllm_kvcompress.methods.entry_points import added_names, package_summary
from vllm_kvcompress.methods.trial import check_part
from vllm_kvcompress.offline import compress
from vllm_kvcompress.settings.config import CompressionConfig

LAYERS, HEADS, KV_HEADS, TOKENS, DIM = 2, 4, 2, 60, 16
SCORER = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from vllm_kvcompress.methods.base import Reads, ScoreUse
from vllm_kvcompress.methods.parts.allocators import Uniform
from vllm_kvcompress.methods.parts.topk import TopK
from vllm_kvcompress.methods.preset import Preset

part = dataclass(frozen=True, slots=True, kw_only=True)

@part
class Good:
    reads: ClassVar[Reads] = Reads.NOTHING
    def score(self, stats):
        return torch.zeros(stats.num_kv_heads, stats.past)

@part
class Steep:
    reads: ClassVar[Reads] = Reads.NOTHING
    exact_ratio: ClassVar[bool] = False
    equal_shares: ClassVar[bool] = False
    needs_whole_prompt: ClassVar[str] = ""
    def allocate(self, spec, stats):
        budgets = torch.zeros(spec.num_layers, dtype=torch.int64)
        budgets[0] = min(spec.past_total, spec.past)
        return budgets

@part
class Lowest(TopK):
    def select(self, scores, past, keep, kept_after, width):
        return TopK.select(self, -scores, past, keep, kept_after, width)

@part
class Bad(Good):
"""
"""Three parts that are right, and the first line of one that the text after it makes wrong."""


def tensors():
    generator = torch.Generator().manual_seed(3)
    shapes = ((LAYERS, HEADS, TOKENS, DIM), *[(LAYERS, KV_HEADS, TOKENS, DIM)] * 2)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.fixture
def evens(tmp_path):
    with installed(write_package(tmp_path)):
        yield


@pytest.mark.parametrize(
    "policy",
    ["evens", {"compress": "evens"}, {"scorer": "evens", "window": 4}, {"compress": "cake",
     "allocator": "uniform", "scorer": "evens", "window": 4}],
)  # fmt: skip
def test_a_scorer_of_another_package_is_chosen_by_name(evens, policy):
    kept = compress(*tensors(), policy=policy, budget=24)
    expected = [*range(0, 40, 2), *range(56, 60)]
    for positions in kept.positions:
        assert positions.tolist() == [expected] * KV_HEADS


def test_parameters_have_the_same_checks(evens):
    settings = CompressionConfig.parse({"compress": "evens", "scorer_params": {"step": 3}})
    assert settings.method.scorer.step == 3
    with pytest.raises(ConfigError, match=r"scorer 'evens' has no parameter 'stp'.*'step'"):
        CompressionConfig.parse({"compress": "evens", "scorer_params": {"stp": 3}})
    with pytest.raises(ConfigError, match=r"did you mean 'evens'.*'evens'"):
        CompressionConfig.parse({"compress": "even"})


def test_requests_and_aliases_may_name_it(evens):
    settings = CompressionConfig.parse(
        {"compress": "off", "allow_override": "all", "alias": "demo@evens=evens:0.5"}
    )
    assert "evens" in settings.allow_override
    assert settings.variant("evens").method.scorer == settings.variants[-1].method.scorer


def test_pickled_settings_find_it_in_a_new_process(evens):
    data = pickle.dumps(CompressionConfig.parse({"compress": "evens"}))
    forget_added_methods()
    assert type(pickle.loads(data).method.scorer).__name__ == "Evens"


def test_allocators_and_selectors_are_added_too(tmp_path):
    entries = {"allocator.steep": "more:Steep", "selector.lowest": "more:Lowest"}
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    with installed(write_package(first), write_package(second, entries, SCORER + " pass", "more")):
        policy = {"allocator": "steep", "scorer": "evens", "selector": "lowest", "window": 4}
        kept = compress(*tensors(), policy=policy, budget=24)
        assert package_summary() == (
            "kvcompress-evens 1.0 (preset.evens, scorer.evens), more 1.0 (allocator.steep,"
            " selector.lowest)"
        )
    assert kept.budgets == [44, 4]  # all past tokens in layer 0
    lowest = sorted([*range(1, 56, 2), *range(0, 24, 2)])
    assert kept.positions[0][0].tolist() == [*lowest, *range(56, 60)]


def test_nothing_is_imported_unless_something_is_compressed(tmp_path):
    with installed(write_package(tmp_path, code="raise OSError('no disk')")):
        assert not CompressionConfig.parse({"compress": "off"}).active
        assert added_names("preset") == "evens (kvcompress-evens)"
        with pytest.raises(ConfigError, match="its import fails with OSError: no disk"):
            CompressionConfig.parse({"compress": "cake"})
    assert "kvcompress_evens" not in sys.modules


def test_one_wrong_entry_adds_no_entry(tmp_path):
    entries = {**ENTRIES, "scorer.missing": "kvcompress_evens:Missing"}
    with installed(write_package(tmp_path, entries)):
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"scorer\.missing"):
                CompressionConfig.parse({"compress": "evens"})
        assert "evens" not in registry.SCORERS.data


@pytest.mark.parametrize("load", [registry.load_added_methods, registry.checked_entries])
def test_a_module_may_list_names_while_it_is_loaded(tmp_path, load):
    code = (
        EVENS + "\nfrom vllm_kvcompress.methods.registry import PRESETS\nNAMES = sorted(PRESETS)\n"
    )
    with installed(write_package(tmp_path, code=code)):
        load()
        assert not registry.checked_entries()[1]
        assert sorted(registry.BUILT_IN["preset"]) == sys.modules["kvcompress_evens"].NAMES
        assert "evens" in registry.PRESETS


def test_two_packages_with_one_name_are_both_refused(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    other = write_package(second, {"preset.evens": "other:PRESET"}, EVENS, "other")
    with installed(write_package(first), other):
        _, errors = registry.checked_entries()
        assert len(errors) == 3
        for entry, error in errors.items():
            wanted = "other 1.0" if entry.package == "kvcompress-evens" else "kvcompress-evens 1.0"
            assert f"{wanted} registers" in str(error)


SCORE = "    def score(self, stats):\n        return "
WRONG = {
    "no module": ({"scorer.x": "nowhere:X"}, "", ("ModuleNotFoundError", "repair the package")),
    "no attribute": ({"scorer.x": "bad:Nothing"}, " pass", ("AttributeError", "'scorer.x'")),
    "built-in name": ({"scorer.snapkv": "bad:Good"}, " pass", ("'snapkv' is built in",)),
    "built-in preset": ({"preset.cake": "bad:P"}, " pass", ("'cake' is built in", "rename")),
    "name of another kind": ({"scorer.uniform": "bad:Good"}, " pass", ("allocator 'uniform'",)),
    "kind": ({"scorers.x": "bad:Good"}, " pass", ("KIND.NAME", "did you mean 'scorer'")),
    "no kind": ({"x": "bad:Good"}, " pass", ("KIND.NAME", "got 'x'")),
    "reserved": ({"preset.off": "bad:P"}, " pass", ("be none of", "got 'off'")),
    "colon": ({"preset.a:b": "bad:P"}, " pass", ("lower-case letters", "got 'a:b'")),
    "capitals": ({"scorer.Good": "bad:Good"}, " pass", ("lower-case letters", "got 'Good'")),
    "no class": ({"scorer.x": "bad:part"}, " pass", ("must be a frozen dataclass",)),
    "kind of part": ({"allocator.x": "bad:Good"}, " pass", ("must have the methods",)),
    "no default": ({}, "    alpha: float", ("parameter 'alpha' must have a default",)),
    "no reads": ({}, "    reads: ClassVar[int] = 0", ("`reads` must be of type Reads, got 0",)),
    "needed reads": (
        {}, "    reads: ClassVar[Reads] = Reads.VARIANCE", ("only together with", "WINDOW"),
    ),
    "reads of allocators": (
        {}, "    reads: ClassVar[Reads] = Reads.SCORES", ("kind scorer cannot read", "SCORES"),
    ),
    "declaration": (
        {}, "    needs_whole_prompt: ClassVar[bool] = True",
        ("declare `needs_whole_prompt` as a str, got True",),
    ),
    "unfit": ({}, "    unfit: ClassVar[dict] = {'rank': 'no'}", ("members of ScoreUse",)),
    "shape": (
        {}, SCORE + "torch.zeros(stats.num_kv_heads, stats.past + 1)",
        ("must return float32 scores (4, 96)",),
    ),
    "dtype": ({}, SCORE + "torch.zeros(stats.num_kv_heads, stats.past).double()", ("float64",)),
    "exception": ({}, SCORE + "stats.total * 2", ("a check of it fails with TypeError",)),
    "other layers": (
        {}, "    reads: ClassVar[Reads] = Reads.WINDOW | Reads.KV_HEADS\n"
        + SCORE + "stats.total / stats.total.sum()",
        ("must not depend on the other layers",),
    ),
    "lengths": (
        {}, "    needs_whole_prompt: ClassVar[str] = ''\n" + SCORE
        + "torch.arange(stats.past, 0.0, -1).expand(stats.num_kv_heads, -1)",
        ("beside a layer of another length",),
    ),
    "inputs changed": (
        {}, "    reads: ClassVar[Reads] = Reads.WINDOW | Reads.KV_HEADS\n"
        + SCORE + "stats.total.mul_(2)",
        ("must leave its inputs unchanged",),
    ),
    "random": (
        {}, SCORE + "torch.rand(stats.num_kv_heads, stats.past)", ("same scores", "seed"),
    ),
    "sum": (
        {"allocator.x": "bad:Full"},
        " pass\n@part\nclass Full(Steep):\n    def allocate(self, spec, stats):\n"
        "        return torch.full((spec.num_layers,), spec.past)",
        ("whose sum is at most 24",),
    ),
    "budgets' dtype": (
        {"allocator.x": "bad:Full"},
        " pass\n@part\nclass Full(Steep):\n    def allocate(self, spec, stats):\n"
        "        return torch.zeros(spec.num_layers)",
        ("must return [1] int64",),
    ),
    "undeclared": (
        {"allocator.x": "bad:Vague"},
        " pass\n@part\nclass Vague:\n    reads: ClassVar[Reads] = Reads.NOTHING\n"
        "    def allocate(self, spec, stats): pass",
        ("every allocator must declare `exact_ratio` as a bool, got None",),
    ),
    "unsorted": (
        {"selector.x": "bad:Turned"},
        " pass\n@part\nclass Turned(TopK):\n    def select(self, *args):\n"
        "        return TopK.select(self, *args).flip(2)",
        ("in ascending order, then -1",),
    ),
    "long integers": (
        {"selector.x": "bad:Long"},
        " pass\n@part\nclass Long(TopK):\n    def select(self, *args):\n"
        "        return TopK.select(self, *args).long()",
        ("[3, 2, 48] int32", "torch.int64"),
    ),
    "source": (
        {"selector.x": "bad:Next"},
        " pass\n@part\nclass Next(TopK):\n    def source(self, layer): return layer + 1",
        ("the layer itself or an earlier layer",),
    ),
    "no preset": ({"preset.x": "bad:Good"}, " pass", ("must be a Preset of",)),
    "preset's scorer": (
        {"preset.x": "bad:P"}, " pass\nP = Preset(allocator='uniform', scorer='snap', window=4)",
        ("scorer='snap' is unknown", "'snapkv'"),
    ),
    "preset's parameter": (
        {"preset.x": "bad:P"}, " pass\nP = Preset(allocator='uniform', scorer='snapkv', window=4,"
        " scorer_params=(('kernl', 3),))",
        ("no parameter 'kernl'",),
    ),
    "preset's window": (
        {"preset.x": "bad:P"}, " pass\nP = Preset(allocator='uniform', scorer='random', window=-1)",
        ("window of a preset must be", "from 0 to 1024 for its parts, got -1"),
    ),
    "no window": (
        {"preset.x": "bad:P"}, " pass\nP = Preset(allocator='uniform', scorer='snapkv', window=0)",
        ("window of a preset must be", "from 1 to 1024 for its parts, got 0"),
    ),
    "meaningless": (
        {"preset.x": "bad:P"}, " pass\nP = Preset(allocator='global', scorer='random', window=4)",
        ("ranks at random",),
    ),
    "look-ahead": (
        {"preset.x": "bad:P"}, " pass\nP = Preset(allocator='uniform', scorer='random', window=4,"
        " lookahead=8)",
        ("got lookahead=8",),
    ),
    "output scorer": (
        {"preset.x": "bad:P"}, " pass\nP = Preset(allocator='uniform', scorer='snapkv', window=4,"
        " output_scorer='runs')",
        ("after a look-ahead",),
    ),
    "merge": (
        {"preset.x": "bad:P"}, " pass\nP = Preset(allocator='uniform', scorer='snapkv', window=4,"
        " merge='keys')",
        ("merge of a preset must be one of", "'keys'"),
    ),
}  # fmt: skip
"""Entries, the rest of the module's text, and words of the error."""


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_entry_is_refused_with_its_package_the_rule_and_the_fix(case, tmp_path):
    """Whatever method is chosen: nobody should find out when a request names it."""
    entries, code, words = WRONG[case]
    entries = entries or {"scorer.bad": "bad:Bad"}
    with installed(write_package(tmp_path, entries, SCORER + code, "bad", "2.1")):
        with pytest.raises(ConfigError) as caught:
            CompressionConfig.parse({"compress": "cake"})
        message = str(caught.value)
        assert "\n" not in message
        for word in ("bad 2.1", f"{next(iter(entries))!r} =", *words, "or uninstall bad"):
            assert word in message
        assert CompressionConfig.parse({"compress": "off"}) == CompressionConfig()


@pytest.mark.parametrize("kind", ["allocator", "scorer", "selector"])
def test_built_in_parts_pass_the_same_checks(kind, monkeypatch):
    """Checks never call the kernel, whose CPU code takes seconds to compile."""
    monkeypatch.delattr("vllm_kvcompress.methods.method.window_scores_of_rows")
    for name in registry.BUILT_IN[kind]:
        check_part(kind, name, registry.TABLES[kind][name])


def test_built_in_presets_pass_the_same_checks():
    for name in registry.BUILT_IN["preset"]:
        registry._check_preset(registry.PRESETS[name], {kind: {} for kind in registry.TABLES})


def test_checks_leave_the_random_numbers_of_the_process_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    check_part("scorer", "snapkv", registry.SCORERS["snapkv"])
    assert torch.equal(torch.rand(3), expected)
