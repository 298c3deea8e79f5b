"""Forecasts on a CPU in float32, and the blocks that an engine's request holds."""

import json

from engines import BLOCK
from vllm_kvcompress.commands.plan.command import make_plan
from vllm_kvcompress.commands.plan.options import PlanOptions

CPU_FLAGS = ["--block-size", BLOCK, "--dtype", "float32", "--device", "cpu"]


def make_forecast(model: str, length: int, output: int, settings_dict: dict, **extra_options):
    """Return the forecast for a model on a CPU in float32."""
    return plan_on_cpu(model, length, output, settings_dict, **extra_options).forecast


def plan_on_cpu(model: str, length: int, output: int, settings_dict: dict, **extra_options):
    options = dict(memory_gib=None, dtype="float32", ranks=1, longest=None, requests=256)
    options |= {"block_size": BLOCK, "device": "cpu", **extra_options}
    return make_plan(
        PlanOptions(
            model=model,
            compress_config=json.dumps(settings_dict),
            length=length,
            output=output,
            **options,
        )
    )


def held_blocks(llm, prompt: list[int], output: int, **xargs) -> list[int]:
    """Return the blocks in use after each scheduled decode step of one request."""
    schedule, held = llm.scheduler.schedule, []
    free = llm.free_blocks

    def recording_schedule(*args, **kwargs):
        result = schedule(*args, **kwargs)
        if result.num_scheduled_tokens:
            held.append(free - llm.free_blocks)
        return result

    llm.scheduler.schedule = recording_schedule
    try:
        llm.generate([prompt], output, extra_args=xargs)
    finally:
        llm.scheduler.schedule = schedule
    assert llm.free_blocks == free
    return held
