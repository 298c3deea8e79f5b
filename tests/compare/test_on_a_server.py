"""``kvcompress compare`` on the real server that it starts for a folder, and asked by hand."""

import json
import math
from pathlib import Path
from statistics import fmean

import httpx
import pytest

from checkpoints import talking
from forks import forking
from vllm_kvcompress.compare import server
from vllm_kvcompress.compare.client import Cell
from vllm_kvcompress.compare.measures import distance
from vllm_kvcompress.serving.text import english

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FLAGS = [
    "--enforce-eager",
    "--max-model-len",
    "2048",
    "--dtype",
    "float32",
    "--num-gpu-blocks-override",
    "65",
    "--kv-min-prompt",
    "256",
    "--served-model-name",
    "it",
]
BUDGETS = (0.5, 0.2)


@pytest.fixture(scope="module")
def url(demo_model, tmp_path_factory):
    model = Path(talking(tmp_path_factory.mktemp("model"), demo_model))
    folder = tmp_path_factory.mktemp("server")
    methods = ("snapkv", "random")
    cells = [Cell(method=method, budget=budget) for method in methods for budget in BUDGETS]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in forking(folder).items():
            patch.setenv(name, value)
        with server.start(model, FLAGS, cells, folder / "log") as url:
            yield url


def by_hand(url, prompt, xargs):
    """Tokens, likely tokens and usage of one answer, not streamed."""
    body = {
        "model": "it", "messages": [{"role": "user", "content": prompt}], "max_tokens": 12,
        "temperature": 0, "logprobs": True, "top_logprobs": 20, "vllm_xargs": xargs,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()
    return answer["choices"][0]["logprobs"]["content"], answer["usage"]


def first(place):
    return max(place["top_logprobs"], key=lambda likely: likely["logprob"])["token"]


def likely(place):
    return {each["token"]: each["logprob"] for each in (*place["top_logprobs"], place)}


def bound_of_kl(p, q):
    """Over the tokens that both tell, and all others as one."""
    both = [(math.exp(p[name]), math.exp(q[name])) for name in p.keys() & q.keys()]
    both.append(tuple(1 - sum(side) for side in zip(*both, strict=True)) if both else (1.0, 1.0))
    return max(sum(a * math.log(a / b) for a, b in both if a > 1e-6), 0.0)


def test_it_reports_what_the_server_answers(url, compare, tmp_path):
    text = english()
    prompts = [text[at : at + 1800] for at in (0, 40_000, 80_000)] + ["A short one."]
    lines = [json.dumps({"prompt": p, "max_tokens": 12}) for p in prompts]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    done = compare(
        "--url",
        url,
        "--prompts",
        "mine.jsonl",
        "--methods",
        "snapkv",
        "--json",
        "--budgets",
        ",".join(map(str, BUDGETS)),
    )
    assert done.status == 1, done.err
    found = json.loads(done.out)
    assert found["complete"]
    assert "It takes 149." in found["recommendation"]["sentence"]
    full = [by_hand(url, prompt, {"kv_compress": "off"})[0] for prompt in prompts[:3]]
    # random is allowed and stands beside, streamingllm is not and is left out
    assert [cell["method"] for cell in found["cells"][2:]] == ["random"] * 2
    assert {(c["asked"], c["compressed"], c["baseline"]) for c in found["cells"][2:]} == {
        (4, 3, True)
    }
    assert any("the server refuses streamingllm" in note for note in found["notes"])
    for budget, cell in zip(BUDGETS, found["cells"][:2], strict=True):
        other = [
            by_hand(url, prompt, {"kv_compress": "snapkv", "kv_budget": budget})
            for prompt in prompts[:3]
        ]
        assert (cell["asked"], cell["compressed"]) == (4, 3)
        told = [usage["prompt_tokens_details"]["kv_compress"] for _, usage in other]
        kept = sum(t["kept_tokens"] for t in told) / sum(t["prompt_tokens"] for t in told)
        assert cell["kept"] == pytest.approx(kept)
        similar, same, places, top, lost = [], [], 0, 0, 0.0
        for whole, (places_of, _) in zip(full, other, strict=True):
            a, b = ([p["token"] for p in side] for side in (whole, places_of))
            similar.append(1 - distance(a, b) / max(len(a), len(b)))
            same.append(a == b)
            parts = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 11)
            for p, q in list(zip(whole, places_of, strict=False))[1 : parts + 1]:
                places, top = places + 1, top + (first(p) == first(q))
                lost += bound_of_kl(*(likely(place) for place in (p, q)))
        assert cell["similarity"]["mean"] == pytest.approx(fmean(similar))
        assert cell["exact"]["mean"] == fmean(same)
        assert cell["places"] == places
        assert cell["same_first"]["mean"] == pytest.approx(top / places)
        assert cell["kl"]["mean"] == pytest.approx(lost / places, abs=1e-9)
        assert min(v for v in cell["times"].values()) > 0
    assert (tmp_path / "out" / "report.png").stat().st_size > 10_000


def test_a_budget_that_the_server_refuses(url, compare, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\n')
    done = compare(
        "--url", url, "--prompts", "mine.jsonl", "--methods", "snapkv", "--budgets", "0.1"
    )
    assert done.status == 2
    assert "the server refuses snapkv 0.1: kv_budget must be between 0.2 and 0.5" in done.err
    assert "--kv-budget-bounds" in done.err


def hits(url):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("vllm:prefix_cache_hits_total"))


def test_tests_of_trust_are_asked_as_a_server_takes_them(url, compare, tmp_path):
    """Tools without a parser for their calls, results of tools, and a second turn of a chat."""
    before = hits(url)
    done = compare(
        "--url",
        url,
        "--tasks",
        "secret,json,tool-call,two-turns",
        "--length",
        "1100",
        "--count",
        "2",
        "--methods",
        "snapkv",
        "--budgets",
        "0.5",
        "--no-baselines",
        "--no-kl",
        "--json",
        "--keep-text",
    )
    assert done.status == 1, done.err
    found = json.loads(done.out)
    (cell,) = found["cells"]
    assert (cell["asked"], cell["compressed"]) == (8, 8)
    # what says nothing tells no secret, and answers nothing else
    assert cell["obeyed"]["secret"]["mean"] == 1.0
    assert "| snapkv | 0.5 | 1.00 [1.00, 1.00], 2 |" in (tmp_path / "out/report.md").read_text()
    # its template leaves the tools out
    assert set(cell["roles"]) == {"system", "user", "assistant", "tool", "template"}
    assert all(0 < share <= 1 for _, share in cell["roles"].values())
    lines = (tmp_path / "out" / "texts.jsonl").read_text().splitlines()
    two = [line for line in map(json.loads, lines) if line["name"].startswith("two-turns")]
    assert len(two) == 4
    # of both turns of each, on both sides, the second finds the first; 32 tokens are a block
    assert hits(url) - before >= 4 * 25 * 32


CHAT = [
    {"role": "system", "content": "Answer in one word, and never with a number."},
    {"role": "user", "content": "Here is a text.\n"},
    {"role": "assistant", "content": "I have read it."},
    {"role": "developer", "content": "Now answer in two."},
    {"role": "user", "content": "What is it about?"},
]


@pytest.mark.parametrize("endpoint", ["chat/completions", "responses"])
@pytest.mark.parametrize("protect", ["none", "system"])
def test_what_is_kept_of_each_role_adds_up_to_what_is_kept(url, endpoint, protect):
    chat = [dict(message) for message in CHAT]
    chat[1]["content"] += english()[:3000]
    if endpoint == "responses":
        # whose roles are those that OpenAI knows
        del chat[3]
    else:
        chat.append({"role": "critic", "content": "Is that so?"})
    asked = {"kv_compress": "snapkv", "kv_budget": 0.2, "kv_by_role": True, "kv_protect": protect}
    field = "messages" if endpoint == "chat/completions" else "input"
    body = {"model": "it", field: chat, "temperature": 0, "vllm_xargs": asked}
    body |= {"max_tokens" if field == "messages" else "max_output_tokens": 4}
    answer = httpx.post(f"{url}/v1/{endpoint}", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    told = (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["kv_compress"]
    roles = told["by_role"]
    assert list(roles) == [
        "system", "user", "assistant", "template" if endpoint == "responses" else "other",
    ]  # fmt: skip
    assert sum(own["tokens"] for own in roles.values()) == told["prompt_tokens"]
    kept = sum(own["tokens"] * own["kept"] for own in roles.values())
    # shares are told to four places
    assert kept == pytest.approx(told["kept_tokens"], abs=0.1)
    assert (roles["system"]["kept"] == 1) is (protect == "system")


@pytest.mark.parametrize(
    ("more", "asked", "said"),
    [
        ({"messages": CHAT[:2]}, "maybe", "kv_by_role must be true or false, got 'maybe'"),
        ({"prompt": "a"}, True, "kv_by_role needs a chat that a template was applied to"),
        ({"messages": CHAT[:2], "use_beam_search": True, "n": 2}, True, "without use_beam_search"),
    ],
)
def test_a_question_about_roles_that_means_nothing(url, more, asked, said):
    endpoint = "chat/completions" if "messages" in more else "completions"
    body = {"model": "it", "vllm_xargs": {"kv_by_role": asked, "kv_compress": "snapkv"}, **more}
    refused = httpx.post(f"{url}/v1/{endpoint}", json=body, timeout=300)
    assert refused.status_code == 400
    assert said in refused.json()["error"]["message"]
