"""Each request is counted once, as planned, skipped or refused, however it ends."""

import random

import pytest

from checkpoints import text_checkpoint, tokens
from engines import engine, settings
from test_metrics import samples

LOOKAHEAD = 32
STOP_TOKEN = 11  # an output token within the look-ahead


@pytest.fixture(scope="module")
def model(demo_model, checkpoints_folder):
    return text_checkpoint(checkpoints_folder, demo_model)


def open_engine(model, *, asynchronous, **config):
    options = {name: config.pop(name) for name in [*config] if name in ("blocks", "max_num_seqs")}
    return engine(
        model,
        additional_config=settings("cake", 0.3, **config),
        skip_tokenizer_init=False,
        max_model_len=1024,
        max_num_batched_tokens=256,
        async_scheduling=asynchronous,
        **options,
    )


def increases(metric, before, after):
    """Return how much a counter has increased, by label. Unchanged labels are left out."""
    values = {key[1]: after[key] - before[key] for key in after if key[0] == f"{metric}_total"}
    return {label: value for label, value in values.items() if value}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stop_strings_and_aborts_have_different_skip_reasons(
    model, asynchronous, async_scheduling_allowed
):
    """vLLM aborts both in the engine: a request at its stop string, and one whose client left."""
    prompt = tokens(300, seed=1)
    with open_engine(model, asynchronous=asynchronous, lookahead=LOOKAHEAD) as llm:
        output_ids = llm.generate([prompt], LOOKAHEAD)[0]
        stop = llm.llm.get_tokenizer().decode(output_ids[STOP_TOKEN - 2 : STOP_TOKEN])
        llm.finish_in_flight_steps()

        def counts_after(action):
            before = samples()
            action()
            llm.finish_in_flight_steps()
            after = samples()
            return increases("planned_requests", before, after) | increases(
                "skipped_requests", before, after
            )

        def run_to_stop_string():
            output = llm.outputs([prompt], 100, stop=[stop])[0].outputs[0]
            assert output.finish_reason == "stop"
            assert len(output.token_ids) <= STOP_TOKEN

        def abort_after(num_steps):
            llm.submit("r", prompt, 100)
            for _ in range(num_steps):
                llm.step()
            llm.llm.llm_engine.abort_request(["r"])

        assert counts_after(run_to_stop_string) == {"answered": 1}
        for num_steps in (0, 1, 8):  # waiting, during the prefill, during the look-ahead
            counts = counts_after(lambda num_steps=num_steps: abort_after(num_steps))
            assert counts == {"aborted": 1}, num_steps
        assert counts_after(lambda: abort_after(LOOKAHEAD + 8)) == {"cake": 1}


CONFIGS = {
    "at the end of the prefill": {"min_output": 4},
    "by the output": {"lookahead": LOOKAHEAD, "lookahead_slots": 3},
    "as soon as the pool is short": {"lookahead": LOOKAHEAD},
    "in pieces": {"max_whole": 400, "piece": 192},
    "in pieces, by the output": {"max_whole": 400, "piece": 192, "lookahead": 12},
    "with a decode budget": {"decode_budget": 128, "lookahead": 12, "pressure": 0.3},
}


def random_params(rng, *, may_be_off):
    """Return sampling parameters with a random end. The server refuses some of the overrides."""
    from vllm import SamplingParams

    overrides = [None, None, None, {"kv_compress": "snapkv"}, {"kv_budget": 7.5}]
    num_samples = rng.choice([1, 1, 1, 2])
    return SamplingParams(
        n=num_samples,
        temperature=0 if num_samples == 1 else 1,
        max_tokens=rng.choice([1, 2, 10, 40, 90]),
        ignore_eos=True,
        extra_args=rng.choice([*overrides, {"kv_compress": "off"}] if may_be_off else overrides),
        stop=rng.choice([None, ["e"], ["qu", "the"]]),
        stop_token_ids=list(range(0, 49152, 20)) if rng.random() < 0.2 else None,
    )


@pytest.mark.parametrize(
    ("name", "asynchronous"), [(name, index % 2 == 0) for index, name in enumerate(CONFIGS)]
)
def test_planned_skipped_and_refused_add_up_to_all_requests(
    model, name, asynchronous, async_scheduling_allowed
):
    """Stop strings, stop tokens, lengths, aborts, errors, samples, beams and preemptions."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import BeamSearchParams

    rng, config = random.Random(name), {"allow_override": "off,snapkv"} | CONFIGS[name]
    with open_engine(
        model, asynchronous=asynchronous, blocks=1 + 40, max_num_seqs=8, **config
    ) as llm:
        llm_engine, add_request = llm.llm.llm_engine, llm.scheduler.add_request
        preemptions, added, finish_reasons = llm.watch_preemptions(), set(), set()
        num_submitted = num_refused = 0

        def recording_add(request):
            added.add(request.request_id)
            add_request(request)

        def step():
            done = llm.step().values()
            finish_reasons.update(
                sample.finish_reason for output in done for sample in output.outputs
            )

        llm.scheduler.add_request = recording_add
        for index in range(60):
            params = random_params(rng, may_be_off="max_whole" not in config)
            prompt = tokens(rng.choice([20, 180, 300, 500, 700]), seed=index)
            try:
                llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
                num_submitted += params.n
            except VLLMValidationError:
                num_refused += 1
            for _ in range(rng.choice([0, 1, 3, 9])):
                step()
            if rng.random() < 0.25:
                llm_engine.abort_request([str(rng.randint(max(index - 5, 0), index))])
            if rng.random() < 0.1 and llm.running():
                llm.scheduler._end_with_error(rng.choice(llm.running()).request_id, "by chance")
            if rng.random() < 0.2 and llm.running():
                llm.preempt(rng.choice(llm.running()))
        while llm_engine.has_unfinished_requests():
            step()
        assert len(added) == num_submitted
        beams = BeamSearchParams(beam_width=2, max_tokens=3)
        llm.llm.beam_search([{"prompt_token_ids": tokens(150, seed=99)}], beams)
        llm.finish_in_flight_steps()
        values = samples()
    planned, skipped, refused, completed = (
        {key[1]: count for key, count in values.items() if key[0] == f"{metric}_total"}
        for metric in ("planned_requests", "skipped_requests", "refused_requests", "requests")
    )
    num_counted = sum(planned.values()) + sum(skipped.values())
    # Beam search adds further requests.
    assert num_counted == len(added) > num_submitted, (planned, skipped)
    assert sum(refused.values()) == num_refused > 0
    assert completed == planned
    assert values["ratio_count",] == sum(completed.values()) > 0
    assert values["seconds_count",] >= sum(completed.values())
    # The load must contain every kind of end.
    assert finish_reasons >= {"stop", "length", "error"}
    assert skipped["aborted"] > 0
    assert any(preemptions.values())
