"""Files are there whole or not at all."""

from __future__ import annotations

import threading

import pytest

from kgen.errors import UsageError
from kgen.files import check_writable, write_whole


def test_two_writers_leave_one_whole_file(tmp_path):
    path = tmp_path / "sub" / "record.json"
    contents = [letter * 200_000 for letter in (b"a", b"b")]
    failed = []

    def write(content):
        try:
            for _ in range(40):
                write_whole(path, content)
                assert path.read_bytes() in contents
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(one,)) for one in contents]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert failed == []
    assert [one.name for one in path.parent.iterdir()] == ["record.json"]


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="folder: cannot be written: it is a folder"):
        write_whole(tmp_path / "folder", b"x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="cannot be written"):
        write_whole(tmp_path / "file" / "below", b"x")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


def test_what_could_not_be_written_is_told_before(tmp_path):
    check_writable(tmp_path / "new" / "deeper" / "record.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    check_writable(tmp_path / "file")
    with pytest.raises(UsageError, match="folder: cannot be written: it is a folder"):
        check_writable(tmp_path / "folder")
    with pytest.raises(UsageError, match="file is not a folder"):
        check_writable(tmp_path / "file" / "below" / "record.json")
