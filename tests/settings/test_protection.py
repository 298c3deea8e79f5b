"""What may be protected, as operators and requests write it."""

import pytest

from vllm_kvcompress.errors import ConfigError, OverrideError
from vllm_kvcompress.methods.spans import joined
from vllm_kvcompress.settings.config import CompressionConfig
from vllm_kvcompress.settings.overrides import by_role_for, settings_for
from vllm_kvcompress.settings.protection import Protection, parse_protect, protection_of
from vllm_kvcompress.settings.request_keys import BY_ROLE


def of(**more):
    return CompressionConfig.parse({"compress": "cake", **more})


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("system", ("system",)),
        (" question , system", ("system", "question")),
        (["tools", "system", "tools"], ("system", "tools")),
        ("none", ()),
    ],
)
def test_an_operator_writes_words(written, words):
    made = of(protect=written)
    assert made.protect == words
    assert CompressionConfig.parse(made.to_additional_config()) == made
    assert of(protect=written, allow_override="all").variant("tova").protect == words


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("sytem", "'sytem' is unknown; did you mean 'system'"),
        ("system,none", "none stands alone"),
        ("", "must be some of system, tools, question"),
        ("system,,tools", "must be some of system, tools, question"),
        (True, "must be some of system, tools, question"),
        (None, "must be some of system, tools, question"),
        ("system,0:20", "only a request knows its tokens"),
        ([[0, 20]], "only a request knows its tokens"),
    ],
)
def test_what_no_operator_may_write(written, message):
    with pytest.raises(ConfigError, match=f"protect.*{message}"):
        of(protect=written)


@pytest.mark.parametrize(
    ("written", "spans"),
    [
        ("0:200", ((0, 200),)),
        ("system, 5:9,20:21", ((5, 9), (20, 21))),
        ([[5, 9], (20, 21), "30:40"], ((5, 9), (20, 21), (30, 40))),
        ([], ()),
    ],
)
def test_a_request_names_tokens_too(written, spans):
    assert parse_protect("kv_protect", written)[1] == spans


@pytest.mark.parametrize(
    "written",
    [
        *(f"0:{'9' * 5000}", "0:1234567890123"),
        *("-1:5", "1:2:3", "5:", ":5", "a:b", "٣:٤", 5),
        *([5], [[1]], [[1, 2, 3]], [[0, 2.0]], [[True, 2]]),
    ],
)
def test_what_is_no_span(written):
    with pytest.raises(OverrideError, match="kv_protect must be") as failed:
        protection_of((), {"kv_protect": written}, free=True)
    assert failed.value.reason == "invalid"
    assert len(str(failed.value)) < 240


@pytest.mark.parametrize(
    ("protect", "asked", "free", "want"),
    [
        (("system",), None, False, Protection(("system",), (), ("system",))),
        (("system",), {}, True, Protection(("system",), (), ("system",))),
        # without overrides a request adds
        (("system",), "tools", False, Protection(("system", "tools"), (), ("system",), ("tools",))),
        (("system",), "3:5", False, Protection(("system",), ((3, 5),), ("system",))),
        # with them it chooses
        (("system",), "tools", True, Protection(("tools",), (), (), ("tools",))),
        (("system", "tools"), "tools", True, Protection(("tools",), (), ("tools",), ("tools",))),
        (("system",), "none", True, Protection()),
        ((), "none", False, Protection()),
    ],
)
def test_who_decides(protect, asked, free, want):
    extra_args = asked if asked in (None, {}) else {"kv_protect": asked}
    assert protection_of(protect, extra_args, free=free) == want


def test_what_the_operator_protects_is_not_taken_off():
    with pytest.raises(OverrideError, match="protects system, and does not let") as failed:
        protection_of(("system",), {"kv_protect": "none"}, free=False)
    assert failed.value.reason == "not_allowed"


def test_asking_for_protection_is_no_choice_of_a_method():
    made = of(protect="system")
    assert settings_for(made, {"kv_protect": "0:9"}) is made
    assert settings_for(None, {"kv_protect": "0:9"}) is None
    with pytest.raises(OverrideError, match="did you mean 'kv_protect'"):
        settings_for(made, {"kv_protekt": "0:9"})


def test_spans_that_overlap_or_touch_are_one():
    assert joined([(5, 9), (0, 3), (8, 12), (3, 5)]) == ((0, 12),)
    assert joined([(5, 9), (0, 3)]) == ((0, 3), (5, 9))
    assert joined([]) == ()


@pytest.mark.parametrize(
    ("more", "asked", "message"),
    [
        ({}, "yes", "kv_by_role must be true or false, got 'yes'"),
        ({}, [1], r"kv_by_role must be true or false, got \[1\]"),
        ({"usage": False}, True, "ask the operator for --kv-usage"),
        ({"allow_override": ""}, True, "ask the operator for --kv-allow-override"),
    ],
)
def test_who_may_ask_what_is_kept_of_roles(more, asked, message):
    may = {"compress": "snapkv", "usage": True, "allow_override": "cake"}
    settings = CompressionConfig.parse(may)
    assert by_role_for(settings, {BY_ROLE: True})
    assert not by_role_for(settings, {BY_ROLE: False})
    assert not by_role_for(settings, None)
    # asking is no choice of a method
    assert settings_for(settings, {BY_ROLE: True}) is settings
    with pytest.raises(OverrideError, match=message):
        by_role_for(
            CompressionConfig.parse({k: v for k, v in (may | more).items() if v}), {BY_ROLE: asked}
        )
    with pytest.raises(
        OverrideError, match="without KV-cache compression, but the request asks for kv_by_role"
    ):
        settings_for(None, {BY_ROLE: True})


def test_numbers_that_python_writes_no_text_of():
    for written in (10**5000, [[0, 10**5000]]):
        with pytest.raises(OverrideError, match="kv_protect must be"):
            protection_of((), {"kv_protect": written}, free=True)
