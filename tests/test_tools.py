"""Tests that need a command which is not installed are skipped, and fail in CI."""

import pytest

import tools


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip), ("true", pytest.fail)])
def test_a_missing_command_skips_the_test_and_fails_it_in_ci(ci, outcome, monkeypatch):
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome.Exception, match=r"needs the command `nowhere`; install a package$"):
        tools.find("nowhere", "a package")


def test_an_installed_command_is_found():
    assert tools.find("sh", "dash").endswith("/sh")
