"""``kvcompress compare`` on a real server, compared with figures computed from its responses."""

import json
import math
from pathlib import Path
from statistics import fmean

import httpx
import pytest

from checkpoints import text_checkpoint
from forks import forked_commands
from processor import needs_avx512
from vllm_kvcompress.compare import server
from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.compare.measures import distance
from vllm_kvcompress.serving.text import english

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FLAGS = [
    "--enforce-eager", "--max-model-len", "2048", "--dtype", "float32", "--kv-min-prompt", "256",
    "--num-gpu-blocks-override", "65", "--served-model-name", "it",
]  # fmt: skip
BUDGETS = (0.5, 0.2)


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    return Path(text_checkpoint(tmp_path_factory.mktemp("model"), demo_model))


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    methods = ("snapkv", "random")
    cells = [Cell(method=method, budget=budget) for method in methods for budget in BUDGETS]
    with forked_commands(), server.start(model, FLAGS, cells, folder / "log") as url:
        yield url


def complete(url, chat, method, **xargs):
    """Return the choice and the usage of one completion of a prompt, or of a chat.

    Continues the last message of a chat if it is the assistant's.
    """
    messages = [user(chat)] if isinstance(chat, str) else chat
    body = {
        "model": "it", "messages": messages, "max_tokens": 12, "temperature": 0, "logprobs": True,
        "top_logprobs": 20, "vllm_xargs": {"kv_compress": method, **xargs},
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    if messages[-1]["role"] == "assistant":
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()
    return response["choices"][0], response["usage"]


def user(content):
    return {"role": "user", "content": content}


def full_positions(url, prompts):
    """Return the output tokens with log-probabilities of each prompt, without compression."""
    return [complete(url, prompt, "off")[0]["logprobs"]["content"] for prompt in prompts]


def most_likely(position):
    return max(position["top_logprobs"], key=lambda each: each["logprob"])["token"]


def logprobs(position):
    return {each["token"]: each["logprob"] for each in (*position["top_logprobs"], position)}


def kl_lower_bound(p, q):
    """Return KL(p || q) over the tokens in both, with all other tokens as one outcome."""
    both = [(math.exp(p[name]), math.exp(q[name])) for name in p.keys() & q.keys()]
    both.append(tuple(1 - sum(side) for side in zip(*both, strict=True)) if both else (1.0, 1.0))
    return max(sum(a * math.log(a / b) for a, b in both if a > 1e-6), 0.0)


def test_report_matches_the_servers_completions(url, compare, tmp_path):
    text = english()
    prompts = [text[start : start + 1800] for start in (0, 40_000, 80_000)] + ["A short one."]
    lines = [json.dumps({"prompt": p, "max_tokens": 12}) for p in prompts]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    result = compare(f"--url {url} --prompts mine.jsonl --methods snapkv --json --budgets 0.5,0.2")
    assert result.status == 1, result.err
    report = json.loads(result.out)
    assert report["complete"]
    assert "At least 149 are needed." in report["recommendation"]["sentence"]
    full = full_positions(url, prompts[:3])
    # The server allows the baseline random, but not streamingllm.
    assert [cell["method"] for cell in report["cells"][2:]] == ["random"] * 2
    assert {(c["asked"], c["compressed"], c["baseline"]) for c in report["cells"][2:]} == {
        (4, 3, True)
    }
    assert any("the server refuses streamingllm" in note for note in report["notes"])
    for budget, cell in zip(BUDGETS, report["cells"][:2], strict=True):
        compressed = [complete(url, each, "snapkv", kv_budget=budget) for each in prompts[:3]]
        assert (cell["asked"], cell["compressed"]) == (4, 3)
        usages = [usage["prompt_tokens_details"]["kv_compress"] for _, usage in compressed]
        kept = sum(u["kept_tokens"] for u in usages) / sum(u["prompt_tokens"] for u in usages)
        assert cell["kept"] == pytest.approx(kept)
        similarities, exact, num_positions, num_same, kl = [], [], 0, 0, 0.0
        for reference, (choice, _) in zip(full, compressed, strict=True):
            positions = choice["logprobs"]["content"]
            a, b = ([p["token"] for p in side] for side in (reference, positions))
            similarities.append(1 - distance(a, b) / max(len(a), len(b)))
            exact.append(a == b)
            diverged = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 11)
            for p, q in list(zip(reference, positions, strict=False))[1 : diverged + 1]:
                num_positions += 1
                num_same += most_likely(p) == most_likely(q)
                kl += kl_lower_bound(logprobs(p), logprobs(q))
        assert cell["similarity"]["mean"] == pytest.approx(fmean(similarities))
        assert cell["exact"]["mean"] == fmean(exact)
        assert cell["places"] == num_positions
        assert cell["same_first"]["mean"] == pytest.approx(num_same / num_positions)
        assert cell["kl"]["mean"] == pytest.approx(kl / num_positions, abs=1e-9)
        assert min(v for v in cell["times"].values()) > 0
    assert (tmp_path / "out" / "report.png").stat().st_size > 10_000


@needs_avx512
def test_an_fp8_server_is_compared_by_bytes(url, model, compare, tmp_path):
    prompts = [english()[start : start + 3000] for start in (0, 9000)]
    lines = [json.dumps({"prompt": prompt, "max_tokens": 12}) for prompt in prompts]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    with forked_commands(), server.start_low_bit(model, "fp8", FLAGS, tmp_path / "log") as other:
        flags = f"--methods snapkv --budgets 0.5 --no-baselines --against {other}"
        compare(f"--url {url} --prompts mine.jsonl {flags}")
        alone = full_positions(other, prompts)
    full = full_positions(url, prompts)
    details = [complete(url, prompt, "snapkv", kv_budget=0.5)[1] for prompt in prompts]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    method, fp8 = report["cells"]
    assert (fp8["method"], fp8["bytes"], fp8["asked"]) == ("fp8 alone", 0.5, 2)
    texts = [[[p["token"] for p in output] for output in side] for side in (full, alone)]
    same = fmean(a == b for a, b in zip(*texts, strict=True))
    assert fp8["exact"]["mean"] == same
    # fp8 changes the prefill, so the first token's probabilities differ already.
    assert logprobs(full[0][0]) != logprobs(alone[0][0])
    usages = [usage["prompt_tokens_details"]["kv_compress"] for usage in details]
    shares = [usage["kept_bytes"] / usage["uncompressed_bytes"] for usage in usages]
    tokens = [usage["prompt_tokens"] for usage in usages]
    weighted = sum(share * n for share, n in zip(shares, tokens, strict=True)) / sum(tokens)
    assert method["bytes"] == pytest.approx(weighted)
    assert 0.4 < weighted < 0.7


def test_a_budget_that_the_server_refuses_is_an_error(url, compare, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\n')
    result = compare(f"--url {url} --prompts mine.jsonl --methods snapkv --budgets 0.1")
    assert result.status == 2
    assert "the server refuses snapkv 0.1: kv_budget must be between 0.2 and 0.5" in result.err
    assert "--kv-budget-bounds" in result.err


def prefix_cache_hits(url):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:prefix_cache_hits_total"))


def test_trust_tasks_run_on_a_server(url, compare, tmp_path):
    """The server has no tool parser. The tasks send tool results and a second chat turn."""
    before = prefix_cache_hits(url)
    result = compare(
        f"--url {url} --tasks secret,json,tool-call,two-turns --length 1100 --count 2 --methods"
        " snapkv --budgets 0.5 --no-baselines --no-kl --json --keep-text"
    )
    assert result.status == 1, result.err
    report = json.loads(result.out)
    (cell,) = report["cells"]
    assert (cell["asked"], cell["compressed"]) == (8, 8)
    # The model outputs nothing useful, so it keeps the secret and fails the other tasks.
    assert cell["obeyed"]["secret"]["mean"] == 1.0
    assert "| snapkv | 0.5 | 1.00 [1.00, 1.00], 2 |" in (tmp_path / "out/report.md").read_text()
    lines = (tmp_path / "out" / "texts.jsonl").read_text().splitlines()
    two = [line for line in map(json.loads, lines) if line["name"].startswith("two-turns")]
    assert len(two) == 4
    # In each of the four chats (two prompts, two sides), the second turn hits the first turn's
    # prefix: at least 25 blocks of 32 tokens.
    assert prefix_cache_hits(url) - before >= 4 * 25 * 32


def test_lines_of_ruler_and_turns_run_on_a_server(url, compare, tmp_path):
    """The server's own outputs are continued: RULER's answer prefix, and the first turn's reply."""
    text = english()
    ruler = {"input": text[:1500], "outputs": ["the"], "answer_prefix": " It is", "max_tokens": 12}
    turns = {"turns": [text[40_000:41_500], "And then?"], "max_tokens": 12}
    (tmp_path / "mine.jsonl").write_text(f"{json.dumps(ruler)}\n{json.dumps(turns)}\n")
    before = prefix_cache_hits(url)
    result = compare(
        f"--url {url} --prompts mine.jsonl --methods snapkv --budgets 0.5 --no-baselines --json"
        " --keep-text"
    )
    assert result.status == 1, result.err
    (cell,) = json.loads(result.out)["cells"]
    assert (cell["asked"], cell["compressed"]) == (2, 2)
    # On both sides, the second turn hits the first turn's prefix: at least 10 blocks of 32 tokens.
    assert prefix_cache_hits(url) - before >= 2 * 10 * 32
    texts = [json.loads(x) for x in (tmp_path / "out" / "texts.jsonl").read_text().splitlines()]
    outputs = {(x["name"], x["cell"]): (x["messages"], x["text"]) for x in texts}
    first_turn = [user(turns["turns"][0])]
    first_output = complete(url, first_turn, "off")[0]["message"]["content"]
    reply = {"role": "assistant", "content": first_output}
    chats = {
        "prompts/1": [user(ruler["input"]), {"role": "assistant", "content": "It is"}],
        "prompts/2": [*first_turn, reply, user("And then?")],
    }
    for name, chat in chats.items():
        for cell, budget in (("off", {}), ("snapkv 0.5", {"kv_budget": 0.5})):
            choice, _ = complete(url, chat, cell.split()[0], **budget)
            assert outputs[name, cell] == (chat, choice["message"]["content"])
