"""VllmHook `worker`: feeds a probe's tokens, the prompt's first and last, to the model runners.

vLLM treats them as the next prompt tokens: the scheduler schedules them after a chunk and then
takes them back. This module only changes the step's copy of the token ids, so it restores nothing.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsTensors

from vllm_kvcompress.engine.compression.compressor import PromptCompressor
from vllm_kvcompress.engine.compression.step_state import Probe


class ProbeRows(Protocol):
    """Keeps probe tokens out of a model runner's counts and outputs."""

    def begin_step(self, output: SchedulerOutput) -> None:
        """Undo the runner's count of earlier probe tokens, before a step."""
        ...

    def sampled(self) -> None:
        """Drop the prompt log-probabilities of probe tokens, after a step."""
        ...


def probe_rows(runner: Any, compressor: PromptCompressor) -> ProbeRows:
    """Wrap the model runner so that every step's probes get their token ids."""
    if hasattr(runner, "req_states"):
        return _OnDevice(runner, compressor)
    return _OnHost(runner, compressor)


class _OnHost:
    """Model Runner V1: gathers token ids on the host and uses the scheduler's token counts."""

    def __init__(self, runner: Any, compressor: PromptCompressor) -> None:
        self._runner = runner
        upload = runner._prepare_input_ids

        def uploading(*args: Any, **kwargs: Any) -> Any:
            batch = runner.input_batch
            for request_id, probe in compressor.probes.items():
                row = batch.req_id_to_index[request_id]
                known, ids = batch.num_tokens_no_spec[row], batch.token_ids_cpu_tensor[row]
                stop = int(runner.query_start_loc.np[row + 1])
                probe_ids = runner.input_ids.cpu[stop - probe.rows : stop]
                probe_ids[: probe.first] = ids[: probe.first]
                probe_ids[probe.first :] = ids[known - probe.last : known]
            return upload(*args, **kwargs)

        runner._prepare_input_ids = uploading

    def begin_step(self, output: SchedulerOutput) -> None:
        """Give an early pipeline stage the sampled tokens that a preempted request missed.

        A probe may end with this token. Without async scheduling, vLLM sends a sampled token to an
        early stage in the step that computes it. A preemption delays that step, but the resumed
        request arrives with all its token ids. V1 has no token counts to undo.
        """
        if self._runner.use_async_scheduling:
            return
        for request_id, ids in output.scheduled_cached_reqs.all_token_ids.items():
            state = self._runner.requests.get(request_id)
            if state is not None and len(ids) > state.num_tokens:
                state.output_token_ids.extend(ids[state.num_tokens :])

    def sampled(self) -> None:
        """Do nothing: later chunks overwrite prompt log-probabilities at their positions."""


class _OnDevice:
    """Model Runner V2: gathers token ids and counts computed tokens on the device."""

    def __init__(self, runner: Any, compressor: PromptCompressor) -> None:
        self._runner, self._compressor = runner, compressor
        # Requests whose computed tokens, on the device, include their latest probe.
        self._counted: set[str] = set()
        # Probes of this step.
        self._probes: Mapping[str, Probe] = {}
        prepare = runner.prepare_inputs

        def preparing(*args: Any, **kwargs: Any) -> Any:
            batch, states = prepare(*args, **kwargs), runner.req_states
            for request_id, probe in compressor.probes.items():
                stop = int(batch.query_start_loc_np[batch.req_ids.index(request_id) + 1])
                index = states.req_id_to_index[request_id]
                known, ids = int(states.prefill_len.np[index]), states.all_token_ids.gpu[index]
                probe_ids = batch.input_ids[stop - probe.rows : stop]
                probe_ids[: probe.first].copy_(ids[: probe.first])
                probe_ids[probe.first :].copy_(ids[known - probe.last : known])
            return batch

        runner.prepare_inputs = preparing

    def begin_step(self, output: SchedulerOutput) -> None:
        """Overwrite the runner's computed-token counts that include probes by the scheduler's."""
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
                # If there are new requests, vLLM applies staged writes itself. A second call in one
                # step could overwrite a buffer that the device has not read yet.
                states.num_computed_tokens.apply_write()
            # vLLM resets the counts of requests that start, finish or are preempted.
            self._counted.difference_update(
                (request.req_id for request in output.scheduled_new_reqs),
                output.finished_req_ids,
                output.preempted_req_ids or (),
            )
        self._probes = self._compressor.probes
        self._counted.update(self._probes)

    def sampled(self) -> None:
        """Cut probe tokens off the latest chunk of prompt log-probabilities."""
        worker = self._runner.prompt_logprobs_worker
        if worker is None:
            return
        for request_id, probe in self._probes.items():
            if chunks := worker.in_progress_prompt_logprobs.get(request_id):
                chunk: LogprobsTensors = chunks[-1]
                chunks[-1] = chunk._replace(
                    logprob_token_ids=chunk.logprob_token_ids[: -probe.rows],
                    logprobs=chunk.logprobs[: -probe.rows],
                    selected_token_ranks=chunk.selected_token_ranks[: -probe.rows],
                )
