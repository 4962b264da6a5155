"""What `raypfl run` says before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypfl.cli.run_commands import extended_to_equal_rounds, replaced_rounds, shared_options
from raypfl.experiment import experiments
from raypfl.experiment.recipes import settings_of
from raypfl.runs.folders import ComparisonFolder
from tests.support.command import raypfl


def test_an_option_that_a_command_sets_in_several_methods_is_said_with_their_names():
    compared = {"methods": ["fedavg", "ditto", "fedprox", "pfedme"]}
    changes = ["method.lam=2", "method.mu=1", "training.lr=0.1"]
    (sentence,) = shared_options(experiments(compared, changes), changes)
    assert sentence.startswith("method.lam=2 applies to ditto and pfedme.")
    assert sentence.endswith("'methods=[{name: ditto, lam: ...}, pfedme]'.")


def test_one_number_of_rounds_for_methods_that_have_their_own_is_said(tmp_path):
    source = settings_of("fedbuff-digits")
    (sentence,) = replaced_rounds(source, experiments(source, ["rounds=8"]))
    assert sentence.startswith("All methods get 8 rounds, also those with rounds of their own: fedavg (40) and ditto")
    assert replaced_rounds(source, experiments(source)) == []
    assert replaced_rounds(source, experiments(source, ["method=local", "rounds=8"])) == []

    ComparisonFolder.new(experiments(source), ["fedbuff-digits"], tmp_path)
    (sentence,) = extended_to_equal_rounds(tmp_path, ["rounds=160"])
    assert "fedavg-s0 (40), fedavg-s0-2 (80), ditto-s0 (40) and ditto-s0-2 (80)" in sentence
    assert extended_to_equal_rounds(tmp_path, ["checkpoint.every=5"]) == []


def test_an_option_before_the_word_new_is_answered_with_the_order():
    refused = raypfl("study", "--seeds", "2", "new", "mine.yaml", "methods=[fedavg,ditto]")
    assert refused.exit_code == 2 and "right after 'study'" in refused.stderr


@pytest.mark.parametrize(
    ("command", "content", "remedy"),
    [
        ("run", "search: {training.lr: {uniform: [0, 1]}}", "a sweep: raypfl tune"),
        ("tune", "method: ditto", "an experiment: raypfl run"),
        ("run", "methods: {Ditto: ditto}", "a study: raypfl study"),
        ("tune", "extends: pfllib-table", "a study: raypfl study"),
        ("study", "search: {training.lr: {uniform: [0, 1]}}", "a sweep: raypfl tune"),
    ],
)
def test_a_file_for_another_command_is_answered_with_that_command(tmp_path: Path, command, content, remedy):
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    shown = raypfl(command, str(file))
    assert shown.exit_code == 2 and f"describes {remedy} {file}" in " ".join(shown.output.split())
