"""Misplaced settings in a request, and JSON with repeated keys."""

import difflib

import pytest

from vllm_kvcompress.errors import OverrideError
from vllm_kvcompress.settings.request_keys import misplaced, refuse_misplaced, refuse_unknown
from vllm_kvcompress.settings.request_options import RequestOptions
from vllm_kvcompress.settings.text import RepeatedKeyError, parse_json

FIELDS = {"model", "prompt", "metadata", "vllm_xargs", "kv_transfer_params", "kv_new_in_vllm"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"kv_budget": 0.05}, "'kv_budget' (0.05) must be inside vllm_xargs"),
        ({"kv_bugdet": 0.05}, "did you mean 'kv_budget' inside vllm_xargs?"),
        ({"kv_packed_dtype": "k4v3"}, "'kv_packed_dtype' ('k4v3') must be inside vllm_xargs"),
        ({"kvPackedDtype": "k4v3"}, "did you mean 'kv_packed_dtype' inside vllm_xargs?"),
        ({"Kv-Budget": 0.05}, "'Kv-Budget' is not a field of the request; did you mean 'kv_budg"),
        ({"kv_alias": "half"}, "name the alias in the request's `model`"),
        ({"kv_cache_report_mode": "full"}, "inside vllm_xargs?"),
        ({"kv_" + "x" * 10**6: 1}, "inside vllm_xargs a request may set"),
        ({"vllm_xarg": {"kv_budget": 1}}, "did you mean vllm_xargs? It holds 'kv_budget'"),
        ({"vllmXargs": {"budget": 1}}, "did you mean vllm_xargs? It holds 'budget'"),
        ({"xargs": {"kv-budget": 1}}, "did you mean vllm_xargs? It holds 'kv-budget'"),
        ({"sampling_params": {"extra_args": {"kv_budget": 1}}}, "did you mean vllm_xargs?"),
        ({"sampling_params": {"extra_args": {"kvbudget": 1}}}, "It holds 'kvbudget'"),
        ({"options": [{"kv-budget": 1}]}, "It holds 'kv-budget'"),
        ({"extra_body": {"top_k": 1}}, "'extra_body' is an argument of the openai client"),
        ({"extra_body": {"vllm_xarg": {}}}, "'extra_body' is an argument of the openai client"),
        ({"extraBody": {"kv_budget": 1}}, "'extraBody' is an argument of the openai client"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_misplaced_settings_are_refused(body, words):
    with pytest.raises(OverrideError) as refusal:
        refuse_misplaced({"model": "m", **body}, FIELDS)
    assert words in str(refusal.value)
    assert refusal.value.reason == "invalid"
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    "body",
    [
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"kv_new_in_vllm": 1},
        {"metadata": {"kv_budget": 1}},
        {"vllm_xargs": {"kv_budget": 1}},
        {"options": [{"budget": 1}], "args": {"budget": 5}},
        {"nvext": {"kv_overlap": 1}},
        {"budget": 1, "compress": True},
        {"vllm_xarg": {"other": 1}},
    ],
    ids=repr,
)
def test_other_keys_are_left_to_vllm(body):
    refuse_misplaced(body, FIELDS)
    refuse_misplaced({"kv_transfer_params": None}, {"model"})


def test_without_compression_only_exact_keys_count():
    body = {"kv_budget": 0.1, "kv_bugdet": 0.1, "model": "m"}
    assert misplaced(body, FIELDS) == {"kv_budget": 0.1}


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 1}', '{"b": [{"a": 1, "c": 2, "a": 3}]}', '[{"a": {"a": 1, "a": 2}}]']
)
def test_a_repeated_json_key_is_refused(text):
    with pytest.raises(RepeatedKeyError, match="the key 'a' is given twice in one object; remove"):
        parse_json(text)


def test_other_json_parses_as_in_python():
    assert parse_json('{"a": [1, {"a": 0.5}], "b": null}') == {"a": [1, {"a": 0.5}], "b": None}
    with pytest.raises(ValueError, match="Expecting"):
        parse_json("{")


def test_a_server_without_compression_refuses_misplaced_settings():
    with pytest.raises(OverrideError, match="runs without KV-cache compression"):
        RequestOptions.parse(None, misplaced({"kv_compress": "cake"}, FIELDS))
    for body in ({"kv_compress": "off"}, {"kv_bugdet": 1}, {"vllm_xarg": {"kv_budget": 1}}, {}):
        assert RequestOptions.parse(None, misplaced(body, FIELDS)).settings is None


class Counted(dict):
    """An object that counts how many entries of all its kind are read."""

    read = 0

    def items(self):
        for item in super().items():
            Counted.read += 1
            yield item


def wide(key, value=1, count=3000):
    return Counted({key.format(i=i): value for i in range(count)})


@pytest.mark.parametrize(
    "body",
    [
        {"zz": wide("kvtdegbudceod{i:05}")},
        {"zz": [wide("kvtdegbudceod{i:05}")] * 9},
        {"zz": wide("a{i}", wide("b{i}", wide("kvtdegbudceod{i:05}", count=60), count=60))},
        wide("kvtdegbudceod{i:05}"),
        wide("vlm_xrgs{i}", {}),
        wide("vlm_xrgs{i}", wide("kvtdegbudceod{i:05}", count=60)),
        {"zz": [{}] * 3000},
    ],
    ids=["nested", "lists", "deep", "top level", "like vllm_xargs", "both", "a long list"],
)
def test_the_search_for_keys_does_not_grow_with_the_request(body, monkeypatch):
    compared = []
    similar = difflib.get_close_matches
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda *args: compared.append(args[0]) or similar(*args)
    )
    for check in (lambda: refuse_misplaced(body, FIELDS), lambda: refuse_unknown(body)):
        compared.clear()
        Counted.read = 0
        check()
        assert len(compared) <= 100
        assert Counted.read <= 1000 + 4  # each level of objects reads one more before it ends
        assert all(len(text) <= 24 for text in compared)


def test_our_keys_are_found_behind_many_others():
    body = {**{f"a{i}": i for i in range(5000)}, "kv_budget": 0.1}
    with pytest.raises(OverrideError, match=r"'kv_budget' \(0.1\) must be inside"):
        refuse_misplaced(body, FIELDS)
    nested = {"zz": {f"kvtdegbudceod{i}": i for i in range(200)} | {"kv-budget": 0.1}}
    with pytest.raises(OverrideError, match="'kv-budget'"):
        refuse_misplaced(nested, FIELDS)
    with pytest.raises(OverrideError, match="'kv-budget'"):
        refuse_unknown(nested)
