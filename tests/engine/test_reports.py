"""A worker's report waits for its device and nobody waits for the report."""

from types import SimpleNamespace

import pytest
import torch

from vllm_kvcompress.config import CompressionConfig
from vllm_kvcompress.engine.reports import Reports, Stopwatch
from vllm_kvcompress.engine.step_plan import Compression
from vllm_kvcompress.plan import page_plan

SETTINGS = CompressionConfig.parse({"compress": "cake", "budget": 0.5})


def todo(name, tokens=100):
    plan = page_plan(SETTINGS.prompt(2, tokens), 16)
    return Compression(
        request_id=name, settings=SETTINGS, plan=plan, destination=(), in_place=False
    )


class Event:
    """A CUDA event whose device does what it is told to have done."""

    made = 0
    reached = 0

    def __init__(self, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        Event.made += 1
        self.at = Event.made

    def query(self):
        return self.at <= Event.reached

    def elapsed_time(self, end):
        assert end.query(), "asked before the device was there: a wait"
        return 1000.0 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.made = Event.reached = 0
    return SimpleNamespace(type="cuda")


def test_a_report_comes_when_the_device_is_there(gpu):
    reports = Reports()
    for name in "ab":
        watch = Stopwatch(gpu)
        with watch.running():
            pass
        reports.add(todo(name), torch.tensor([2, 1]), watch)
    assert Event.made == 8
    assert reports.take() == []
    Event.reached = 3  # a's packing, not yet its copy
    assert reports.take() == []
    Event.reached = 4
    (first,) = reports.take()
    assert (first.request_id, first.layer_tokens, first.seconds) == ("a", (36, 20), 2.0)
    assert reports.take() == []
    Event.reached = 8
    assert [done.request_id for done in reports.take()] == ["b"]


def test_on_a_cpu_it_comes_at_once_with_the_time_of_every_part():
    reports, watch = Reports(), Stopwatch(torch.device("cpu"))
    for _ in range(3):
        with watch.running():
            sum(range(1000))
    reports.add(todo("r", 101), torch.tensor([3, 0]), watch)
    (done,) = reports.take()
    assert (done.method, done.tokens, done.layer_tokens) == ("cake", 101, (53, 5))
    assert done.kept == 29
    assert done.seconds > 0
    assert reports.take() == []


def test_an_output_that_vllm_shares_is_not_written_to():
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    from vllm_kvcompress.engine.worker import _with

    assert _with(EMPTY_MODEL_RUNNER_OUTPUT, ["x"]).kvcompress == ["x"]
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "kvcompress")
