"""Make an engine defer block frees until in-flight steps end, as on a GPU decode server.

vLLM's scheduler does this when steps overlap and a connector pulls prompts. The test must allow
async scheduling, which vLLM disables on a CPU.
"""


def defer_frees(llm):
    """Let the engine's scheduler defer the frees of blocks from now on."""
    scheduler = llm.scheduler
    assert scheduler.vllm_config.max_concurrent_batches == 2
    scheduler.defer_block_free = True
    scheduler.next_step.__init__(scheduler, scheduler.groups, scheduler.step_builder)
