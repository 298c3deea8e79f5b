"""Lines of data sets, and chats with turns, on a fake server."""

import json

from fake_vllm import write_prompts
from vllm_kvcompress.compare.client import FULL, Client
from vllm_kvcompress.compare.tasks import Item
from vllm_kvcompress.serving.exposition import Host

WORDS = "word " * 10
SNAPKV = "--methods snapkv --budgets 0.2 --no-baselines"


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def test_every_cell_gets_the_full_caches_replies(run_compare, fake, tmp_path):
    """The compressed cache's own reply to 7 would be 77888888."""
    contents = [f"{WORDS}7", f"{WORDS}4", f"{WORDS}13"]
    line = {"turns": [*contents[:2], {"content": contents[2], "answer": "3" * 8}], "max_tokens": 8}
    (tmp_path / "mine.jsonl").write_text(json.dumps(line))
    result = run_compare(f"{SNAPKV} --json --keep-text", numbers=None)
    chat = [
        user(contents[0]), assistant("7" * 8),
        user(contents[1]), assistant("4" * 8),
        user(contents[2]),
    ]  # fmt: skip
    requests = fake.prompt_requests
    assert [body["messages"] for body in requests] == [chat[:1], chat[:3], chat] * 2
    methods = [body["vllm_xargs"]["kv_compress"] for body in requests]
    assert methods == ["off"] * 3 + ["snapkv"] * 3
    salts = [body["cache_salt"] for body in requests]
    assert salts == [salts[0]] * 3 + [salts[3]] * 3
    assert salts[0] != salts[3]
    (cell,) = json.loads(result.out)["cells"]
    # Only the last turn counts: 33333333 with the full cache, 33444444 with the compressed one.
    assert (cell["full_score"]["mean"], cell["drop"]["mean"], cell["exact"]["mean"]) == (1, 1, 0)
    assert cell["similarity"]["mean"] == 2 / 8
    texts = [json.loads(x) for x in (tmp_path / "out" / "texts.jsonl").read_text().splitlines()]
    assert [(x["cell"], x["text"]) for x in texts] == [("off", "3" * 8), ("snapkv 0.2", "33444444")]
    assert all(x["messages"] == chat for x in texts)


def test_scores_are_grouped_by_the_tasks_of_the_lines(run_compare, fake, tmp_path):
    """The full cache outputs 33333333 and 44444444, and the compressed one 33444444 for the odd."""
    lines = [
        {"input": f"{WORDS}3", "outputs": ["0", "333333"], "task": "qa_1"},
        {"input": f"{WORDS}13", "outputs": ["0", "33", "4"], "task": "vt"},
        {"context": WORDS, "question": "4", "answers": ["444", "0"], "dataset": "hotpotqa"},
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = run_compare(f"{SNAPKV} --json", numbers=None)
    (cell,) = json.loads(result.out)["cells"]
    assert cell["tasks"] == {"qa_1": [0, 1], "vt": [2 / 3, 1 / 3], "hotpotqa": [1, 1]}
    assert "hotpotqa" in (tmp_path / "out" / "report.md").read_text()


def test_a_chat_with_turns_is_resumed(run_compare, fake, tmp_path):
    write_prompts(tmp_path / "mine.jsonl", [1, 2])
    line = json.dumps({"turns": [f"{WORDS}7", f"{WORDS}8"], "max_tokens": 8})
    with (tmp_path / "mine.jsonl").open("a") as file:
        file.write(line)
    run_compare(SNAPKV, numbers=None)
    before = len(fake.prompt_requests)
    assert before == 2 * (1 + 1 + 2)
    run_compare(SNAPKV, numbers=None)
    assert len(fake.prompt_requests) == before


def test_replies_leave_out_reasoning(fake):
    deltas = [{"reasoning": "Let me see. "}, {"content": "It "}, {"content": "is 7."}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n"
    fake.responses["/v1/chat/completions"] = 200, stream
    turns = {"messages": (user("a"), user("b")), "turns": (1,)}
    item = Item(name="a", task="a", **turns, answers=(), max_tokens=8)
    completion = Client(host=Host(fake.url), model="fake").complete(item, FULL)
    assert completion.text == "Let me see. It is 7."
    assert completion.replies == ["It is 7."]
    chat = item.with_replies(completion.replies).messages
    assert chat == (user("a"), assistant("It is 7."), user("b"))
