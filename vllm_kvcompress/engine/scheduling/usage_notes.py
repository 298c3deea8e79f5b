"""What answers are to say of their compression, on its way from the scheduler to the server.

How much is kept on average is decided with the plan, and known with the first token. How it is
divided among the layers is the worker's to say: with the same output on a CPU, later on a GPU, or
never for an answer that was quicker.
"""

from collections.abc import Container, Iterable

from vllm.v1.engine import EngineCoreOutput

from vllm_kvcompress.engine.messages.step import Packed, StepPlan
from vllm_kvcompress.engine.messages.usage import Kept, attach_kept


class UsageNotes:
    """The news of one scheduler's requests, until their next outputs take them along.

    They travel beside a KV connector's parameters.
    """

    def __init__(self) -> None:
        self._news: dict[str, Kept] = {}

    def __len__(self) -> int:
        return len(self._news)

    def plan(self, step: StepPlan | None) -> None:
        """The prompts that this step compresses, for good or until their look-ahead is over."""
        for pack_request in step.told if step is not None else ():
            plan = pack_request.plan
            kept = (
                plan.pages * plan.block_size / plan.num_layers
                + plan.tail
                - (pack_request.answered or 0)
            )
            self._news[pack_request.request_id] = {
                "method": pack_request.settings.compress,
                "budget": pack_request.settings.budget,
                "prompt_tokens": pack_request.prompt_tokens,
                "kept_tokens": kept,
            }
            if pack_request.answered is not None:
                self._news[pack_request.request_id]["lookahead"] = pack_request.answered
            if pack_request.plan.spans:
                self._news[pack_request.request_id]["protected_tokens"] = (
                    pack_request.protected_tokens
                )

    def report(self, packed: Iterable[Packed]) -> None:
        """What a worker has packed."""
        for done in packed:
            news = self._news.setdefault(done.request_id, {"prompt_tokens": done.tokens})
            # Another length means that the prompt was compressed again since.
            if news["prompt_tokens"] == done.tokens:
                news["layer_tokens"] = list(done.layer_tokens)
                if done.by_role:
                    news["by_role"] = {
                        role: {"tokens": tokens, "kept": share}
                        for role, tokens, share in done.by_role
                    }

    def send(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Give each output its request's news."""
        if not self._news:
            return
        for output in outputs:
            if (news := self._news.pop(output.request_id, None)) is not None:
                attach_kept(output, news)

    def forget(self, alive: Container[str]) -> None:
        """Drop the news of requests that are gone without another output."""
        for gone in [request_id for request_id in self._news if request_id not in alive]:
            del self._news[gone]
