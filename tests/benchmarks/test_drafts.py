"""The drafts benchmark: separate texts, a head that vLLM runs as trained, and its table."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.drafts import __main__ as drafts
from benchmarks.drafts import train
from benchmarks.drafts.head import Training, accepted, new_head
from benchmarks.drafts.head import train as train_head
from benchmarks.drafts.prompts import engine, half_of, prompts
from benchmarks.drafts.tables import ALONE, acceptance_length, tables
from benchmarks.engine_bench import replace_kernels_once
from benchmarks.jsonl import lines
from checkpoints import text_checkpoint
from vllm_kvcompress.serving.text import english


@pytest.fixture(scope="module")
def tokenizer(demo_model):
    return AutoTokenizer.from_pretrained(demo_model)


def test_training_and_measured_requests_are_about_different_texts(tokenizer):
    def long_lines(half):
        drawn = islice(prompts(tokenizer, half, shortest=100, longest=900, seed=3), 10)
        text = "\n".join(tokenizer.decode(prompt.ids) for prompt in drawn)
        return {line for line in text.splitlines() if len(line) > 60 and line in english()}

    training, measured = long_lines("training"), long_lines("measured")
    assert len(training) > 40
    assert len(measured) > 40
    assert not training & measured


def test_a_text_across_the_middle_belongs_to_no_half():
    manual, middle = english(), len(english()) // 2
    assert half_of(manual[middle - 900 : middle]) == "training"
    assert half_of(manual[middle : middle + 900]) == "measured"
    assert half_of(manual[middle - 450 : middle + 450]) is None
    assert half_of(manual[-100:] + manual[:100]) is None


@pytest.fixture(scope="module")
def target(demo_model, tmp_path_factory):
    return text_checkpoint(tmp_path_factory.mktemp("models"), demo_model)


@pytest.fixture
def small_engines(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    replace_kernels_once()


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("head")


def training_arguments(target, folder):
    sizes = ["--prompt", "60", "90", "--output", "12", "16", "--count", "6"]
    return train.arguments(["--model", target, "--out", str(folder), *sizes])


@pytest.mark.parametrize("loss", ["eagle", "tokens"])
def test_vllm_runs_the_head_as_it_was_trained(target, head_folder, small_engines, loss):
    from vllm import SamplingParams

    found = train.examples(training_arguments(target, head_folder))
    again = train.examples(training_arguments(target, head_folder))
    assert len(found) == 6
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(found, again, strict=True))
    head = new_head(Path(target), found[0].features, seed=0)
    for example in found:
        outputs = (example.features[example.prompt - 1 :].float() @ head.output.T).argmax(-1)
        assert torch.equal(outputs, example.ids[example.prompt :])
    before, losses = accepted(head, found), []
    training = Training(loss=loss, epochs=12, rate=1e-2, batch=2, seed=0)
    train_head(head, found, training, lambda _, loss: losses.append(loss))
    assert losses[-1] < losses[0]
    assert accepted(head, found) > before
    head.save(head_folder)
    config = {"method": "eagle", "model": str(head_folder), "num_speculative_tokens": 1}
    with engine(target, speculative_config=config, max_model_len=256, max_num_seqs=2) as llm:
        core = llm.llm_engine.engine_core.engine_core
        drafter = core.model_executor.driver_worker.worker.model_runner.drafter.model
        seen = []
        hook = drafter.register_forward_hook(lambda _, __, states: seen.append(states[1].clone()))
        ids = found[0].ids[:-1]
        greedy = SamplingParams(temperature=0, max_tokens=2)
        llm.generate({"prompt_token_ids": ids.tolist()}, greedy, use_tqdm=False)
        hook.remove()
    predicted = head.predict(found[0].ids[1:], found[0].features.float()).detach()
    # Features are stored in 16 bits.
    torch.testing.assert_close(seen[0][: len(ids)], predicted, rtol=0.02, atol=0.02)


def test_outputs_with_drafts_are_compared_with_those_without(
    target, head_folder, small_engines, monkeypatch, tmp_path
):
    examples = train.examples(training_arguments(target, head_folder))
    new_head(Path(target), examples[0].features, seed=0).save(head_folder)
    monkeypatch.setattr(drafts, "_PLUGIN", {**drafts._PLUGIN, "min_prompt": 128})
    sizes = ["--prompt", "400", "500", "--output", "48", "--count", "2"]
    paths = ["--head", str(head_folder), "--out", str(tmp_path / "drafts.jsonl")]
    found = list(drafts.measured(drafts.arguments(["--model", target, *sizes, *paths])))
    settings = [ALONE, *drafts.SETTINGS]
    assert [line["setting"] for line in found[::2]] == [ALONE, *settings, *settings[1:]]
    for line in found:
        is_compressed = line["setting"] not in (ALONE, "cake-chunk, 1.0")
        assert (line["kept"] is not None) == is_compressed
        if is_compressed:
            expected = 0 if "lookahead 0" in line["setting"] else 32
            assert line["kept"].get("lookahead", 0) == expected
        if line["accepted"] is not None:
            # The last tokens of a look-ahead and of an output are computed without drafts.
            drafted = sum(line["accepted"]) + len(line["accepted"])
            assert len(line["output"]) - 9 <= drafted <= len(line["output"]) + 3
    text = tables(found)
    assert text.count("2 of 2 compressed") == 4
    assert text.count("| 2 of 2 |") == len(settings)


def line(setting, request, accepted, output=(1,) * 200):
    name = {"setting": setting, "request": request}
    return name | {"accepted": accepted, "kept": None, "output": list(output)}


def test_the_table_divides_mean_lengths_over_the_same_requests():
    found = [
        {"commit": "..."},
        *(line(ALONE, request, accepted) for request in "ab" for accepted in (None, [3] * 50)),
        line("plugin", "a", [1] * 100),
        line("plugin", "b", [3] * 50, (1,) * 100),
        *(line("plugin", request, None) for request in "ab"),
    ]
    text = tables(found)
    assert f"| {ALONE} | 4.00 |  |  | 1.00, 0 of 2 compressed | 200 | 2 of 2 |" in text
    ratio = "0.750 (0.500 to 1.000)"
    assert f"| plugin | 3.00 | {ratio} | {ratio} | 1.00, 0 of 2 compressed | 150 | 1 of 2 |" in text


def test_steps_before_the_look_aheads_end_can_be_left_out():
    found = line(ALONE, "a", [1] * 16 + [3] * 40)
    assert acceptance_length(found) == pytest.approx((16 * 2 + 40 * 4) / 56)
    # The prefill and 16 steps give 33 tokens.
    assert acceptance_length(found, 33) == 4


def test_the_page_has_the_table_of_the_raw_file():
    results = Path(drafts.__file__).parents[1] / "results"
    table = tables(list(lines(results / "drafts_smollm2.jsonl.xz")))
    assert table in (results / "drafts.md").read_text()
