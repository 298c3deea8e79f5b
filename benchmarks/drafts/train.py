"""Train an EAGLE head on a model's own greedy outputs.

    OMP_NUM_THREADS=1 python -m benchmarks.drafts.train --out .cache/drafts/smollm2-135m

The target's outputs and features are stored in the head's folder and used again by a later run,
which may take the first --count of them. One in
sixteen outputs is not trained on: the command reports how often the head predicts its next token.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.drafts.head import Example, Training, accepted, new_head, train
from benchmarks.drafts.prompts import engine, prompts
from benchmarks.engine_bench import replace_kernels_once, use_one_process

# vLLM loads every file of tensors that lies beside a checkpoint.
EXAMPLES = Path("examples", "outputs.safetensors")
_HELD_OUT = 16
"""One example in this many is not trained on."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafts.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=Path(".cache/smollm2-135m-instruct"))
    parser.add_argument("--out", type=Path, required=True, help="the head's folder")
    parser.add_argument("--count", type=int, default=240, help="outputs of the target")
    parser.add_argument("--prompt", type=int, nargs=2, default=(100, 1500), help="tokens of a text")
    parser.add_argument("--output", type=int, nargs=2, default=(100, 300), help="output tokens")
    parser.add_argument("--loss", choices=("eagle", "tokens"), default="eagle")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--batch", type=int, default=2, help="outputs per step")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def examples(args: argparse.Namespace) -> list[Example]:
    """Return the target's greedy outputs with their features, stored in `args.out`.

    Raises:
        SystemExit: fewer than `args.count` are stored there.
    """
    path = args.out / EXAMPLES
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _store(path, list(_new_examples(args)))
    stored = load_file(path)
    ids, features = stored["ids"].long(), stored["features"]
    found, first_id, first_feature = [], 0, 0
    for count, prompt in stored["counts"].tolist():
        last_id, last_feature = first_id + count, first_feature + count - 1
        found.append(Example(ids[first_id:last_id], features[first_feature:last_feature], prompt))
        first_id, first_feature = last_id, last_feature
    if len(found) < args.count:
        raise SystemExit(
            f"--count must be at most {len(found)}, the outputs that {path} has, got {args.count};"
            " remove the file to make more"
        )
    return found[: args.count]


def _store(path: Path, found: Sequence[Example]) -> None:
    tensors = {
        "ids": torch.cat([each.ids for each in found]).int(),
        "features": torch.cat([each.features for each in found]),
        "counts": torch.tensor([(len(each.ids), each.prompt) for each in found]),
    }
    save_file(tensors, path)


def _new_examples(args: argparse.Namespace) -> Iterator[Example]:
    from vllm import SamplingParams

    rng = random.Random(args.seed)
    shortest, longest = args.prompt
    with engine(
        str(args.model),
        # The template and the longest output need space behind the text.
        max_model_len=longest + args.output[1] + 256,
        max_num_seqs=16,
        enable_prefix_caching=False,
    ) as llm:
        drawn = prompts(
            llm.get_tokenizer(), "training", shortest=shortest, longest=longest, seed=args.seed
        )
        given = [prompt.ids for prompt in islice(drawn, args.count)]
        for number, ids in enumerate(given):
            params = SamplingParams(temperature=0, max_tokens=rng.randint(*args.output))
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        with recorded_features(llm) as features:
            while llm.llm_engine.has_unfinished_requests():
                for output in llm.llm_engine.step():
                    if not output.finished:
                        continue
                    ids = [*given[int(output.request_id)], *output.outputs[0].token_ids]
                    found = torch.cat(features.pop(output.request_id))[: len(ids) - 1]
                    yield Example(torch.tensor(ids), found, len(given[int(output.request_id)]))


@contextmanager
def recorded_features(llm: Any) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Record the target's features in later steps, by request and in 16 bits.

    Requests must not be preempted, nor found in the prefix cache.
    """
    features: dict[str, list[torch.Tensor]] = {}
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def record(_: Any, __: Any, hidden: torch.Tensor) -> None:
        ids = runner.input_batch.req_ids
        ends = runner.query_start_loc.np[1 : len(ids) + 1].tolist()
        for request_id, start, end in zip(ids, [0, *ends], ends, strict=False):
            # vLLM appends a random suffix to a request's id.
            name = request_id.rpartition("-")[0]
            features.setdefault(name, []).append(hidden[start:end].half())

    hook = runner.model.register_forward_hook(record)
    try:
        yield features
    finally:
        hook.remove()


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(1)
    use_one_process(cache_gib=2)
    replace_kernels_once()
    found = examples(args)
    held_out = found[::_HELD_OUT]
    trained = [each for number, each in enumerate(found) if number % _HELD_OUT]
    outputs = sum(len(each.ids) - each.prompt for each in found)
    print(
        f"{len(found)} outputs with {outputs:,} tokens, {sum(len(e.ids) for e in found):,} with"
        f" prompts; {time.process_time():.0f} s of CPU time",
        flush=True,
    )
    head = new_head(args.model, found[0].features, args.seed)

    def report(epoch: int, loss: float) -> None:
        print(
            f"epoch {epoch + 1}: loss {loss:.3f}, the next token of {accepted(head, held_out):.1%}"
            f" of the other outputs' tokens; {time.process_time():.0f} s of CPU time",
            flush=True,
        )
        head.save(args.out)

    train(
        head,
        trained,
        Training(
            loss=args.loss, epochs=args.epochs, rate=args.rate, batch=args.batch, seed=args.seed
        ),
        report,
    )


if __name__ == "__main__":
    main()
