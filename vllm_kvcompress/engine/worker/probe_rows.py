"""VllmHook `worker`: give both of vLLM's runners a probe's tokens: the prompt's first and last.

To vLLM they are the prompt's next tokens, which the scheduler schedules behind a chunk and then
takes back. Here the step's own copy of the token ids is changed, so nothing has to be restored.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsTensors

from vllm_kvcompress.engine.compression.compressor import PromptCompressor
from vllm_kvcompress.engine.compression.watched import Probe


class ProbeRows(Protocol):
    """What a model runner must be told of probes."""

    def begin_step(self, output: SchedulerOutput) -> None:
        """Before a step: take back the rows of earlier steps that the runner has counted."""
        ...

    def sampled(self) -> None:
        """After a step: drop what was made of its probes' rows."""
        ...


def probe_rows(runner: Any, compressor: PromptCompressor) -> ProbeRows:
    """Give the probes of every step their tokens, on this model runner."""
    if hasattr(runner, "req_states"):
        return _OnDevice(runner, compressor)
    return _OnHost(runner, compressor)


class _OnHost:
    """V1, which gathers a step's ids on the host and counts by the scheduler's numbers."""

    def __init__(self, runner: Any, compressor: PromptCompressor) -> None:
        self._runner = runner
        upload = runner._prepare_input_ids

        def uploading(*args: Any, **kwargs: Any) -> Any:
            batch = runner.input_batch
            for request_id, probe in compressor.probes.items():
                row = batch.req_id_to_index[request_id]
                known, ids = batch.num_tokens_no_spec[row], batch.token_ids_cpu_tensor[row]
                stop = int(runner.query_start_loc.np[row + 1])
                lent = runner.input_ids.cpu[stop - probe.rows : stop]
                lent[: probe.first] = ids[: probe.first]
                lent[probe.first :] = ids[known - probe.last : known]
            return upload(*args, **kwargs)

        runner._prepare_input_ids = uploading

    def begin_step(self, output: SchedulerOutput) -> None:
        """Tell an early pipeline stage the last token of a request that was preempted.

        A probe may end with it. Without async scheduling vLLM tells such a stage of a sampled token
        with the step that computes it, which a preemption puts off; but a request comes back with
        all its tokens. Nothing has to be taken back.
        """
        if self._runner.use_async_scheduling:
            return
        for request_id, ids in output.scheduled_cached_reqs.all_token_ids.items():
            state = self._runner.requests.get(request_id)
            if state is not None and len(ids) > state.num_tokens:
                state.output_token_ids.extend(ids[state.num_tokens :])

    def sampled(self) -> None:
        """Log-probabilities of a prompt lie at their positions, and are written over."""


class _OnDevice:
    """V2, which gathers a step's ids on the device and counts what was computed there."""

    def __init__(self, runner: Any, compressor: PromptCompressor) -> None:
        self._runner, self._compressor = runner, compressor
        # Requests whose latest probe the runner has counted.
        self._counted: set[str] = set()
        # Of this step.
        self._probes: Mapping[str, Probe] = {}
        prepare = runner.prepare_inputs

        def preparing(*args: Any, **kwargs: Any) -> Any:
            batch, states = prepare(*args, **kwargs), runner.req_states
            for request_id, probe in compressor.probes.items():
                stop = int(batch.query_start_loc_np[batch.req_ids.index(request_id) + 1])
                index = states.req_id_to_index[request_id]
                known, ids = int(states.prefill_len.np[index]), states.all_token_ids.gpu[index]
                lent = batch.input_ids[stop - probe.rows : stop]
                lent[: probe.first].copy_(ids[: probe.first])
                lent[probe.first :].copy_(ids[known - probe.last : known])
            return batch

        runner.prepare_inputs = preparing

    def begin_step(self, output: SchedulerOutput) -> None:
        """Write the scheduler's number of computed tokens where the runner's has a probe's too."""
        if self._counted:
            cached, states = output.scheduled_cached_reqs, self._runner.req_states
            for request_id, computed in zip(
                cached.req_ids, cached.num_computed_tokens, strict=True
            ):
                if request_id in self._counted:
                    self._counted.remove(request_id)
                    index = states.req_id_to_index[request_id]
                    states.num_computed_tokens.stage_write_elem(index, computed)
            if not output.scheduled_new_reqs:
                # With new requests vLLM applies what was staged: twice in a step would write over
                # a buffer that the device may not have read.
                states.num_computed_tokens.apply_write()
            # A request that starts again is counted anew.
            self._counted.difference_update(
                (request.req_id for request in output.scheduled_new_reqs),
                output.finished_req_ids,
                output.preempted_req_ids or (),
            )
        self._probes = self._compressor.probes
        self._counted.update(self._probes)

    def sampled(self) -> None:
        """Log-probabilities of a prompt are a list of its chunks'."""
        worker = self._runner.prompt_logprobs_worker
        if worker is None:
            return
        for request_id, probe in self._probes.items():
            if chunks := worker.in_progress_prompt_logprobs.get(request_id):
                found: LogprobsTensors = chunks[-1]
                chunks[-1] = found._replace(
                    logprob_token_ids=found.logprob_token_ids[: -probe.rows],
                    logprobs=found.logprobs[: -probe.rows],
                    selected_token_ranks=found.selected_token_ranks[: -probe.rows],
                )
