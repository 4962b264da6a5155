"""Files that grow line by line."""

from __future__ import annotations

from pathlib import Path

from raypfl.common.files import append_line


def test_a_line_is_appended_as_it_is_and_ends_one_that_was_cut_off(tmp_path: Path):
    file = tmp_path / "lines"
    append_line(file, "one")
    append_line(file, "two")
    assert file.read_text() == "one\ntwo\n"
    file.write_text("one\ntw")
    append_line(file, "three")
    assert file.read_text() == "one\ntw\nthree\n"
