"""Write the field's prompts as JSONL for ``kvcompress compare --prompts``.

    python -m benchmarks.field --model .cache/smollm2-135m-instruct --tokens 4096 --count 5 \\
        --out ruler.jsonl

RULER's tasks, answers with reasons and arithmetic become RULER's lines (``input``, ``outputs``,
``answer_prefix``), second turns become lines with ``turns``, and other chats lines with
``messages``. ``match`` says how answers are compared.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.field import FIELD_TASKS, field_items
from benchmarks.field.data import FieldData
from vllm_kvcompress.compare.tasks import Item


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.field",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default=".cache/smollm2-135m-instruct", help="folder with the tokenizer"
    )
    parser.add_argument("--tasks", nargs="+", default=list(FIELD_TASKS), choices=list(FIELD_TASKS))
    parser.add_argument("--count", type=int, default=5, help="prompts per task")
    parser.add_argument(
        "--tokens", type=int, default=4096, help="maximum tokens of prompt and output together"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    items = field_items(
        FieldData(),
        args.tasks,
        count=args.count,
        tokens=args.tokens,
        seed=args.seed,
        count_tokens=count_tokens,
    )
    lines = [json.dumps(as_line(number, item)) for number, item in enumerate(items)]
    args.out.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} prompts of {len(args.tasks)} tasks are in {args.out}")


def as_line(index: int, item: Item) -> dict[str, Any]:
    """Return a prompt as a line of RULER's form, or of a chat's if no assistant message ends it."""
    common: dict[str, Any] = {
        "index": index,
        "task": item.task,
        "max_tokens": item.max_tokens,
        "match": item.match,
    }
    messages = item.messages
    if item.turns:
        asked = [
            {"content": message["content"]} for message in messages if message["role"] == "user"
        ]
        return {**common, "turns": [*asked[:-1], {**asked[-1], "answers": list(item.answers)}]}
    if messages[-1]["role"] == "user":
        return {**common, "messages": list(messages), "answers": list(item.answers)}
    return {
        **common,
        "input": messages[0]["content"],
        "outputs": list(item.answers),
        "answer_prefix": messages[1]["content"],
    }


if __name__ == "__main__":
    main()
