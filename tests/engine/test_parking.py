"""Parked requests: a preempted compressed request resumes from its pages in host memory."""

import pytest

from checkpoints import tokens
from engines import engine, settings


def test_output_equals_a_run_without_preemption(model):
    prompts = [tokens(400 + 37 * number, seed=number) for number in range(3)]
    with engine(model, additional_config=settings(park=0.1), max_num_seqs=8) as llm:
        expected = llm.generate(prompts, 40)
        for number, prompt in enumerate(prompts):
            llm.submit(str(number), prompt, 40)
        free = None
        outputs = {}
        for step in range(200):
            outputs |= llm.step()
            if step in (5, 17, 30):
                for request in llm.running():
                    llm.preempt(request)
                assert llm.scheduler.parking.num_free_slots < 10**9
        outputs = [list(outputs[str(n)].outputs[0].token_ids) for n in range(3)]
        stats = llm.scheduler.step_builder.stats
        print(stats)
        assert outputs == expected
