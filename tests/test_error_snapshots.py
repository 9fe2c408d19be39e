"""Error texts as users see them: tests/errors/*.yaml against the .txt beside each.

After a deliberate change of wording regenerate them and read the diff:

    KGEN_UPDATE_SNAPSHOTS=1 python -m pytest tests/test_error_snapshots.py
"""

import os

import pytest
from helpers import TESTS

from kgen.errors import SpecError
from kgen.spec import load_spec

CASES = sorted((TESTS / "errors").glob("*.yaml"))


def error_text(path) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    return str(caught.value).replace(str(path), path.name) + "\n"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_error_text_is_the_expected_one(path):
    expected, text = path.with_suffix(".txt"), error_text(path)
    if os.environ.get("KGEN_UPDATE_SNAPSHOTS") == "1":
        expected.write_text(text, "utf-8")
    assert expected.read_text("utf-8") == text, "KGEN_UPDATE_SNAPSHOTS=1 regenerates it"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_line_is_an_issue_of_the_file_or_a_hint(path):
    for line in error_text(path).splitlines():
        assert line.startswith((f"{path.name}:", "  hint: "))
        assert len(line) < 400


def test_there_are_cases_and_no_text_without_one():
    assert len(CASES) >= 12
    texts = {path.stem for path in (TESTS / "errors").glob("*.txt")}
    assert texts == {path.stem for path in CASES}
