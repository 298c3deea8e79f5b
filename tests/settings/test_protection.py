"""Protected parts and spans, as operators and requests write them."""

import pytest

from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.methods.spans import merge_spans
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.protection import Protection, parse_protect, protection_of
from vllm_kvcompress.settings.request_options import RequestOptions


def parse(**changes):
    return CompressionConfig.parse({"compress": "cake", **changes})


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("system", ("system",)),
        (" question , system", ("system", "question")),
        (["tools", "system", "tools"], ("system", "tools")),
        ("none", ()),
    ],
)
def test_an_operator_protects_parts_by_name(written, words):
    parsed = parse(protect=written)
    assert parsed.protection.words == words
    assert CompressionConfig.parse(parsed.to_additional_config()) == parsed
    assert parse(protect=written, allow_override="all").variant("tova").protection.words == words


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("sytem", "'sytem' is unknown; did you mean 'system'"),
        ("system,none", "none cannot be combined"),
        ("", "must be one or more of system, tools, question"),
        ("system,,tools", "must be one or more of system, tools, question"),
        (True, "must be one or more of system, tools, question"),
        (None, "must be one or more of system, tools, question"),
        ("system,0:20", "only a request can give token spans"),
        ([[0, 20]], "only a request can give token spans"),
    ],
)
def test_malformed_protect_settings_are_refused(written, message):
    with pytest.raises(ConfigError, match=f"protect.*{message}"):
        parse(protect=written)


@pytest.mark.parametrize(
    ("written", "spans"),
    [
        ("0:200", ((0, 200),)),
        ("system, 5:9,20:21", ((5, 9), (20, 21))),
        ([[5, 9], (20, 21), "30:40"], ((5, 9), (20, 21), (30, 40))),
        ([], ()),
    ],
)
def test_a_request_can_give_token_spans(written, spans):
    assert parse_protect("kv_protect", written)[1] == spans


MALFORMED = ["-1:5", "1:2:3", "5:", ":5", "a:b", "٣:٤", 5, [5], ["\x1b[2J\n"]]
MALFORMED += [[[1]], [[1, 2, 3]], [[0, 2.0]], [[True, 2]], [[2 * i, 2 * i + 1] for i in range(257)]]
MALFORMED += ["0:1234567890123", f"0:{'9' * 5000}", 10**5000, [[0, 10**5000]], "0:1," * 1000]
MALFORMED += ["a" * 10_000_000, ["system" + " " * 10_000_000]]


@pytest.mark.parametrize("written", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_spans_are_refused(written):
    with pytest.raises(OverrideError, match="kv_protect must be") as failed:
        protection_of((), {"kv_protect": written}, may_choose=True)
    assert failed.value.reason == "invalid"
    assert len(str(failed.value)) < 240


@pytest.mark.parametrize(
    ("protect", "value", "may_choose", "expected"),
    [
        (("system",), None, False, Protection(("system",), (), ("system",))),
        (("system",), {}, True, Protection(("system",), (), ("system",))),
        # without override permission, a request adds to the operator's parts
        (("system",), "tools", False, Protection(("system", "tools"), (), ("system",), ("tools",))),
        (("system",), "3:5", False, Protection(("system",), ((3, 5),), ("system",))),
        # with override permission, a request replaces them
        (("system",), "tools", True, Protection(("tools",), (), (), ("tools",))),
        (("system", "tools"), "tools", True, Protection(("tools",), (), ("tools",), ("tools",))),
        (("system",), "none", True, Protection()),
        ((), "none", False, Protection()),
    ],
)
def test_protection_depends_on_override_permission(protect, value, may_choose, expected):
    extra_args = value if value in (None, {}) else {"kv_protect": value}
    assert protection_of(protect, extra_args, may_choose=may_choose) == expected


def test_requests_cannot_remove_the_operators_protection():
    with pytest.raises(
        OverrideError, match="protects system, and requests cannot change that"
    ) as failed:
        protection_of(("system",), {"kv_protect": "none"}, may_choose=False)
    assert failed.value.reason == "not_allowed"


def test_protection_is_not_a_choice_of_a_method():
    parsed = parse(protect="system")
    assert RequestOptions.parse(parsed, {"kv_protect": "0:9"}).settings is parsed
    assert RequestOptions.parse(None, {"kv_protect": "0:9"}).settings is None
    with pytest.raises(OverrideError, match="did you mean 'kv_protect'"):
        RequestOptions.parse(parsed, {"kv_protekt": "0:9"})


def test_overlapping_and_adjacent_spans_are_joined():
    assert merge_spans([(5, 9), (0, 3), (8, 12), (3, 5)]) == ((0, 12),)
    assert merge_spans([(5, 9), (0, 3)]) == ((0, 3), (5, 9))
    assert merge_spans([]) == ()
