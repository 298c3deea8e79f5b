"""NIXL's pulls, which write to the KV cache outside of the order of the device's stream."""

from vllm.v1.core.sched.output import SchedulerOutput


def starts_pulls(scheduler_output: SchedulerOutput) -> bool:
    """Return whether a KV connector of this worker starts to pull prompts in this step."""
    metadata = scheduler_output.kv_connector_metadata
    # Other connectors have other metadata.
    return bool(getattr(metadata, "reqs_to_recv", None))
