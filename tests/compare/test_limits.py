"""What a comparison says before its first request: too few prompts, and missing answers."""

import json

import pytest

from fake_vllm import write_prompts
from vllm_kvcompress.compare.limits import Planned, find_limits

NOWHERE = "--url http://127.0.0.1:9 --methods cake --budgets 0.2"
"""A server that does not answer: everything before this error came before any request."""


@pytest.fixture
def compare_nowhere(compare, tmp_path):
    """Return a function that compares prompts, of which those without an answer come last."""

    def run(flags="", answered=0, unanswered=0):
        write_prompts(tmp_path / "known.jsonl", range(answered))
        lines = (tmp_path / "known.jsonl").read_text().splitlines()[:answered]
        lines += [json.dumps({"prompt": f"tell {number}"}) for number in range(unanswered)]
        (tmp_path / "mine.jsonl").write_text("\n".join(lines))
        result = compare(f"{NOWHERE} --prompts mine.jsonl {flags}")
        assert result.status == 2
        return result.err.splitlines()

    return run


def test_too_few_prompts_are_reported_before_any_request(compare_nowhere):
    sentence, error = compare_nowhere(answered=6)
    assert sentence == (
        "kvcompress: 6 different prompts with an answer are too few for a recommendation: to"
        " confirm a loss of at most 0.02 at 95 % confidence, a run needs 149. This run only"
        " measures. Add prompts, or accept a loss of 0.4 with --max-drop."
    )
    assert "does not answer" in error
    sentence, error = compare_nowhere(unanswered=6)
    assert sentence.startswith("kvcompress: 6 different prompts are too few")


def test_enough_prompts_are_not_mentioned(compare_nowhere):
    assert len(compare_nowhere(answered=149)) == 1
    assert len(compare_nowhere("--max-drop 0.4", answered=6)) == 1


def test_copies_of_a_prompt_count_once(compare_nowhere, tmp_path):
    write_prompts(tmp_path / "copies.jsonl", [1] * 200)
    sentence, _ = compare_nowhere("--prompts copies.jsonl")
    assert sentence.startswith("kvcompress: 1 different prompt with an answer is too few")


def test_lines_without_an_answer_are_named_before_any_request(compare_nowhere):
    sentence, too_few, _ = compare_nowhere(answered=148, unanswered=7)
    assert sentence == (
        "kvcompress: 7 of 155 prompts have no answer (line 149, line 150, line 151, line 152,"
        " line 153 and 2 more). The recommendation is by score and counts the other 148; all"
        " count in similarity and agreement. To decide by all prompts, add --by similarity."
    )
    assert too_few.startswith("kvcompress: 148 different prompts with an answer are too few")
    assert len(compare_nowhere("--by similarity", answered=148, unanswered=7)) == 1


def test_tasks_without_answers_are_named_before_any_request(compare):
    flags = f"{NOWHERE} --tasks summary,key-values,explain --count 150"
    sentence, _ = compare(flags).err.splitlines()
    assert "300 of 450 prompts have no answer (summary, explain). The" in sentence
    assert "counts the other 150;" in sentence
    assert len(compare(f"{flags} --by agreement").err.splitlines()) == 1


@pytest.mark.parametrize("source", ["--prompts mine.jsonl", "--tasks summary,points"])
def test_by_score_without_answers_is_refused_before_any_request(compare, tmp_path, source):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a 1"}\n')
    result = compare(f"{NOWHERE} {source} --by score")
    assert result.status == 2
    assert result.err == (
        "kvcompress: error: --by score needs prompts with an answer, but none has one; add"
        " answers, or use --by similarity\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("count", [*range(1, 60), 148, 500])
def test_the_suggested_loss_can_be_confirmed(count):
    planned = [Planned("line", number, known=False) for number in range(count)]
    (sentence,) = find_limits(planned, by=None, max_drop=0.0001)
    suggested = float(sentence.split("a loss of ")[-1].split()[0])
    if count > 1:  # one prompt confirms a loss of 0.95 only
        assert find_limits(planned, by=None, max_drop=suggested) == []
    assert suggested < 1
