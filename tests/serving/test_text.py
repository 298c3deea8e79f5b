"""The text of the built-in tasks is the same on every Python version."""

import hashlib

from vllm_kvcompress.serving.text import english


def test_the_text_is_the_manual_of_python_3_11_7() -> None:
    text = english()
    assert len(text) == 465_126
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "71f2ff5d99bdc1f9c48c5c2353ad138201c5ca1c377e0226857ef8fa89b8bcee"
