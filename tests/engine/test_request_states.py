"""What the scheduler's record of a request keeps when its blocks are freed."""

from hypothesis import given, settings
from hypothesis import strategies as st

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["look", "idle", "limit", "preempt", "end"]),
        st.integers(0, 3),
    ),
    max_size=60,
)


class FakeRequest:
    """A vLLM request, as far as its record needs one."""

    def __init__(self, request_id):
        self.request_id, self.ended = request_id, False

    def is_finished(self):
        return self.ended


@settings(derandomize=True, deadline=None, max_examples=300)
@given(ACTIONS)
def test_a_record_lasts_as_long_as_its_request(actions):
    """A preemption resets blocks and limits but keeps the decision; an end removes the state."""
    from vllm_kvcompress.engine.scheduling.request_state import (
        Decision,
        RequestState,
        RequestStates,
    )
    from vllm_kvcompress.settings.request_options import RequestOptions

    requests = {str(number): FakeRequest(str(number)) for number in range(4)}
    began = []

    def begin(request):
        began.append(request)
        return RequestState(request, RequestOptions(), "", Decision(None))

    states, known = RequestStates(requests, begin), {}
    for action, number in actions:
        request_id = str(number)
        request = requests[request_id]
        state = states.of(request)
        assert state.request is request
        assert state is states.by_id(request_id) is states.get(request_id)
        decision = known.setdefault(request_id, (request, state.decision))[1]
        assert state.decision is decision
        if action == "idle":
            states.ids_without_packing.add(request_id)
        elif action == "limit":
            limit = state.cacheable_tokens
            states.limit_caching(state, 10 * number)
            assert state.cacheable_tokens == (10 * number if limit is None else limit)
            assert request_id in states.limited_ids
        elif action in ("preempt", "end"):
            request.ended = action == "end"
            state.is_counted, state.packed_blocks = True, [object()]
            assert states.pop(request_id) is state
            assert request_id not in states.ids_without_packing | states.limited_ids
            after = states.get(request_id)
            if action == "end":
                assert after is None
                requests[request_id] = FakeRequest(request_id)
                known.pop(request_id)
            else:
                assert after.decision is decision
                assert after.is_counted
                assert not after.packed_blocks
                assert after.cacheable_tokens is None
    assert len(began) == len({id(request) for request in began})
    assert len(states) <= len(requests)
