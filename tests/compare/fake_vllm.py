"""What a server with the plugin answers to, without one: each method forgets in its own way.

A prompt ends with a number; the full cache repeats it digit by digit, and says so for eight
tokens. ``snapkv`` at budgets below 0.5 gets every second number wrong from its third token on.
"""

import json
import math
import threading
from typing import Any

VOCABULARY = 12
INFO = (
    'vllm:kv_compress_info{{allow_override="off,cake,snapkv",budget="",method="off",'
    'min_prompt="{least}"}} 1.0\nvllm:kv_compress_planned_requests_total {count}.0\n'
)


class FakeVllm:
    """A server's pages.

    Attributes:
        asked: bodies of all requests for an answer.
        plugin: whether there is one.
        usage: whether answers say what was kept.
        allowed: methods that a request may ask for.
        least: tokens from which on a prompt is compressed.
        top: most likely tokens that it tells.
        metrics: whether there is such a page.
        fail_from: number of the request from which on it answers 500; None for never.
        hold_from: number of the request from which on it answers once `released` is set; None for
            never.
        released: see `hold_from`.
        refuse: a text whose prompts it answers with 400.
        reason: what it says then, before the prompt itself.
        pages: other answers than usual, by path.
    """

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.plugin = self.usage = self.metrics = True
        self.allowed = ["off", "cake", "snapkv"]
        self.least = 5
        self.top = 20
        self.fail_from: int | None = None
        self.refuse, self.reason = "refuse this", "no"
        self.pages: dict[str, tuple[int, str]] = {}
        self.hold_from: int | None = None
        self.released = threading.Event()
        self._compressed = 0
        self._lock = threading.Lock()

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """The bodies of an operator's prompts."""
        return [b for b in self.asked if b["messages"][-1]["content"] != "Count to nine."]

    def __call__(self, path: str, body: bytes) -> tuple[int, str]:
        if path in self.pages:
            return self.pages[path]
        if path == "/health":
            return 200, ""
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "fake"}]})
        if path == "/metrics":
            info = INFO.format(least=self.least, count=self._compressed) if self.plugin else ""
            return (200, info) if self.metrics else (404, "")
        if path == "/tokenize":
            return 200, json.dumps({"count": len(json.loads(body)["prompt"].split())})
        if path != "/v1/chat/completions":
            return 404, ""
        if self.hold_from is not None and len(self.asked) >= self.hold_from:
            self.released.wait(300)
        with self._lock:
            return self._chat(json.loads(body))

    def _chat(self, body: dict[str, Any]) -> tuple[int, str]:
        self.asked.append(body)
        method = body["vllm_xargs"]["kv_compress"]
        text = body["messages"][-1]["content"]
        if self.fail_from is not None and len(self.prompts) > self.fail_from:
            return 500, '{"error": {"message": "out of luck"}}'
        if body["top_logprobs"] > self.top:
            return 400, '{"error": {"message": "top_logprobs must be at most --max-logprobs"}}'
        if self.plugin and method not in self.allowed:
            message = f"kv_compress must be one of {self.allowed} on this server, got {method!r}"
            return 400, json.dumps({"error": {"message": message}})
        if self.plugin and not self.usage and "kv_by_role" in body["vllm_xargs"]:
            return 400, '{"error": {"message": "kv_by_role is answered in the usage"}}'
        if self.refuse in text:
            return 400, json.dumps({"error": {"message": f"{self.reason}: {text}"}})
        return 200, self._stream(body, method, text)

    def _stream(self, body: dict[str, Any], method: str, text: str) -> str:
        tokens = len(text.split())
        whole = method == "off" or not self.plugin or tokens < self.least
        number = int(text.split()[-1]) if text.split()[-1].isdigit() else 0
        forgets = method == "snapkv" and body["vllm_xargs"]["kv_budget"] < 0.5 and number % 2
        said = [number % 10] * min(8, body["max_tokens"])
        if forgets and not whole:
            said[2:] = [(number + 1) % 10] * len(said[2:])
        details = {}
        if not whole:
            self._compressed += 1
            budget = body["vllm_xargs"]["kv_budget"]
            if self.usage:
                kept = {"kept_tokens": budget * tokens}
                if body["vllm_xargs"].get("kv_by_role"):
                    # it forgets the number's half, and says so of the one message's role
                    kept["by_role"] = {"user": {"tokens": tokens, "kept": budget}}
                details = {"prompt_tokens_details": {"kv_compress": kept}}
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]}
        ]
        for digit in said:
            place = {
                "token": f"token_id:{digit}",
                "logprob": likely(digit)[digit],
                "top_logprobs": [
                    {"token": f"token_id:{t}", "logprob": p}
                    for t, p in enumerate(likely(digit))
                ][: self.top],
            }  # fmt: skip
            delta = {"delta": {"content": f"{digit}"}, "logprobs": {"content": [place]}}
            events.append({"choices": [delta]})
        usage = {"prompt_tokens": tokens, "completion_tokens": len(said), **details}
        events.append({"choices": [], "usage": usage})
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n"


def likely(digit: int) -> list[float]:
    """Log-probabilities of the vocabulary where `digit` is meant: one half, and equal others."""
    rest = math.log(0.5 / (VOCABULARY - 1))
    return [math.log(0.5) if token == digit else rest for token in range(VOCABULARY)]


def write_prompts(path: Any, numbers: Any, words: int = 10, **more: Any) -> None:
    """A JSONL file with a prompt that ends with each number, and the digits to be named."""
    lines = []
    for number in numbers:
        prompt = f"{'secret ' * words}{number}"
        answer = str(number % 10) * 8
        lines.append(json.dumps({"prompt": prompt, "answer": answer, "max_tokens": 8, **more}))
    path.write_text("\n".join(lines) + "\n")
