"""Paired differences between methods: their intervals, the remarks on them, and where they are shown."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from itertools import product
from math import inf
from statistics import fmean, stdev
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import scipy.stats

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.data.datasets.settings import DataConfig
from raypfl.data.partitions import IID, ByColumn, FromFile, Partition
from raypfl.engine.events import Evaluated
from raypfl.experiment import Experiment
from raypfl.federation.logged import LOGGED
from raypfl.integrations.tracking.entries import (
    comparison_description,
    comparison_metrics,
    comparison_scores,
    evaluation_points,
    run_score,
)
from raypfl.results.display import latex
from raypfl.results.display.compare import compare
from raypfl.results.pairing import bootstrap
from raypfl.results.pairing.differences import Difference, differences, find_baseline, find_label, keeps_clients
from raypfl.results.pairing.remarks import COVERAGE, remarks
from raypfl.results.report import write
from raypfl.results.report.lead import lead_of
from raypfl.results.report.parts import part_of
from raypfl.results.run_groups import group_runs, methods_without_result
from raypfl.results.table import Column, result_columns, result_rows
from raypfl.runs.result import RunResult
from raypfl.storage.columns import Columns
from raypfl.storage.tables import to_arrow
from tests.results.test_picture import made_up, printed, show, with_columns

ISSUE = {"fedavg": (91.0, 94.9, 94.3), "ditto": (93.3, 96.8, 97.4)}
"""Accuracies of three seeds, in %: 93.4±2.1 and 95.8±2.2, but +2.3, +1.9 and +3.1 seed by seed."""

CLIENTS = 20


def runs_at(levels: dict[str, tuple[float, ...]]) -> list[RunResult]:
    """Runs with these mean accuracies, in %, a seed each; a client is equally easy for every method."""
    runs = []
    for method, means in levels.items():
        runs += [run_at(method, seed, mean) for seed, mean in enumerate(means)]
    return runs


def run_at(method: str, seed: int, mean: float) -> RunResult:
    draws = np.random.default_rng(seed)
    ease = 10 * draws.normal(size=CLIENTS)
    suits_method = draws.normal(size=CLIENTS) if method == "ditto" else np.zeros(CLIENTS)
    accuracy = (mean + ease - ease.mean() + suits_method - suits_method.mean()) / 100

    run = made_up(method, ("global",), seed=seed, clients=CLIENTS, rounds=(10,))
    values = pa.array(np.tile(accuracy, run.evaluations.num_rows // CLIENTS))
    spent = {name: [1_155_000] * 10 for name in ("bytes_up", "bytes_down")}
    return RunResult(
        experiment=run.experiment,
        run_dir=run.run_dir,
        status="finished",
        round=10,
        weights_hash="3fa2c19d88e0",
        best_round=None,
        metadata={"data": f"partition of seed {seed}", "startup_seconds": 1.0},
        rounds=pa.table(
            {"round": range(1, 11), "loss": [0.5] * 10, "seconds": [0.5] * 10, "clients": [4] * 10, **spent}
        ),
        evaluations=run.evaluations.set_column(5, "accuracy", values),
        ledger=run.ledger,
        logged=to_arrow(Columns(LOGGED)),
        analysis={},
        images=to_arrow(Columns({"round": "int32", "name": "text", "file": "text"})),
    )


def ended_after(last: int, run: RunResult, status: str) -> RunResult:
    """The same run with this status, whose evaluations are of round `last`."""
    position = run.evaluations.column_names.index("round")
    rounds = pa.array(np.full(run.evaluations.num_rows, last))
    return replace(run, status=status, round=last, evaluations=run.evaluations.set_column(position, "round", rounds))


def of_local_protocol(rows: list[Difference]) -> Difference:
    (row,) = [row for row in rows if row.protocol == "local"]
    return row


def bootstrap_by_loops(values: list[np.ndarray], same: bool, count: int) -> np.ndarray:
    """The bootstrap as textbooks describe it, draw by draw: seeds, and clients within each seed.

    If `same`, all seeds have the same clients, which are drawn once for all of them.
    """
    draws = np.random.default_rng(5)
    means = []
    for _ in range(count):
        same_clients = draws.integers(len(values[0]), size=len(values[0]))
        seeds = [values[draws.integers(len(values))] for _ in values]

        seed_means = []
        for seed in seeds:
            clients = same_clients if same else draws.integers(len(seed), size=len(seed))
            seed_means.append(float(seed[clients].mean()))
        means.append(fmean(seed_means))
    return np.array(means)


@pytest.mark.parametrize("same", [False, True], ids=["other clients in every seed", "the same clients"])
@pytest.mark.parametrize("clients", [8, 300], ids=["few", "many"])
def test_the_bootstrap_over_seeds_and_clients_is_that_of_plain_loops(same: bool, clients: int):
    draws = np.random.default_rng(1)
    of_client = draws.exponential(size=clients)  # the same in every seed, skewed
    values = [of_seed + of_client + draws.exponential(size=clients) for of_seed in (0.0, 0.4, 0.5)]

    means = bootstrap.draws(values, same)
    expected = bootstrap_by_loops(values, same, 10_000)

    shares = (0.025, 0.25, 0.5, 0.75, 0.975)
    np.testing.assert_allclose(np.quantile(means, shares), np.quantile(expected, shares), atol=0.08 * expected.std())
    np.testing.assert_array_equal(means, bootstrap.draws(values, same))


@pytest.mark.parametrize(
    ("partition", "same"),
    [(ByColumn(), True), (ByColumn(clients=3), False), (FromFile(file="owners.json"), True), (IID(), False)],
)
def test_clients_are_the_same_in_every_seed_unless_the_partition_draws_them(partition: Partition, same: bool):
    experiment = SimpleNamespace(data=DataConfig(), partition=partition)
    assert keeps_clients(SimpleNamespace(experiment=experiment)) == same


def test_with_one_seed_the_interval_is_scipys_paired_one_over_clients_and_the_remarks_say_so():
    def mean_difference(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return (a - b).mean(axis)

    runs = [run for run in runs_at(ISSUE) if run.experiment.seed == 0]
    row = of_local_protocol(differences(group_runs(runs), "fedavg"))

    fedavg, ditto = (run.evaluations.slice(0, 20)["accuracy"].to_numpy() for run in runs)
    bootstrapped = scipy.stats.bootstrap(
        (ditto, fedavg), mean_difference, paired=True, method="percentile", random_state=0
    )
    expected = bootstrapped.confidence_interval
    np.testing.assert_allclose((row.low, row.high), (100 * expected.low, 100 * expected.high), atol=0.05)
    text = " ".join(remarks([row], group_runs(runs)))
    assert "draws of the clients. There is only one seed" in text


def test_one_client_with_one_seed_has_no_interval_and_the_remarks_say_why():
    compared = group_runs([run for run in runs_at(ISSUE) if run.experiment.seed == 0])
    row = of_local_protocol(differences(compared, "fedavg"))
    alone = replace(row, low=None, high=None, draws_ahead=None, over_clients=False)
    sentence = "No interval (–): there is one seed, and in it one test, of global models or of a single client."
    assert sentence in remarks([alone], compared) and sentence in remarks([row, alone], compared)
    assert sentence not in remarks([row], compared)


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [0, 1, 2, 5, 3, 4], [1, 4, 0, 3, 2, 5]])
def test_an_interval_does_not_depend_on_the_order_in_which_runs_are_named(order: list[int]):
    runs = runs_at(ISSUE)
    ascending = of_local_protocol(differences(group_runs(runs), "fedavg"))
    named_otherwise = of_local_protocol(differences(group_runs([runs[i] for i in order]), "fedavg"))
    assert named_otherwise == ascending and list(named_otherwise.by_seed) == [0, 1, 2]


def test_a_method_that_is_ahead_in_every_seed_is_shown_ahead_although_deviations_overlap():
    compared = group_runs(runs_at(ISSUE))
    row = of_local_protocol(differences(compared, "fedavg"))
    assert {seed: round(value, 6) for seed, value in row.by_seed.items()} == {0: 2.3, 1: 1.9, 2: 3.1}
    assert row.seeds_ahead == 3 and row.draws_ahead > 0.999 and 1.5 < row.low < row.mean < row.high < 3.5

    best = of_local_protocol(differences(compared))
    assert (best.method, best.baseline, best.seeds_ahead, best.draws_ahead) == ("fedavg", "ditto", 0, 0.0)
    np.testing.assert_allclose((best.mean, best.low, best.high), (-row.mean, -row.high, -row.low))

    (text,) = [line for line in remarks([row], compared) if "Wilcoxon" in line]
    assert "p = 0.25" in text and "3 seeds" in text and "6 seeds" in text
    assert "it contains the true one in only about 75% of cases" in text


def test_an_interval_over_few_seeds_contains_the_true_difference_as_seldom_as_the_remarks_say():
    generator = np.random.default_rng(0)
    for seeds, percent in COVERAGE.items():
        by_seed = generator.normal(size=(2000, seeds))
        draws = by_seed[:, generator.integers(seeds, size=(1000, seeds))].mean(-1)
        low, high = np.percentile(draws, [2.5, 97.5], axis=1)
        assert abs(100 * np.mean((low <= 0) & (high >= 0)) - percent) < 4


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (0.0001, "0.01%"), (0.001, "0.1%"), (0.123, "12%"), (0.994, "99%"), (0.9993, "99.9%"), (1.0, "100%")],
)
def test_only_a_method_that_is_ahead_in_no_draw_has_a_share_of_zero(share, text):
    row = of_local_protocol(differences(group_runs(runs_at(ISSUE)), "fedavg"))
    assert replace(row, draws_ahead=share).cells[-1] == text


def test_lower_is_ahead_where_lower_is_better():
    runs = runs_at(ISSUE)
    errors = [replace(run, experiment=run.experiment.override(["objective=regression"])) for run in runs]
    row = of_local_protocol(differences(group_runs(with_columns(errors, mse=0.0)), "fedavg"))
    assert (row.mean, row.seeds_ahead, row.draws_ahead) == (0, 0, 0)

    worse = [*with_columns(errors[:3], mse=2.0), *with_columns(errors[3:], mse=1.0)]
    row = of_local_protocol(differences(group_runs(worse), "fedavg"))
    assert (row.mean, row.seeds_ahead, row.draws_ahead) == (-1, 3, 1)


def test_errors_of_large_targets_are_printed_with_four_digits_and_a_power_of_ten():
    runs = [replace(run, experiment=run.experiment.override(["objective=regression"])) for run in runs_at(ISSUE)]
    groups = group_runs([*with_columns(runs[:3], mse=2.93412e10), *with_columns(runs[3:], mse=841234.0)])
    (local, _) = result_rows(groups, [Column("global", model="global")])
    assert [str(cell) for (cell,) in local.rows.values()] == ["2.934e10±0", "841,234±0"]
    unit = groups[0].unit
    assert (unit.text(2.9e9), unit.text(999_999.0), unit.text(inf)) == ("2.900e9", "999,999", "inf")

    row = of_local_protocol(differences(groups, "fedavg"))
    assert row.text(row.mean) == "-2.934e10" and latex.signed_number("-2.934e10") == r"$-2.934\mathrm{e}10$"
    assert latex.number("+2.934e10±1.2") == r"$+2.934\mathrm{e}10$ $\pm$ 1.2"


def test_only_seeds_on_the_same_data_are_paired_and_the_others_are_named():
    runs = runs_at(ISSUE)
    fedavg = runs[:3]
    ditto = runs[3:]

    compared = group_runs([*fedavg[:2], *ditto])
    row = of_local_protocol(differences(compared, "fedavg"))
    assert list(row.by_seed) == [0, 1]
    assert "ditto against fedavg: only over what both have, seeds 0 and 1." in remarks([row], compared)

    on_other_data = [replace(run, metadata={"data": "another partition"}) for run in ditto]
    with_other_seed = [replace(ditto[0], experiment=ditto[0].experiment.replace(seed=7))]
    sentence = "ditto and fedavg have no seed with the same data in common, so they are not paired."
    for unpaired in (on_other_data, with_other_seed):
        compared = group_runs([*fedavg, *unpaired])
        row = of_local_protocol(differences(compared, "fedavg"))
        assert not row.by_seed and (row.low, row.high, row.draws_ahead) == (None, None, None)
        assert sentence in remarks([row], compared)


def test_runs_of_edited_code_are_named_beside_their_differences():
    runs = [replace(run, metadata=run.metadata | {"code": {"my_methods": "a"}}) for run in runs_at(ISSUE)]
    assert "edited" not in " ".join(compare(runs).notes)

    runs[2] = replace(runs[2], metadata=runs[2].metadata | {"code": {"my_methods": "b"}})
    edited = "my_methods, or what it imports, was edited between these runs. One version: fedavg, seeds 0 and 1"
    assert f"{edited}; ditto, seeds 0, 1 and 2. Another: fedavg, seed 2." in " ".join(compare(runs).notes)
    assert f"{edited}. Another: fedavg, seed 2." in " ".join(remarks([], group_runs(runs[:3])))


def test_a_stopped_run_is_paired_with_one_of_as_many_rounds_only():
    fedavg, *others = runs_at({"fedavg": ISSUE["fedavg"][:2]})
    ditto, *other_dittos = runs_at({"ditto": ISSUE["ditto"][:2]})
    stopped = ended_after(5, ditto, "stopped")
    sentence = (
        "ditto against fedavg: only over what both have, seed 1. A stopped run is paired with one of as many rounds."
    )

    for pair, seeds in (
        ([fedavg, stopped], [1]),
        ([ended_after(5, fedavg, "stopped"), stopped], [0, 1]),
        ([fedavg, ended_after(5, ditto, "finished")], [0, 1]),
    ):
        compared = group_runs([*pair, *others, *other_dittos])
        row = of_local_protocol(differences(compared, "fedavg"))
        assert list(row.by_seed) == seeds
        assert (sentence in remarks([row], compared)) == (seeds == [1])


def test_a_baseline_is_a_label_or_the_one_method_of_that_name():
    labels = ["fedavg", "ditto lam=0.1", "ditto lam=1.0", "fedavg"]
    assert find_label(labels, "fedavg") == "fedavg" and find_label(labels, "ditto lam=1.0") == "ditto lam=1.0"

    for baseline, sentence in (
        ("ditto", "could be any of: ditto lam=0.1; ditto lam=1.0. Give one of these in full."),
        ("fedavgg", "is not one of the methods; did you mean 'fedavg'?"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            find_label(labels, baseline)
    with pytest.raises(ConfigError, match="needs another method to compare with; there is only fedavg"):
        find_label(["fedavg", "fedavg"], "fedavg")
    with pytest.raises(ConfigError, match=r"'ditto' is not one of the methods; there is only fedavg\."):
        find_label(["fedavg", "fedavg"], "ditto")
    assert find_label(["fedavg", "Mine mu=1.0"], "my_methods:Mine") == "Mine mu=1.0"


def test_a_terminal_of_eighty_columns_and_a_narrow_one_show_every_difference_whole():
    for width in (80, 52):
        text = printed(lambda console: show(console, runs_at(ISSUE), {}, ["digits"]), width)
        rows = [line for line in text.splitlines() if "-3.1 to -1.8" in line]
        assert len(rows) == 2 and all(part in rows[0] for part in ("fedavg", "ditto", "-2.4", "-3.1 to -1.8"))
        assert max(map(len, rows)) <= width and text.count("Wilcoxon") == 1
        assert rows[0].endswith("0 of 3     0% ") == (width == 80)
        assert ("more columns: draws ahead, seeds ahead" in " ".join(text.split())) == (width == 52)
    assert "against" not in printed(lambda console: show(console, runs_at(ISSUE)[:3], {}, ["digits"]))


def test_python_gets_the_differences_as_rows_that_print():
    fedavg, ditto = (run for run in runs_at(ISSUE) if run.experiment.seed == 0)
    table = raypfl.Result(**vars(ditto)).compare(fedavg, baseline="fedavg")
    assert [(row.protocol, row.method) for row in table] == [("local", "ditto"), ("global", "ditto")]
    assert f"+{table.rows[0].mean:.1f}" in repr(table) and "There is only one seed" in table._repr_html_()
    with pytest.raises(ConfigError, match="give results of at least two methods"):
        compare([ditto])


@pytest.mark.usefixtures("without_figures")
def test_the_report_shows_paired_differences_and_its_headline_goes_by_them(tmp_path):
    text = write(runs_at(ISSUE), tmp_path / "report.html", baseline="fedavg").read_text()
    page = " ".join("".join(ElementTree.fromstring(text).itertext()).split())
    assert "2.4 points above the global model of fedavg, ahead in 3 of 3 seeds (95% interval +1.8 to +3.1)." in page
    assert "own test data, against fedavg" in page and "+2.4 +1.8 to +3.1 3 of 3 100%" in page
    assert page.count("Wilcoxon") == 1 and "within the spread" not in page

    uncertain = {"fedavg": (90.0, 94.9, 96.3), "ditto": (93.3, 93.8, 97.4)}
    text = write(runs_at(uncertain), tmp_path / "report.html").read_text()
    assert "but the 95% interval of the difference includes 0" in text

    with pytest.raises(ConfigError, match="not one of the methods"):
        write(runs_at(ISSUE), tmp_path / "report.html", baseline="nobody")


def test_mlflow_gets_the_differences_of_a_comparison_as_metrics_and_in_its_description():
    runs = runs_at(ISSUE)
    metrics = comparison_metrics(runs, "fedavg")
    assert metrics["seeds_ahead/local/ditto"] == 3 and metrics["draws_ahead/local/ditto"] > 0.999
    assert metrics["difference/local/ditto"] == pytest.approx(7.3 / 300)  # accuracies are shares there
    assert metrics["difference_low/local/ditto"] < 7.3 / 300 < metrics["difference_high/local/ditto"]

    namesakes = []
    for lam in (1, 2):
        described = Experiment(method={"name": "ditto", "lam": lam})
        namesakes.append(replace(run_at("ditto", 0, lam), experiment=described))
    assert "difference/local/ditto lam_1.0" in comparison_metrics(namesakes)  # MLflow takes no "=" in a name

    text = comparison_description(runs, "fedavg")
    assert "| local | ditto | fedavg | +2.4 | +1.8 to +3.1 | 3 of 3 | 100% |" in text and "Wilcoxon" in text


def test_in_mlflow_the_description_of_a_comparison_names_no_network_that_only_some_of_its_runs_have():
    runs = [run_at("fedavg", 0, 1), run_at("ditto", 0, 1)]
    assert comparison_description(runs).splitlines()[0].endswith(" · mlp")
    runs[1] = replace(runs[1], experiment=runs[1].experiment.replace(model="cnn"))
    lines = comparison_description(runs).splitlines()
    assert "mlp" not in lines[0] and lines[2].count("|") == lines[3].count("|")


def test_in_mlflow_one_model_on_one_test_set_has_no_spread_over_clients():
    rows = []
    for protocol, model in product(("local", "global"), ("personal", "global")):
        rows.append({"protocol": protocol, "model": model, "accuracy": 0.5, "std": 0.0, "worst_decile": 0.5})
    names = {name for name, *_ in evaluation_points(Evaluated(1, rows))}
    assert len(names) == 10 and {name for name in names if name.endswith("global/global")} == {"accuracy/global/global"}


def test_a_comparison_is_exported_as_csv_with_all_its_numbers(tmp_path):
    runs = runs_at(ISSUE)
    rows = list(csv.DictReader(write(runs, tmp_path / "table.csv", baseline="fedavg").open()))
    places = [(row["method"], row["tested_on"]) for row in rows]
    assert places == [("fedavg", "local"), ("fedavg", "global"), ("ditto", "local"), ("ditto", "global")]

    ditto = rows[2]
    (group,) = [group for group in group_runs(runs) if group.label == "ditto"]
    assert float(ditto["global"]) == pytest.approx(fmean(group.scores("local")))
    assert float(ditto["global_std_over_seeds"]) == pytest.approx(stdev(group.scores("local")))
    assert float(ditto["difference"]) == pytest.approx(7.3 / 3) and ditto["against"] == "fedavg"
    assert ditto["seeds_ahead"] == "3" and ditto["personal"] == "" == rows[0]["difference"]
    assert {row["metric"] for row in rows} == {"accuracy (%)"} and ditto["megabytes_up"].startswith("11.55")


def test_a_seed_that_was_run_twice_counts_once_as_the_run_that_ended_last(tmp_path):
    """The list of a notebook's cell that runs again has both runs."""
    runs = runs_at({"fedavg": (91.0, 93.0), "ditto": (99.0, 97.0)})
    for number, accuracy in enumerate((71.0, 81.0)):
        run = replace(run_at("fedavg", 0, accuracy), run_dir=tmp_path / f"again-{number}")
        run.metadata["code"] = {"my_methods": f"version {number}"}
        run.run_dir.mkdir()
        (run.run_dir / "summary.json").write_text("{}")
        os.utime(run.run_dir / "summary.json", (10**9, 10**9 - number))
        runs.append(run)

    with pytest.warns(UserWarning, match="is left out") as left_out:
        fedavg, *_ = csv.DictReader(write(runs, tmp_path / "table.csv").read_text().splitlines())
    assert fedavg["method"] == "fedavg" and fedavg["seeds"] == "2"
    assert float(fedavg["global"]) == pytest.approx((71 + 93) / 2)

    compared = compare(runs, baseline="ditto")
    assert of_local_protocol([*compared]).by_seed == pytest.approx({0: 71 - 99, 1: 93 - 97})
    later = f"{tmp_path / 'again-0'}, which ended later, is also fedavg from seed 0, with edited code."
    assert compared.notes[-1] == f"{tmp_path / 'again-1'} is left out: {later}"
    assert [*compared.notes[-2:]] == [str(warning.message) for warning in left_out]


def test_a_caption_says_which_methods_are_means_over_which_seeds_unless_all_are_over_the_same(tmp_path):
    caption = write(runs_at({"ditto": (99.0,), "fedavg": (91.0, 93.0)}), tmp_path / "table.tex").read_text()
    assert "from different seeds (seed 0 of ditto; seeds 0 and 1 of fedavg), so their means are not of" in caption

    same = write(runs_at({"ditto": (99.0, 98.0), "fedavg": (91.0, 93.0)}), tmp_path / "table.tex").read_text()
    assert "different seeds" not in same


def test_a_comparison_is_exported_as_latex_that_needs_booktabs_alone(tmp_path):
    text = write(runs_at(ISSUE), tmp_path / "table.tex", baseline="fedavg").read_text()

    lines = [line.strip() for line in text.splitlines()]
    heading, *rows = [line for line in lines if line.startswith(("method &", "ditto &"))]
    assert all(row.count(" & ") == heading.count(" & ") for row in rows) and len(rows) == 2
    assert all(r" & \textbf{95.8} $\pm$ 2.2 & " in row for row in rows)
    assert all(row.endswith(r" & $+2.4$ [$+1.8$, $+3.1$] & 3/3 \\") for row in rows)

    caption = next(line for line in lines if line.startswith(r"\caption"))
    assert "Std and worst decile are over clients. They" in caption
    assert "else of the global one. Bold: the best of a column." in caption
    assert "Ahead in: the seeds in which a method is better than it." in caption

    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
    assert not [line for line in text.splitlines() if line.count("{") != line.count("}")]


def test_a_latex_table_has_one_baseline_and_a_label(tmp_path):
    runs = []
    for run in runs_at(ISSUE):
        columns = run.evaluations.to_pydict()
        if run.experiment.to_dict()["method"]["name"] == "ditto":
            # The best method on clients' own data is the worst on everybody's.
            is_local = [protocol == "local" for protocol in columns["protocol"]]
            columns["accuracy"] = [
                a if is_own else 0.5 for a, is_own in zip(columns["accuracy"], is_local, strict=True)
            ]
        runs.append(replace(run, evaluations=pa.table(columns)))
    text = write(runs, tmp_path / "table.tex").read_text()

    compared = [line.split(" &")[0].strip() for line in text.splitlines() if "/3 " in line]
    assert compared == ["fedavg", "fedavg"] and "Differences to ditto are paired" in text
    assert text.count(r"\label{") == 1 and r"\label{tab:results}" in text


def test_characters_that_latex_reads_as_commands_are_escaped():
    assert latex.escaped("ditto · lam=0.1 & 50% of {a_b} ~ c^2 \\ d#1 $") == (
        r"ditto $\cdot$ lam=0.1 \& 50\% of \{a\_b\} \textasciitilde{} c\textasciicircum{}2 \textbackslash{} d\#1 \$"
    )


def test_commas_of_signed_numbers_take_no_space_in_latex():
    assert latex.number("-1,234.5±1,000.2") == r"$-1{,}234.5$ $\pm$ 1,000.2"


def test_scores_in_mlflow_are_on_one_protocol_those_without_a_number_last():
    fedavg, ditto, local, pfedme = runs_at({"fedavg": (91.0,), "ditto": (93.0,), "local": (50.0,), "pfedme": (np.nan,)})
    on_global = pc.field("protocol") == "global"
    fedavg = replace(fedavg, evaluations=fedavg.evaluations.filter(~on_global))
    local = replace(local, evaluations=local.evaluations.filter(on_global))

    assert comparison_scores([fedavg, pfedme, ditto, local]) == "ditto 93.0 %, fedavg 91.0 %, pfedme nan %"


def test_a_method_whose_metric_is_nan_is_never_the_best():
    runs = runs_at({"pfedme": (np.nan,), "ditto": (93.0,), "fedavg": (91.0,)})
    groups = group_runs(runs)
    assert {row.baseline for row in differences(groups)} == {"ditto"}
    assert "of ditto is best" in lead_of(part_of(runs), "local")

    results, *_ = result_rows(groups, result_columns(groups))
    assert [cells[1].best for cells in results.rows.values()] == [False, True, False]


def test_a_global_model_is_not_marked_as_the_best_for_being_ahead_of_one_that_is_partly_untrained():
    groups = group_runs(runs_at({"fedper": (90.0,), "fedavg": (91.0,)}))
    results, *_ = result_rows(groups, result_columns(groups))
    assert not any(cell.best for cells in results.rows.values() for cell in cells)


def test_a_run_that_diverged_is_named_and_in_no_mean_rank_or_difference():
    runs = runs_at({"ditto": (99.0,), "fedavg": (91.0, 93.0), "local": (50.0, 52.0)})
    runs[0] = replace(runs[0], status="diverged", round=7)
    runs[2] = replace(runs[2], status="failed")
    fedavg, local = group_runs(runs)
    assert (fedavg.label, local.label) == ("fedavg", "local") and len(fedavg.results) == 1
    assert fedavg.scores("local") == pytest.approx([91.0])
    assert local.colour == group_runs(runs_at({"ditto": (99.0,), "fedavg": (91.0,), "local": (50.0,)}))[2].colour

    compared = compare(runs)
    assert {(row.method, row.baseline, *row.by_seed) for row in compared} == {("local", "fedavg", 0)}
    assert compared.notes[-1] == (
        "Without a result, and in no mean or difference: ditto, seed 0 (diverged after round 7 of 10); "
        "fedavg, seed 1 (failed after round 10 of 10)."
    )
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare(runs[:2])
    for not_results in (runs[0], ["runs/mine"], []):
        with pytest.raises(ConfigError, match=r"^raypfl\.compare takes a list of results, such as \[a, b\]"):
            compare(not_results)
    with pytest.raises(ConfigError, match=r"'ditto' has no result: it diverged after round 7\. Name another one"):
        compare(runs, baseline="ditto")
    with pytest.raises(ConfigError, match=r"'apfl' is not one of the methods with a result; choose one of: fedavg,"):
        compare(runs, baseline="apfl")
    assert group_runs([]) == []


def test_a_setting_with_which_a_method_diverged_is_in_no_other_methods_label():
    fedavg, ditto, mended = runs_at({"fedavg": (91.0,), "ditto": (0.0,)}) + runs_at({"ditto": (93.0,)})
    diverged = replace(ditto, status="diverged")
    mended = replace(mended, experiment=mended.experiment.override(["training.lr=0.01"]))
    runs = [fedavg, diverged, mended]
    assert [group.label for group in group_runs(runs)] == ["fedavg", "ditto training.lr=0.01"]
    assert list(methods_without_result(runs)) == ["ditto training.lr=0.1"]
    assert find_baseline(runs, "fedavg training.lr=0.1") == "fedavg", "its label while all were running"

    # Alone, the method that is left would have the label of the one that diverged.
    mended = replace(mended, experiment=mended.experiment.override(["training.batch_size=7"]))
    runs = [diverged, mended]
    assert [group.label for group in group_runs(runs)] == ["ditto training.batch_size=7 training.lr=0.01"]
    assert list(methods_without_result(runs)) == ["ditto"]


def test_a_run_whose_metric_is_undefined_has_no_score_in_its_name_in_mlflow():
    assert run_score(Experiment(), [{"protocol": "local", "model": "global"}]) == ""
