"""What becomes of a test whose machine lacks a command."""

import pytest

import tools


@pytest.mark.parametrize(("ci", "ends"), [("", pytest.skip), ("true", pytest.fail)])
def test_it_is_skipped_and_fails_in_ci(ci, ends, monkeypatch):
    monkeypatch.setenv("CI", ci)
    with pytest.raises(ends.Exception, match=r"needs the command `nowhere`; install a package$"):
        tools.find("nowhere", "a package")


def test_a_command_that_is_there_is_found():
    assert tools.find("sh", "dash").endswith("/sh")
