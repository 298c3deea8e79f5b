"""The parts of `make peers` that run without kvpress: counts, files and report."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers import __main__ as command
from benchmarks.peers import counts, decoding, exchange
from benchmarks.peers.report import better, markdown, paired, summaries

PROMPT = exchange.Prompt(
    name="needle0", kind=exchange.NEEDLE, ids=(1, 2), output_ids=(3,), answer="7"
)


def result(**fields: object) -> exchange.Result:
    line = dict(side=exchange.OURS, method="snapkv", budget=0.1, prompt="needle0", tokens=100)
    line |= dict(kept=(10.0, 10.0), answered=True, kl=(), cache_bytes=10, full_bytes=100)
    return exchange.Result(**{**line, **fields})


# -- counts -----------------------------------------------------------------------------------


def test_kept_tokens_avoid_float_rounding():
    assert int(0.7 * 90) == 62
    assert counts.kept_tokens(90, 0.7) == 63


@given(tokens=st.integers(2, 40_000), data=st.data())
def test_the_ratio_gives_kvpress_the_requested_count(tokens, data):
    kept = data.draw(st.integers(1, tokens - 1))
    # kvpress truncates in floating point.
    assert int(tokens * (1 - counts.ratio_for(tokens, kept))) == kept


def test_a_press_cannot_keep_everything():
    with pytest.raises(ValueError, match="at least 1 of 5 tokens and drop at least 1, got 5 kept"):
        counts.ratio_for(5, 5)


@given(tokens=st.integers(64, 5000), data=st.data())
def test_complete_chunks_leave_less_than_one_chunk_of_the_budget(tokens, data):
    kept = data.draw(st.integers(40, tokens - 1))
    chunks, chunk_tokens = counts.complete_chunks(tokens, kept)
    total = -(-tokens // counts.CHUNK)
    assert 0 <= kept - chunk_tokens < counts.CHUNK
    # kvpress's count of chunks
    assert int(total * (1 - counts.chunk_ratio(tokens, chunks))) == chunks


@given(tokens=st.integers(50, 5000), layers=st.integers(1, 40), data=st.data())
def test_the_closest_ratio_misses_by_at_most_a_token_per_layer(tokens, layers, data):
    kept = data.draw(st.integers(2, tokens - 2))

    def kept_at(ratio: float) -> int:
        return layers * round(tokens * (1 - ratio))

    ratio = counts.closest_ratio(layers * kept, tokens, kept_at)
    assert abs(kept_at(ratio) - layers * kept) <= layers


# -- decoding ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(vocab_size=64, hidden_size=32, intermediate_size=32)
    config = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, initializer_range=0.4)
    return LlamaForCausalLM(config).eval()


def test_logits_along_an_output_match_decode_steps(model):
    ids = torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    full = decoding.prefill(model, ids)
    same_length = [(k[:, 5:], v[:, 5:]) for k, v in full.layers]
    uneven = [same_length[0], full.layers[1]]
    for layers in (same_length, uneven):
        steps = decoding.decode(model, decoding.as_cache(layers), full.logits, len(ids), 6)
        along = decoding.logits_along(
            model, decoding.as_cache(layers), full.logits, len(ids), steps.output_ids
        )
        torch.testing.assert_close(along, torch.stack(steps.logits), rtol=1e-4, atol=1e-5)
    assert decoding.cache_bytes(uneven) == 2 * 2 * 8 * 4 * (35 + 40)


def test_the_full_cache_matches_one_pass_over_the_text(model):
    ids = torch.randint(3, 64, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    full = decoding.prefill(model, ids[:20])
    along = decoding.logits_along(model, decoding.as_cache(full.layers), full.logits, 20, ids[20:])
    with torch.inference_mode():
        one_pass = model(torch.tensor([ids])).logits[0, 19:29]
    torch.testing.assert_close(along, one_pass, rtol=1e-4, atol=1e-5)
    assert float(decoding.divergence(one_pass, along).max()) < 1e-6


# -- files and report -------------------------------------------------------------------------


def test_records_survive_a_round_trip(tmp_path):
    path = tmp_path / "results.jsonl"
    assert exchange.read(path, exchange.Result) == []
    lines = [result(), result(kl=(0.1, 0.2), answered=None, prompt="text0")]
    exchange.write(path, lines[:1])
    exchange.append(path, lines[1])
    assert exchange.read(path, exchange.Result) == lines
    exchange.write(tmp_path / "prompts.jsonl", [PROMPT])
    assert exchange.read(tmp_path / "prompts.jsonl", exchange.Prompt) == [PROMPT]


@pytest.mark.parametrize("line", ["[1]", '{"name": "a"}', '{"other": 1}', '{"kind": "x"}'])
def test_an_invalid_line_is_an_error(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    exchange.write(path, [PROMPT])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"must have lines of Prompt: .*delete the file"):
        exchange.read(path, exchange.Prompt)


def test_a_folder_with_other_settings_is_refused(tmp_path):
    args = command.parse_args(["--run", str(tmp_path), "--needles", "2"])
    command.claim_folder(args)
    command.claim_folder(args)
    args.needles = 3
    with pytest.raises(SystemExit, match=r"'needles': 3.*pass another folder with --run"):
        command.claim_folder(args)


def pairs() -> list[dict[str, object]]:
    lines = [
        result(),
        result(prompt="text0", answered=None, kl=(0.2, 0.4)),
        result(side=exchange.KVPRESS, method="SnapKV", answered=False, note="a note"),
        result(side=exchange.KVPRESS, method="SnapKV", prompt="text0", answered=None, kl=(0.1,)),
    ]
    return summaries(lines)


def test_the_report_says_where_a_press_is_better():
    found = paired(pairs())
    assert found["ours", "snapkv"][0.1]["kl"] == pytest.approx(0.3)
    assert better(found, ("kvpress", "SnapKV"), [0.1]) == "KL at 0.1"
    assert better(found, ("ours", "snapkv"), [0.1]) == ""


def test_a_press_is_compared_on_its_own_prompts_ignoring_rounding():
    replayed = {"side": exchange.KVPRESS, "method": "KVzip"}
    lines = [
        result(prompt="a"),
        result(prompt="b", answered=False),
        result(prompt="text0", answered=None, kl=(0.3,)),
        result(**replayed, prompt="b"),
        result(**replayed, prompt="text0", answered=None, kl=(0.29999,)),
    ]
    assert better(paired(summaries(lines)), ("kvpress", "KVzip"), [0.1]) == "needles at 0.1"


def test_the_report_has_all_methods_notes_and_the_origin():
    results = {"machine": "a processor", "command": "python -m benchmarks.peers", "commit": "abc"}
    results |= {"model": "a model", "prompts": "1 needles and 1 texts of 100 to 100 tokens"}
    results |= {"kvpress": "0.5.5", "transformers": {"kvpress": "5.2", "ours": "5.19"}}
    results |= {"budgets": [0.1], "pairs": pairs()}
    text = markdown(json.loads(json.dumps(results)))
    assert "| kvpress: SnapKV | 0/1 | 0.100 | 0.10 | KL at 0.1 |" in text
    assert "| ours: snapkv | 1/1 | 0.300 | 0.10 |  |" in text
    assert "* SnapKV, at 0.1: a note." in text
    assert "a processor; commit abc; `python -m benchmarks.peers`" in text
