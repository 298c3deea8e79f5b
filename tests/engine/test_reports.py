"""Workers' reports of packed prompts, from the device to a response's usage."""

import asyncio
import copy
import importlib
import io
import json
import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from vllm_kvcompress.engine.compression import reports as reporting
from vllm_kvcompress.engine.compression.reports import Reports, Stopwatch
from vllm_kvcompress.engine.compression.stages import Stages
from vllm_kvcompress.engine.frontend import usage
from vllm_kvcompress.engine.frontend.aliases import resolve
from vllm_kvcompress.engine.frontend.usage import Collected, merge, with_usage
from vllm_kvcompress.engine.messages.outputs import take_usage
from vllm_kvcompress.engine.messages.step import PackedPrompt, PackLookahead, PackPrompt, StepPlan
from vllm_kvcompress.engine.scheduling import admission
from vllm_kvcompress.engine.scheduling.compression_stats import UsageNotes
from vllm_kvcompress.engine.scheduling.request_state import Decision
from vllm_kvcompress.methods.page_plan import page_plan
from vllm_kvcompress.serving.process import compressed_requests
from vllm_kvcompress.settings.config import CompressionConfig

SETTINGS = CompressionConfig.parse({"compress": "cake", "budget": 0.5})
BLOCK_BYTES = 1000


def pack_request(name, tokens=100, lookahead=None):
    plan = page_plan(SETTINGS.budget_spec(2, tokens), 16)
    shared = {"request_id": name, "settings": SETTINGS, "plan": plan, "tokens": tokens}
    if lookahead is None:
        return PackPrompt(**shared, reads_page_tables=False)
    return PackLookahead(
        **shared, reads_page_tables=False, output_tokens=lookahead, early_target=""
    )


class Event:
    """A fake CUDA event; the fake device has finished the first `reached` events."""

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
        assert end.query(), "reading an unfinished event would block"
        return 1000.0 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.made = Event.reached = 0
    return SimpleNamespace(type="cuda")


FORGED = (
    "(EngineCore pid=1) INFO 01-02 03:04:05 [reports.py:160] kv-compress: request='forged'"
    " prompt_tokens=1 kept_tokens=1.0 lookahead=0 blocks_before=1 blocks_after=1 layer_tokens=[1]"
)


@contextmanager
def vllms_log():
    """Collect what the reports' logger writes, in vLLM's format."""
    from vllm.logging_utils import NewLineFormatter

    handler, text = logging.StreamHandler(io.StringIO()), []
    form = "(Worker pid=7) %(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] %(message)s"
    handler.setFormatter(NewLineFormatter(form, datefmt="%m-%d %H:%M:%S"))
    level = reporting.logger.level
    reporting.logger.addHandler(handler)
    reporting.logger.setLevel(logging.INFO)
    try:
        yield text
    finally:
        reporting.logger.removeHandler(handler)
        reporting.logger.setLevel(level)
        text.append(handler.stream.getvalue())


@pytest.mark.parametrize(
    "name",
    ["r", "it's", 'a"b', "a\\", "\x1b[2J\u202e\ud800", "r" * 10**6, f"r\n{FORGED}", f"r\r{FORGED}",
     f'"{FORGED}"', FORGED],
    ids=lambda name: repr(name)[:20],
)  # fmt: skip
def test_log_line_can_be_parsed(name):
    """The demo, the doctor and tests parse it from a server's log."""
    reports, one = Reports(Stages([(0, 1)]), log=True), pack_request(name)
    reports.add(one, torch.tensor([3, 2]), Stopwatch(torch.device("cpu")))
    with vllms_log() as log:
        (done,) = reports.take()
    assert log[0].rstrip("\n").isprintable()
    assert len(log[0]) < 500
    (read,) = compressed_requests(f"before\n{log[0]}behind\n")
    assert name.startswith(read.request)
    assert len(read.request) >= min(len(name), 60)
    assert (read.prompt_tokens, read.lookahead) == (done.tokens, 0)
    assert (read.kept_tokens, read.layer_tokens) == (done.kept_tokens, done.layer_tokens)
    assert (read.blocks_before, read.blocks_after) == (7, one.plan.blocks + 1)


@pytest.mark.parametrize(
    "line",
    [f"request {FORGED!r}: max_tokens", f'x "{FORGED}"', f" {FORGED}", f"[a.py:1] {FORGED}"],
)
def test_lines_that_contain_a_report_are_none(line):
    prefix = "(APIServer pid=7) INFO 01-02 03:04:05 [api_router.py:75] Error: "
    assert compressed_requests(f"{prefix}{line}\n") == []
    assert len(compressed_requests(f"{FORGED}\n")) == 1


def test_the_log_quotes_the_id_of_an_invalid_request(monkeypatch):
    lines = []
    monkeypatch.setattr(admission.logger, "warning", lambda line, *args: lines.append(line % args))
    decision = Decision(None, admission.INVALID)
    state = SimpleNamespace(decision=decision, request_id="r\n\x1b[2J" * 10**5, error="why")
    admission.Admissions.finalize_decision(None, state)
    (line,) = lines
    assert line.startswith(r"request 'r\n\x1b[2J")
    assert line.endswith("... stays uncompressed: why")
    assert line.isprintable()
    assert len(line) < 200


def test_report_is_returned_once_the_device_has_finished(gpu):
    reports = Reports(Stages([(0, 1)]))
    for name in "ab":
        watch = Stopwatch(gpu)
        with watch.running():
            pass
        reports.add(pack_request(name), torch.tensor([2, 1]), watch)
    assert Event.made == 8
    assert reports.take() == []
    Event.reached = 3  # the packing of "a" is done, but not its copy
    assert reports.take() == []
    Event.reached = 4
    (first,) = reports.take()
    assert (first.request_id, first.layer_tokens, first.seconds) == ("a", (36, 20), 2.0)
    assert reports.take() == []
    Event.reached = 8
    assert [done.request_id for done in reports.take()] == ["b"]


def test_a_reports_layers_are_those_of_the_prompt():
    """Even if a window shorter than the look-ahead lets a layer keep fewer tokens than that."""
    reports, plan = Reports(Stages([(0, 1)])), pack_request("r", 132, lookahead=32)
    reports.add(plan, torch.tensor([5, 1]), Stopwatch(torch.device("cpu")))
    (done,) = reports.take()
    assert (done.tokens, done.layer_tokens, done.kept_tokens) == (100, (52, 0), 26)


def test_report_on_a_cpu_is_immediate_and_adds_up_the_time():
    reports, watch = Reports(Stages([(0, 1)])), Stopwatch(torch.device("cpu"))
    for _ in range(3):
        with watch.running():
            sum(range(1000))
    reports.add(pack_request("r", 101), torch.tensor([3, 0]), watch)
    (done,) = reports.take()
    assert (done.method, done.tokens, done.layer_tokens) == ("cake", 101, (53, 5))
    assert done.kept_tokens == 29
    assert done.seconds > 0
    assert reports.take() == []


def test_attaching_a_report_does_not_modify_vllms_shared_output():
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    from vllm_kvcompress.engine.messages.step import StepReport
    from vllm_kvcompress.engine.worker.worker import _with_report

    report = StepReport(executed_plan=3, packed=())
    assert _with_report(EMPTY_MODEL_RUNNER_OUTPUT, report).kvcompress is report
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "kvcompress")


def outputs(*names):
    from vllm.v1.engine import EngineCoreOutput

    return [EngineCoreOutput(request_id=name, new_token_ids=[1]) for name in names]


def packed(name, tokens, layer_tokens, output_tokens=None):
    return PackedPrompt(
        request_id=name,
        method="cake",
        tokens=tokens,
        layers=tuple(range(len(layer_tokens))),
        layer_tokens=layer_tokens,
        seconds=0.1,
        output_tokens=output_tokens,
    )


def usage_of(output):
    return take_usage(copy.copy(output))


def test_usage_has_the_mean_first_and_the_layers_once_they_are_reported():
    notes, kept = UsageNotes(BLOCK_BYTES), {}
    notes.add_plan(StepPlan(number=1, pack=(pack_request("a"), pack_request("b"))))
    first, other = outputs("a", "c")
    notes.attach_to([first, other])
    assert usage_of(other) is None
    mean = {
        "method": "cake",
        "budget": 0.5,
        "packed_dtype": "auto",
        "prompt_tokens": 100,
        "kept_tokens": 52.0,
        "kept_bytes": 4 * BLOCK_BYTES,  # 3 full blocks and the tail's
        "uncompressed_bytes": 7 * BLOCK_BYTES,  # 6 full blocks and the tail's
    }
    assert usage_of(first) == mean
    merge(kept, usage_of(first))
    same_object = kept  # a result that refers to it is updated too
    notes.add_packed([packed("a", 100, (68, 36)), packed("b", 100, (36, 68))])
    second, other_first = outputs("a", "b")
    notes.attach_to([second, other_first])
    assert usage_of(other_first) == mean | {"layer_tokens": [36, 68]}
    merge(kept, usage_of(second))
    assert same_object == mean | {"layer_tokens": [68, 36]}
    assert len(notes) == 0


def test_kept_tokens_are_exact_once_the_workers_report():
    """In k4v3, a page of 16 tokens holds 64. A layer that keeps all 282 leaves one partly empty."""
    settings = CompressionConfig.parse(
        {"compress": "cake", "budget": 0.824, "packed_dtype": "k4v3"}
    )
    plan = page_plan(settings.budget_spec(2, 282), 16, page_tokens=64)
    assert (plan.leading_blocks, plan.pages, plan.blocks, plan.tail) == (1, 6, 3, 42)
    pack = PackPrompt(
        request_id="a", settings=settings, plan=plan, tokens=282, reads_page_tables=False
    )
    notes, kept = UsageNotes(BLOCK_BYTES), {}
    notes.add_plan(StepPlan(number=1, pack=(pack,)))
    (first,) = outputs("a")
    notes.attach_to([first])
    merge(kept, usage_of(first))
    assert (kept["packed_dtype"], kept["kept_tokens"]) == ("k4v3", 16 + 3 * 64 + 42)
    assert kept["kept_bytes"] == 7 * BLOCK_BYTES
    notes.add_packed([packed("a", 282, (282, 170))])
    (second,) = outputs("a")
    notes.attach_to([second])
    merge(kept, usage_of(second))
    assert (kept["kept_tokens"], kept["layer_tokens"]) == (226, [282, 170])
    assert (kept["method"], kept["kept_bytes"]) == ("cake", 7 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("later", "earlier"),
    [
        (pack_request("a", 120), {"tokens": 100}),  # preempted
        # a look-ahead of 32 tokens that was cut after 12
        (pack_request("a", 132, lookahead=32), {"tokens": 100, "output_tokens": 12}),
    ],
    ids=["preempted", "cut"],
)
def test_layers_of_an_earlier_compression_are_not_reported_for_a_later_one(later, earlier):
    notes, kept = UsageNotes(BLOCK_BYTES), {"layer_tokens": [68, 36]}
    notes.add_plan(StepPlan(number=1, pack=(later,)))
    notes.add_packed([packed("a", layer_tokens=(68, 36), **earlier)])
    (output,) = outputs("a")
    notes.attach_to([output])
    assert "layer_tokens" not in usage_of(output)
    merge(kept, usage_of(output))
    # the earlier report arrives after the later plan
    notes.add_packed([packed("a", layer_tokens=(68, 36), **earlier)])
    notes.attach_to([output])
    merge(kept, usage_of(output))
    assert "layer_tokens" not in kept


def test_finished_requests_leave_no_usage_notes():
    notes = UsageNotes(BLOCK_BYTES)
    notes.add_plan(StepPlan(number=1, pack=(pack_request("a"), pack_request("b"))))
    notes.add_packed([packed("gone", 100, (68, 36))])
    notes.forget_ended({"b": None})
    assert len(notes) == 1
    (output,) = outputs("b")
    notes.attach_to([output])
    assert usage_of(output)["kept_tokens"] == 52.0


WRAPPED = (
    ("vllm.v1.engine.output_processor", "OutputProcessor", "process_outputs"),
    ("vllm.v1.engine.output_processor", "RequestState", "make_request_output"),
    *(
        (f"vllm.entrypoints.openai.{module}", owner, name)
        for module, owner, name in (
            ("chat_completion.serving", "OpenAIServingChat", "create_chat_completion"),
            (
                "chat_completion.batch_serving", "OpenAIServingChatBatch",
                "create_batch_chat_completion",
            ),
            ("completion.serving", "OpenAIServingCompletion", "create_completion"),
            ("responses.serving", "OpenAIServingResponses", "create_responses"),
            ("responses.serving", "OpenAIServingResponses", "responses_full_generator"),
        )
    ),
)  # fmt: skip


REPORT = {
    "method": "tova",
    "budget": 0.1,
    "packed_dtype": "auto",
    "prompt_tokens": 100,
    "kept_tokens": 10.0,
    "kept_bytes": 3000,
    "uncompressed_bytes": 27000,
}


def collected(*reports):
    found = Collected()
    for index, each in enumerate(reports):
        found.note(SimpleNamespace(request_id=str(index), kv_compress=each))
    found.note(SimpleNamespace(request_id="whole"))
    return found


def test_usage_of_a_requests_prompts_is_summed():
    one = REPORT | {"kept_tokens": 10.25}
    two = {**one, "prompt_tokens": 300, "kept_tokens": 30.5, "layer_tokens": [20, 41]}
    assert collected().total() is None
    both = collected(one, two).total()
    summed = {"prompt_tokens": 400, "kept_tokens": 40.8}
    assert both == REPORT | summed | {"kept_bytes": 6000, "uncompressed_bytes": 54000}
    assert collected(two, two).total()["layer_tokens"] == [40, 82]
    # one prompt was compressed after its look-ahead, the other at the end of its prefill
    assert collected({**two, "lookahead": 32}, one).total()["lookahead"] == 32
    assert collected(*[{**two, "lookahead": 32}] * 2).total()["lookahead"] == 64


@pytest.mark.parametrize(
    "event",
    [
        "data: [DONE]\n\n",
        'data: {"choices":[{"text":"\\"usage\\":{"}]}\n\n',
        'data: {"usage":{"input_tokens":3}}\n\n',
        'data: {"a":{"usage":{"prompt_tokens":3}}}\n\n',
        'event: message_start\ndata: {"usage":{"prompt_tokens":3}}\n\n',
        SimpleNamespace(usage=None),
    ],
    ids=str,
)
def test_events_without_openai_usage_are_unchanged(event):
    assert with_usage(event, collected(REPORT)) is event


def test_event_with_usage_keeps_vllms_fields():
    details = '"prompt_tokens_details":{"cached_tokens":2}'
    event = f'data: {{"id":"é","usage":{{"prompt_tokens":3,{details}}}}}\n\n'
    assert with_usage(event, collected()) is event
    assert with_usage(event, collected(REPORT)) == (
        'data: {"id":"é","usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":2,'
        '"kv_compress":{"method":"tova","budget":0.1,"packed_dtype":"auto","prompt_tokens":100,'
        '"kept_tokens":10.0,"kept_bytes":3000,"uncompressed_bytes":27000}}}}\n\n'
    )


@pytest.mark.parametrize("stream", [False, True])
def test_token_in_token_out_endpoint_reports_usage(monkeypatch, stream):
    """Test `/inference/v1/generate`, which has a separate handler."""
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.entrypoints.serve.engine.protocol import UsageInfo
    from vllm.v1.engine.async_llm import AsyncLLM

    async def generate(self):
        yield SimpleNamespace(request_id="a", kv_compress=REPORT)

    async def events():
        async for _ in AsyncLLM.generate(None):
            yield f'data: {{"usage":{UsageInfo(prompt_tokens=100).model_dump_json()}}}\n\n'

    async def serve_tokens(self, request):
        if stream:
            return events()
        async for _ in AsyncLLM.generate(None):
            pass
        return SimpleNamespace(usage=UsageInfo(prompt_tokens=100))

    for module, owner, name in WRAPPED:  # undo the wrappers of `install` after the test
        found = getattr(importlib.import_module(module), owner)
        monkeypatch.setattr(found, name, getattr(found, name))
    monkeypatch.setattr(AsyncLLM, "generate", generate)
    monkeypatch.setattr(ServingTokens, "serve_tokens", serve_tokens)
    usage.install.__wrapped__()

    async def reported_usage():
        response = await ServingTokens.serve_tokens(None, None)
        if not stream:
            return response.usage.prompt_tokens_details.kv_compress
        (event,) = [event async for event in response]
        chunk = json.loads(event.removeprefix("data: "))
        return chunk["usage"]["prompt_tokens_details"]["kv_compress"]

    assert asyncio.run(reported_usage()) == REPORT


IN, XARGS = "vllm.entrypoints.", lambda request: request.vllm_xargs


@pytest.mark.parametrize(
    ("module", "name", "carried"),
    [
        ("openai.chat_completion.protocol", "ChatCompletionRequest", XARGS),
        ("openai.chat_completion.protocol", "BatchChatCompletionRequest", XARGS),
        ("openai.completion.protocol", "CompletionRequest", XARGS),
        ("openai.responses.protocol", "ResponsesRequest", XARGS),
        (
            "scale_out.token_in_token_out.protocol", "GenerateRequest",
            lambda request: request.sampling_params.extra_args,
        ),
        ("serve.tokenize.protocol", "TokenizeCompletionRequest", None),
        ("serve.tokenize.protocol", "DetokenizeRequest", None),
        ("scale_out.token_in_token_out.protocol", "DerenderChatRequest", None),
        ("scale_out.token_in_token_out.protocol", "DerenderChatStreamRequest", None),
        ("scale_out.token_in_token_out.protocol", "DerenderCompletionRequest", None),
        ("scale_out.token_in_token_out.protocol", "DerenderCompletionStreamRequest", None),
        ("anthropic.protocol", "AnthropicCountTokensRequest", None),
    ],
)  # fmt: skip
def test_every_request_type_resolves_an_alias(module, name, carried):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    kind = getattr(importlib.import_module(IN + module), name)
    request = kind.model_construct(model="fast")
    if "sampling_params" in kind.model_fields:
        request.sampling_params = SamplingParams()
    models = SimpleNamespace(_kvcompress_aliases=frozenset({"fast"}), _kvcompress_active=True)
    for _ in range(2):
        resolve(models, request)
    if carried is None:
        return
    assert carried(request) == {"kv_alias": "fast"}
    for own_name in ("slow", None):
        request.model = own_name
        with pytest.raises(VLLMValidationError, match="name the alias in the request's `model`"):
            resolve(models, request)


def test_kept_map_averages_ranks_of_a_stage_and_concatenates_stages():
    from types import SimpleNamespace

    from vllm_kvcompress.engine.doctor.trial_outcome import Outcome, kept_map

    def rank(first):
        return [
            {"share": [[first], [first + 1]], "kept_tokens": [first, 10 * first], "kv_heads": 2}
        ]

    outcome = Outcome(free_before=1, records=[rank(1.0), rank(3.0), rank(5.0), rank(7.0)])
    settings = SimpleNamespace(compress="cake", budget=0.2, resolved_packed_dtype="k4v3")
    request, numbers = SimpleNamespace(settings=settings, prompt=90), (1, 3, 5, 7)
    found = kept_map(outcome, request, "m", numbers=numbers, stages=2)
    assert found.kept_tokens == [2.0, 20.0, 6.0, 60.0]
    assert found.share == [[2.0], [3.0], [6.0], [7.0]]
    assert (found.kv_heads, list(found.names)) == (4, [1, 3, 5, 7])
    assert found.title == "m, cake, budget 0.2, k4v3"
    alone = kept_map(outcome, request, "m")
    assert alone.kept_tokens == [4.0, 40.0]
    assert (alone.kv_heads, list(alone.names)) == (8, [0, 1])
