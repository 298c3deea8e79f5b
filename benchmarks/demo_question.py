"""Choose the question that `make demo` asks, using only the uncompressed model.

    python benchmarks/demo_question.py

First vLLM alone, without the plugin's flags, answers every question of
`vllm_kvcompress.demo.questions`, with and without the demo's text. The script considers the
questions whose facts it names, the last one after the first 33 tokens and only with the text. It
chooses and saves the one with the highest confidence. Then the compressed server answers the same
questions for the record. Its answers do not influence the choice.
"""

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from math import exp
from pathlib import Path
from typing import Any

from openai import OpenAI
from origin import commit, machine
from transformers import AutoTokenizer

from vllm_kvcompress.demo.__main__ import (
    QUESTION_TEXT,
    QUESTION_TOKENS,
    common,
    compression,
    environment,
    parse_args,
    pool,
)
from vllm_kvcompress.demo.questions import (
    NOTES,
    QUESTIONS,
    TIMES,
    UNCOMPRESSED,
    Asked,
    prompt,
    surest,
)
from vllm_kvcompress.serving.process import Server, serve


def answer(server: Server, content: str) -> tuple[str, str, float]:
    """Return a greedy answer, its part after the first `UNCOMPRESSED` tokens, and its confidence.

    The confidence is the minimum probability gap between the top two tokens.
    """
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
    choice = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": content}],
        max_tokens=QUESTION_TOKENS,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    ).choices[0]
    tokens = choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
    pairs = [sorted((exp(top.logprob) for top in t.top_logprobs), reverse=True) for t in tokens]
    gap = min((p[0] - p[1] for p in pairs), default=0.0)
    late = "".join(token.token for token in tokens[UNCOMPRESSED:])
    return choice.message.content or "", late, gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/demo_question.json"))
    args, rest = parser.parse_known_args()
    demo = parse_args(rest)
    model = str(Path(demo.model).resolve())
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [prompt(tokenizer, QUESTION_TEXT, question) for question in QUESTIONS]
    results: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/demo_question.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "commit": commit(),
        "text_tokens": QUESTION_TEXT,
        "notes": {"facts": len(NOTES), "times": TIMES},
    }

    def save() -> None:
        args.out.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "off.log"
        with serve(model, [*common(), *pool(demo)], log, environment=environment()) as server:
            answers = []
            for question, content in zip(QUESTIONS, prompts, strict=True):
                text, late, gap = answer(server, content)
                alone, *_ = answer(server, question.asked)
                answers.append(Asked(question, text, late, alone, round(gap, 4)))
        choice = surest(answers)
        results["chosen"] = choice.question.asked
        results["known_from_the_text"] = sum(result.known_from_the_text for result in answers)
        results["questions"] = [
            {
                "notes": [note.text for note in result.question.notes],
                "answer": result.answer,
                "late": result.late,
                "without_text": result.without_text,
                "gap": result.gap,
                "known_from_the_text": result.known_from_the_text,
            }
            for result in answers
        ]
        save()
        print(f"chosen: {choice.question.asked!r} {choice.answer!r}, gap {choice.gap}", flush=True)
        flags, log = [*common(), *pool(demo), *compression(demo)], Path(folder) / "on.log"
        with serve(model, flags, log, environment=environment()) as server:
            for result, content, entry in zip(answers, prompts, results["questions"], strict=True):
                entry["compressed"], late, _ = answer(server, content)
                entry["compressed_late_facts"] = result.question.named(late)
                entry["late_facts"] = result.question.named(result.late)
            assert len(server.compressed()) == len(prompts), "a prompt was not compressed"
    known = [entry for entry in results["questions"] if entry["known_from_the_text"]]
    results["compressed"] = {
        "method": demo.method,
        "budget": demo.budget,
        "late_facts_of_known": sum(len(entry["late_facts"]) for entry in known),
        "compressed_late_facts_of_known": sum(
            len(set(entry["late_facts"]) & set(entry["compressed_late_facts"])) for entry in known
        ),
        "same_answer": sum(entry["compressed"] == entry["answer"] for entry in known),
    }
    save()
    print(json.dumps(results["compressed"]))


if __name__ == "__main__":
    main()
