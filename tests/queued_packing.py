"""Packing that is still queued when the next step begins, as on a GPU, for engines on a CPU."""

from vllm_kvcompress.engine.compression.compressor import PromptCompressor
from vllm_kvcompress.engine.worker.worker import CompressingWorker


def queue_packing(monkeypatch, begin_step):
    """Queue the packing of each step until the next step begins.

    Args:
        begin_step: function of a step's SchedulerOutput. It is called when the step begins, before
            the queued packing is executed.

    Returns:
        Function that executes the queued packing. It ignores its arguments.
    """
    queued, end_step, begin = [], CompressingWorker._end_step, PromptCompressor.begin_step

    def pack(*_):
        while queued:
            end_step(queued.pop())

    def queue(worker):
        queued.append(worker)
        return None if worker.compressor.plan is None else worker.compressor.plan.number

    def beginning(compressor, scheduler_output):
        begin_step(scheduler_output)
        pack()
        begin(compressor, scheduler_output)

    monkeypatch.setattr(CompressingWorker, "_end_step", queue)
    monkeypatch.setattr(PromptCompressor, "begin_step", beginning)
    return pack
