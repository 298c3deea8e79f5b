"""Test ids of parametrized tests."""

import pytest
import torch

from parameter_ids import readable

CASES = {
    "T4096": ("tokens", 4096),
    "bsS": ("block", "S"),
    "shift=-95.0": ("shift", -95.0),
    "fast": ("fast", True),
    "not_fast": ("fast", False),
    "bfloat16": ("dtype", torch.bfloat16),
    "kept_dtype=int64": ("kept_dtype", torch.int64),
    "counts=3,0,1": ("counts", [3, 0, 1]),
    "pages=int32[2,3]": ("change", {"pages": torch.zeros(2, 3, dtype=torch.int32)}),
    "no_change": ("change", {}),
    r"text='a\nb'": ("change", {"text": "a\nb"}),
}


@pytest.mark.parametrize("expected", CASES)
def test_ids_describe_the_parameters(expected):
    assert readable(*CASES[expected]) == expected


def test_strings_and_functions_keep_pytests_ids():
    assert (
        readable("method", "cake") is readable("writer", test_ids_describe_the_parameters) is None
    )


@pytest.mark.parametrize(("dim", "fast"), [(80, False)])
def test_pytest_uses_the_ids(dim, fast, request):
    assert request.node.name == "test_pytest_uses_the_ids[D80-not_fast]"
