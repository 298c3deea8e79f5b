"""An engine whose freed blocks wait for the steps under way, as on a decode server with a GPU.

vLLM switches async scheduling off on a CPU. Where a test leaves it on, this stands in for the rest:
what vLLM's scheduler does as soon as steps overlap and a connector pulls.
"""


def defer_frees(llm):
    from vllm_kvcompress.engine.scheduling.next_step import NextStep

    scheduler = llm.scheduler
    assert scheduler.vllm_config.max_concurrent_batches == 2
    scheduler.defer_block_free = True
    scheduler.next_step = NextStep(scheduler, scheduler.coordination)
