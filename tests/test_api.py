"""Runs from Python show their progress where a person looks, and their results display themselves."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

import raypfl
from raypfl.common.errors import ConfigError
from tests.support import mistaken_methods
from tests.support.runs import experiment


def test_a_result_displays_its_table_and_picture(tmp_path: Path):
    result = raypfl.run(experiment(tmp_path))
    assert isinstance(result, raypfl.Result) and result.plot().size > (800, 400)

    page = result._repr_html_()
    (png,) = re.findall(r'base64,([^"]+)"', page)
    assert base64.b64decode(png).startswith(b"\x89PNG")
    (row, *_) = result.summary()
    assert f"{100 * row['accuracy']:.1f}" in page


def test_progress_is_shown_on_a_terminal_or_on_request_only(tmp_path: Path, capsys):
    result = raypfl.run(experiment(tmp_path), run_dir=tmp_path / "run")
    assert capsys.readouterr().err == "", "standard error is no terminal here"

    longer = raypfl.resume(tmp_path / "run", rounds=result.round + 1, progress=True)
    assert longer.round == result.round + 1
    assert f"finished after round {longer.round}" in capsys.readouterr().err


class PeeksAtItsLoss(mistaken_methods.Base):
    def train(self, clients, theta):
        def loss(p, batch):
            value = clients.loss(p, batch)
            return value * (1.0 if value.item() > 0 else 2.0)

        return {"theta": raypfl.Mean(clients.sgd(loss, theta))}


def test_settings_that_are_given_to_run_are_refused_with_where_they_belong(tmp_path: Path):
    described = experiment(tmp_path)
    with pytest.raises(ConfigError) as refused:
        raypfl.run(described, **{"rounds": 2, "training.lr": 0.5})

    advice = re.search(r"raypfl\.run\((.*)\)\.$", str(refused.value))[1]
    advised = eval(advice, {"experiment": described})
    assert advised == described.override(["rounds=2", "training.lr=0.5"])


def test_warnings_of_a_run_are_printed_where_no_progress_is_shown(tmp_path: Path, capsys):
    peeking = experiment(tmp_path, method=f"{__name__}:PeeksAtItsLoss", engine__executor="vectorised", rounds=1)
    raypfl.run(peeking)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Warning: PeeksAtItsLoss.train.loss (test_api.py, line ") and "one by one" in line


def test_completion_offers_public_names_before_they_are_imported():
    assert dir(raypfl) == sorted(raypfl.__all__)
