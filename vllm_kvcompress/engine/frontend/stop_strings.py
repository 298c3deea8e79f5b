"""VllmHook `stop_strings`: mark requests that vLLM aborts because it found a stop string."""

import functools
from typing import Any

from vllm.v1.engine.output_processor import OutputProcessor

from vllm_kvcompress.engine.messages.outputs import mark_stopped


@functools.cache
def install() -> None:
    """Wrap ``OutputProcessor.process_outputs``; safe to call twice."""
    process_outputs = OutputProcessor.process_outputs

    @functools.wraps(process_outputs)
    def processing(self: Any, *args: Any, **kwargs: Any) -> Any:
        processed = process_outputs(self, *args, **kwargs)
        processed.reqs_to_abort = mark_stopped(processed.reqs_to_abort)
        return processed

    OutputProcessor.process_outputs = processing
