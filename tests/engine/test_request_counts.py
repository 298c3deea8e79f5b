"""Each request is counted once, as planned, skipped or refused, whatever ends it."""

import random

import pytest

from checkpoints import talking, tokens
from engines import engine, first_runner, settings

pytestmark = first_runner

AHEAD = 32
STOP_TOKEN = 11  # of the output: within the look-ahead


@pytest.fixture(scope="module")
def model(demo_model, checkpoints_folder):
    return talking(checkpoints_folder, demo_model)


def open_engine(model, *, asynchronous, **own):
    more = {name: own.pop(name) for name in [*own] if name in ("blocks", "max_num_seqs")}
    return engine(
        model,
        additional_config=settings("cake", 0.3, **own),
        skip_tokenizer_init=False,
        max_model_len=1024,
        max_num_batched_tokens=256,
        async_scheduling=asynchronous,
        **more,
    )


def risen(metric, before, after):
    """How much a counter rose, by its label; labels that did not rise are left out."""
    values = {key[1]: after[key] - before[key] for key in after if key[0] == f"{metric}_total"}
    return {label: value for label, value in values.items() if value}


@pytest.fixture
def counted():
    from test_metrics import samples

    return samples


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stop_string_and_a_client_that_hangs_up_have_reasons_of_their_own(
    model, counted, asynchronous, keep_async_scheduling
):
    prompt = tokens(300, seed=1)
    with open_engine(model, asynchronous=asynchronous, lookahead=AHEAD) as llm:
        ids = llm.generate([prompt], AHEAD)[0]
        stop = llm.llm.get_tokenizer().decode(ids[STOP_TOKEN - 2 : STOP_TOKEN])
        llm.settle()

        def outcome(act):
            before = counted()
            act()
            llm.settle()
            after = counted()
            return risen("planned_requests", before, after) | risen(
                "skipped_requests", before, after
            )

        def stops():
            output = llm.outputs([prompt], 100, stop=[stop])[0].outputs[0]
            assert output.finish_reason == "stop"
            assert len(output.token_ids) <= STOP_TOKEN

        def aborts(steps):
            llm.submit("r", prompt, 100)
            for _ in range(steps):
                llm.step()
            llm.llm.llm_engine.abort_request(["r"])

        assert outcome(stops) == {"answered": 1}
        for steps in (0, 1, 8):  # waiting, within its prefill, within its look-ahead
            assert outcome(lambda steps=steps: aborts(steps)) == {"aborted": 1}, steps
        assert outcome(lambda: aborts(AHEAD + 8)) == {"cake": 1}


WAYS = {
    "at the end of the prefill": {"min_output": 4},
    "by the output": {"lookahead": AHEAD, "lookahead_slots": 3},
    "as soon as the pool is short": {"lookahead": AHEAD, "lookahead_yields": "waiting"},
    "in pieces": {"max_whole": 400, "piece": 192},
    "in pieces, by the output": {"max_whole": 400, "piece": 192, "lookahead": 12},
    "with a decode budget": {"decode_budget": 128, "lookahead": 12, "pressure": 0.3},
}


def random_params(rng, *, may_be_off):
    """Sampling parameters with a random end; some of them ask for what the server refuses."""
    from vllm import SamplingParams

    asks = [None, None, None, {"kv_compress": "snapkv"}, {"kv_budget": 7.5}]
    choices = rng.choice([1, 1, 1, 2])
    return SamplingParams(
        n=choices,
        temperature=0 if choices == 1 else 1,
        max_tokens=rng.choice([1, 2, 10, 40, 90]),
        ignore_eos=True,
        extra_args=rng.choice([*asks, {"kv_compress": "off"}] if may_be_off else asks),
        stop=rng.choice([None, ["e"], ["qu", "the"]]),
        stop_token_ids=list(range(0, 49152, 20)) if rng.random() < 0.2 else None,
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_planned_skipped_and_refused_add_up_to_all_requests(
    model, counted, way, asynchronous, keep_async_scheduling
):
    """Stop strings, stop tokens, lengths, aborts, errors, choices, beams and preemptions."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import BeamSearchParams

    rng, own = random.Random(way), {"allow_override": "off,snapkv"} | WAYS[way]
    with open_engine(model, asynchronous=asynchronous, blocks=1 + 40, max_num_seqs=8, **own) as llm:
        engine_of_vllm, add = llm.llm.llm_engine, llm.scheduler.add_request
        preempted, seen, ends, asked, refused = llm.watch_preemptions(), set(), set(), 0, 0

        def noting(request):
            seen.add(request.request_id)
            add(request)

        def step():
            done = llm.step().values()
            ends.update(choice.finish_reason for output in done for choice in output.outputs)

        llm.scheduler.add_request = noting
        for index in range(80):
            params = random_params(rng, may_be_off="max_whole" not in own)
            prompt = tokens(rng.choice([20, 180, 300, 500, 700]), seed=index)
            try:
                engine_of_vllm.add_request(str(index), {"prompt_token_ids": prompt}, params)
                asked += params.n
            except VLLMValidationError:
                refused += 1
            for _ in range(rng.choice([0, 1, 3, 9])):
                step()
            if rng.random() < 0.25:
                engine_of_vllm.abort_request([str(rng.randint(max(index - 5, 0), index))])
            if rng.random() < 0.1 and llm.running():
                llm.scheduler._end_with_error(rng.choice(llm.running()).request_id, "by chance")
            if rng.random() < 0.2 and llm.running():
                llm.preempt(rng.choice(llm.running()))
        while engine_of_vllm.has_unfinished_requests():
            step()
        assert len(seen) == asked
        beams = BeamSearchParams(beam_width=2, max_tokens=3)
        llm.llm.beam_search([{"prompt_token_ids": tokens(150, seed=99)}], beams)
        llm.settle()
        after = counted()
    planned, skipped, turned_away, done = (
        {key[1]: count for key, count in after.items() if key[0] == f"{name}_total"}
        for name in ("planned_requests", "skipped_requests", "refused_requests", "requests")
    )
    assert sum(planned.values()) + sum(skipped.values()) == len(seen) > asked, (planned, skipped)
    assert sum(turned_away.values()) == refused > 0
    assert done == planned
    assert after["ratio_count",] == sum(done.values()) > 0
    assert after["seconds_count",] >= sum(done.values())
    # each way to end occurred
    assert ends >= {"stop", "length", "error"}
    assert skipped["aborted"] > 0
    assert any(preempted.values())
