"""The text of built-in tasks: the same on every Python, or no figure could be found again."""

import hashlib

from vllm_kvcompress.serving.text import english


def test_the_manual_is_that_of_one_release() -> None:
    text = english()
    assert len(text) == 465_126
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "71f2ff5d99bdc1f9c48c5c2353ad138201c5ca1c377e0226857ef8fa89b8bcee"
