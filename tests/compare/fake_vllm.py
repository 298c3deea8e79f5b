"""A fake vLLM server with the plugin's API, whose methods lose information in a known way.

A prompt ends with a number, and the full cache outputs its last digit eight times. With ``snapkv``
at budgets below 0.5, odd numbers get wrong digits from the third output token.
"""

import json
import math
import threading
from typing import Any

VOCABULARY = 12
CACHE_INFO = 'vllm:cache_config_info{{cache_dtype="{cache_dtype}"}} 1.0\n'
INFO = (
    'vllm:kv_compress_info{{allow_override="off,cake,snapkv",budget="",method="off",'
    'min_prompt="{min_prompt}"}} 1.0\nvllm:kv_compress_planned_requests_total {count}.0\n'
)


class FakeVllm:
    """Request handler of the fake server, for `loopback.server`.

    Attributes:
        requests: bodies of all chat completion requests.
        has_plugin: whether the plugin is installed.
        reports_usage: whether responses report the kept tokens, as with ``--kv-usage``.
        has_metrics: whether ``/metrics`` exists.
        allowed_methods: methods that requests may choose.
        cache_dtype: the server's ``--kv-cache-dtype``.
        wrong_numbers: whether odd numbers get wrong digits without compression, too.
        min_prompt: prompt length in words from which prompts are compressed.
        max_logprobs: most top log-probabilities that the server allows.
        fail_from: number of user prompts after which requests fail with 500. None for never.
        refused_text: prompts with this text are refused with 400.
        refusal_reason: reason for such a refusal. The response also quotes the prompt.
        responses: fixed responses by path.
        hold_from: number of requests from which each request waits for `released`. None for never.
        released: set to answer the waiting requests.
    """

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.has_plugin = self.reports_usage = self.has_metrics = True
        self.allowed_methods = ["off", "cake", "snapkv"]
        self.cache_dtype, self.wrong_numbers = "auto", False
        self.min_prompt = 5
        self.max_logprobs = 20
        self.fail_from: int | None = None
        self.refused_text, self.refusal_reason = "refuse this", "no"
        self.responses: dict[str, tuple[int, str]] = {}
        self.hold_from: int | None = None
        self.released = threading.Event()
        self._num_compressed = 0
        self._lock = threading.Lock()

    @property
    def prompt_requests(self) -> list[dict[str, Any]]:
        """Return the bodies of all requests except the preflight ones."""
        return [b for b in self.requests if b["messages"][-1]["content"] != "Count to nine."]

    def __call__(self, path: str, body: bytes) -> tuple[int, str]:
        if path in self.responses:
            return self.responses[path]
        if path == "/health":
            return 200, ""
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "fake"}]})
        if path == "/metrics":
            page = CACHE_INFO.format(cache_dtype=self.cache_dtype)
            if self.has_plugin:
                page += INFO.format(min_prompt=self.min_prompt, count=self._num_compressed)
            return (200, page) if self.has_metrics else (404, "")
        if path == "/tokenize":
            return 200, json.dumps({"count": len(json.loads(body)["prompt"].split())})
        if path != "/v1/chat/completions":
            return 404, ""
        if self.hold_from is not None and len(self.requests) >= self.hold_from:
            self.released.wait(300)
        with self._lock:
            return self._chat(json.loads(body))

    def _chat(self, body: dict[str, Any]) -> tuple[int, str]:
        self.requests.append(body)
        method = body["vllm_xargs"]["kv_compress"]
        text = body["messages"][-1]["content"]
        if self.fail_from is not None and len(self.prompt_requests) > self.fail_from:
            return 500, '{"error": {"message": "out of luck"}}'
        if body["top_logprobs"] > self.max_logprobs:
            return 400, '{"error": {"message": "top_logprobs must be at most --max-logprobs"}}'
        if self.has_plugin and method not in self.allowed_methods:
            message = (
                f"kv_compress must be one of {self.allowed_methods} on this server, got {method!r}"
            )
            return 400, json.dumps({"error": {"message": message}})
        if self.refused_text in text:
            return 400, json.dumps({"error": {"message": f"{self.refusal_reason}: {text}"}})
        return 200, self._stream(body, method, text)

    def _stream(self, body: dict[str, Any], method: str, text: str) -> str:
        num_words = len(text.split())
        compressed = method != "off" and self.has_plugin and num_words >= self.min_prompt
        number = int(text.split()[-1]) if text.split()[-1].isdigit() else 0
        forgets = method == "snapkv" and body["vllm_xargs"]["kv_budget"] < 0.5 and number % 2
        digits = [number % 10] * min(8, body["max_tokens"])
        if (forgets and compressed) or (self.wrong_numbers and number % 2):
            digits[2:] = [(number + 1) % 10] * len(digits[2:])
        details = {}
        if compressed:
            self._num_compressed += 1
            budget = body["vllm_xargs"]["kv_budget"]
            if self.reports_usage:
                is_k4v3 = body["vllm_xargs"].get("kv_packed_dtype") == "k4v3"
                kept = {
                    "kept_tokens": budget * num_words,
                    "kept_bytes": budget * (1000 if is_k4v3 else 4000),
                    "uncompressed_bytes": 4000,
                }
                details = {"prompt_tokens_details": {"kv_compress": kept}}
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]}
        ]
        for digit in digits:
            position = {
                "token": f"token_id:{digit}",
                "logprob": logprobs(digit)[digit],
                "top_logprobs": [
                    {"token": f"token_id:{token}", "logprob": logprob}
                    for token, logprob in enumerate(logprobs(digit))
                ][: self.max_logprobs],
            }
            delta = {"delta": {"content": f"{digit}"}, "logprobs": {"content": [position]}}
            events.append({"choices": [delta]})
        usage = {"prompt_tokens": num_words, "completion_tokens": len(digits), **details}
        events.append({"choices": [], "usage": usage})
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n"


def logprobs(digit: int) -> list[float]:
    """Return log-probabilities of the vocabulary: 1/2 for `digit`, the rest spread evenly."""
    rest = math.log(0.5 / (VOCABULARY - 1))
    return [math.log(0.5) if token == digit else rest for token in range(VOCABULARY)]


def write_prompts(path: Any, numbers: Any, words: int = 10, **fields: Any) -> None:
    """Write a JSONL file with one prompt per number, and its expected answer.

    Args:
        words: words before the number.
        fields: further fields of each line.
    """
    lines = []
    for number in numbers:
        prompt = f"{'secret ' * words}{number}"
        answer = str(number % 10) * 8
        lines.append(json.dumps({"prompt": prompt, "answer": answer, "max_tokens": 8, **fields}))
    path.write_text("\n".join(lines) + "\n")


def read_report(folder: Any, out: str = "out") -> Any:
    """Return the ``report.json`` of a run in `folder`."""
    return json.loads((folder / out / "report.json").read_text())
