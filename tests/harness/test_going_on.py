"""Does a test run that was cut off go on with what is missing, and forget everything where a source has changed?"""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
def test_one(monkeypatch):
    monkeypatch.setattr("pathlib.Path.open", lambda self, mode: open("/dev/full", mode))

def test_two():
    from pathlib import Path
    assert Path("may_pass").exists()
"""


def outcomes(pytester: pytest.Pytester, *words: str) -> dict[str, int]:
    result = pytester.runpytest_inprocess("-p", "tests.harness.going_on", *words)
    return {name: count for name, count in result.parseoutcomes().items() if name != "warnings"}


def test_what_passed_is_left_out_until_a_source_changes(pytester: pytest.Pytester) -> None:
    tests = pytester.path / "tests"
    tests.mkdir()
    (tests / "test_it.py").write_text(TESTS)
    assert outcomes(pytester, "--go-on") == {"passed": 1, "failed": 1}
    assert outcomes(pytester, "--go-on") == {"deselected": 1, "failed": 1}
    assert outcomes(pytester) == {"passed": 1, "failed": 1}
    Path("may_pass").touch()
    assert outcomes(pytester, "--go-on") == {"deselected": 1, "passed": 1}
    assert outcomes(pytester, "--go-on") == {"deselected": 2}
    (tests / "test_it.py").write_text(TESTS + "\n# changed\n")
    assert outcomes(pytester, "--go-on") == {"passed": 2}
