"""Tables in terminals of any width."""

from __future__ import annotations

from itertools import product

import pytest
from rich.console import Console

from raypfl.cli.actions.jobs import _table as jobs_table
from raypfl.cli.actions.tune import _table as trials_table
from raypfl.experiment import Experiment
from raypfl.integrations.tuning.result import SweepResult
from raypfl.integrations.tuning.sweep import load
from raypfl.integrations.tuning.trial import Trial
from raypfl.results.display.fitting import fit_table
from raypfl.studies.description import PublishedNumber
from raypfl.studies.table import formats, layout
from raypfl.studies.table.entries import TableEntry

JOB = {"job": "digits-ditto-20261123-170253-ab12", "status": "SUCCEEDED", "began": "2026-11-23 17:02", "seconds": 754.0}
COMMAND = "raypfl run digits method=ditto method.lam=0.5 partition.alpha=0.1 seeds=3"


def printed(table: object, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def sweep_of_three_trials() -> SweepResult:
    """A sweep with a running, a finished and a failed trial."""
    search = {
        "method": {"choice": ["fedavg", {"name": "ditto", "lam": {"loguniform": [0.001, 10]}}]},
        "training.lr": {"loguniform": [0.01, 0.5]},
    }
    sweep = load({"name": "s", "experiment": {"data": {"val_fraction": 0.2}}, "search": search, "trials": 3})
    drawn = [{"method": 0, "training.lr": 0.0321}, {"method": 1, "method.lam@1": 0.125, "training.lr": 0.321}]
    trials = [
        Trial("00000", drawn[0], "running", 12, {"accuracy/val": 0.912}),
        Trial("00001", drawn[1], "finished", 20, {"accuracy/val": 0.834}),
        Trial("00002", drawn[0], "failed", 3, error="Client 3 diverged in round 4: its loss is nan."),
    ]
    return SweepResult(sweep, trials, ["max"], Experiment().measures)


@pytest.mark.parametrize("width", range(52, 130, 4))
def test_a_sweeps_table_keeps_whole_words_and_leaves_out_whole_columns(width: int):
    sweep = sweep_of_three_trials()
    table, left_out = trials_table(width, sweep, sweep.trials)
    lines = printed(table, width)
    words = {word for line in lines for word in line.split()}

    assert max(map(len, lines)) <= width
    assert {"accuracy/", "val", "91.2", "running", "finished", "diverged"} <= words

    columns = {"training.lr": {"training.", "lr", "0.0321"}, "method.lam": {"method.", "lam", "0.125"}}
    for name, parts in columns.items():
        if name in left_out:
            assert not parts - {"method."} <= words  # the column `method` may be there
        else:
            assert parts <= words
    assert (left_out == []) == (width > 60)


@pytest.mark.parametrize("width", range(72, 150, 6))
def test_the_command_of_a_job_is_readable_at_any_width(width: int):
    lines = printed(jobs_table([JOB | {"command": COMMAND}], width), width)
    words = {word for line in lines for word in line.split()}
    assert max(map(len, lines)) <= width and {JOB["job"], JOB["status"], *COMMAND.split()} <= words
    assert ("began" in words) == (width >= 90)


@pytest.mark.parametrize("width", range(44, 160, 8))
def test_a_studys_numbers_are_whole_at_any_width(width: int):
    columns = list(product(("CIFAR-10, n=100", "FEMNIST"), ("seen", "unseen")))
    published = PublishedNumber(71.2, 3.1)
    entries = []
    for m, method in enumerate(("FedAvg", "Per-FedAvg"), 1):
        for k, (across, metric) in enumerate(columns):
            entries.append(TableEntry(method, "", across, metric, (10.0 * m + k,), (12.345,), 0, published, "clients"))

    (block,) = layout.blocks(entries)
    parts = list(formats._parts(block, Console(width=width)))
    lines = [line for part in parts for line in printed(part, width)]
    words = [word for line in lines for word in line.split()]

    assert max(map(len, lines)) <= width
    numbers = sorted(word for word in words if "12.35" in word)
    assert numbers == [f"{10 * m + k}.00±12.35" for m, k in product((1, 2), range(4))]
    assert {"Per-FedAvg", "published", "CIFAR-10,", "n=100", "(+9.25)"} <= {*words}
    assert (len(parts) == 1) == (width >= 76)


def test_an_interval_stays_whole_and_names_fold_in_its_place():
    columns = {"method": ["fedavg attack=sign_flip"], "interval": ["-14.0 to -4.3"], "draws": ["0%"]}
    fitting, left_out = fit_table(36, columns, ["draws"], whole=["interval"])
    assert left_out == ["draws"] and any("-14.0 to -4.3" in line for line in printed(fitting, 36))
