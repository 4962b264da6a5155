"""Runs from Python show their progress where a person looks, and their results display themselves."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import raypfl
from tests.support.runs import experiment


def test_a_result_shows_its_table_and_picture_and_progress_only_if_somebody_looks(tmp_path: Path, capsys):
    result = raypfl.run(experiment(tmp_path), run_dir=tmp_path / "one")
    assert capsys.readouterr().err == "", "standard error is no terminal here"
    assert isinstance(result, raypfl.Result) and result.plot().size > (800, 400)
    page = result._repr_html_()
    (png,) = re.findall(r'base64,([^"]+)"', page)
    assert base64.b64decode(png).startswith(b"\x89PNG")
    (row, *_) = result.summary()
    assert f"{100 * row['accuracy']:.1f}" in page
    longer = raypfl.resume(tmp_path / "one", overrides=[f"rounds={result.round + 1}"], progress=True)
    assert longer.round == result.round + 1
    assert f"finished after round {longer.round}" in capsys.readouterr().err


def test_completion_offers_what_is_public_before_it_is_imported():
    assert dir(raypfl) == sorted(raypfl.__all__)
