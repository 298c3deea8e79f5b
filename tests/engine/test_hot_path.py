"""Host work in a decode step, measured in function calls instead of time."""

import sys

import pytest

from checkpoints import make, tokens
from engines import engine, settings


def calls_to_build(model: str, method: str, requests: int) -> int:
    """Return the Python and C function calls of the metadata builder in one decode-only step."""
    with engine(model, additional_config=settings(method), enable_prefix_caching=False) as llm:
        for i in range(requests):
            llm.submit(str(i), tokens(300, seed=i), 8)
        llm.step()
        while any(request.is_prefill_chunk for request in llm.running()):
            llm.step()
        llm.step()  # finish one-time work
        builder = llm.worker.model_runner.attn_groups[0][0].metadata_builders[0]
        build, count = builder.build, 0

        def profile(_frame, event, _argument) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        def counting(*args, **kwargs):
            sys.setprofile(profile)
            try:
                return build(*args, **kwargs)
            finally:
                sys.setprofile(None)

        builder.build = counting
        llm.step()
        assert len(llm.running()) == requests
        llm.drain()
    assert count > 10
    return count


# A work plan takes 16 calls and is made once per distinct vector of lengths, so at most once per
# layer. SnapKV's layers share one.
@pytest.mark.parametrize(("method", "plans"), [("snapkv", 0), ("cake", 3)])
def test_python_work_per_step_does_not_grow_with_layers_times_requests(
    method, plans, checkpoints_folder
):
    """Adding six requests adds as many calls with 4 layers as with 1."""
    added_calls = {}
    for name in ("llama-one-layer", "llama-gqa"):
        model = make(name, checkpoints_folder)
        added_calls[name] = calls_to_build(model, method, 8) - calls_to_build(model, method, 2)
    assert added_calls["llama-gqa"] <= added_calls["llama-one-layer"] + 16 * plans
    assert added_calls["llama-one-layer"] <= 10 * 6
