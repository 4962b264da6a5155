"""The report: a self-contained page whose numbers are those of the runs."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.data.client_names import ClientNames
from raypfl.engine import history
from raypfl.evaluation import Measures
from raypfl.results import numbers
from raypfl.results.colours import COLOURS
from raypfl.results.drawing.canvas import page_paint, svg
from raypfl.results.drawing.curves import line_style
from raypfl.results.pairing.differences import find_baseline
from raypfl.results.ranking.named_clients import client_table
from raypfl.results.report import budgets, find_runs, tables, write
from raypfl.results.report.figures import clients_figure, loss_figure, metric_figure
from raypfl.results.report.lead import lead_of
from raypfl.results.report.page import shades
from raypfl.results.report.parts import Part, part_of
from raypfl.results.report.searches.folders import has_search
from raypfl.results.report.searches.page import read as read_search
from raypfl.results.run_groups import group_runs, run_labels
from raypfl.results.table import legend
from raypfl.results.units import megabyte_digits
from tests.support.command import raypfl as command
from tests.support.runs import experiment

SMALL = {"rounds": 3, "partition__clients": 8, "evaluation__every": 1, "engine__executor": "vectorised"}
SMALL |= {"evaluation__protocols": "[local,global,val]", "data__val_fraction": 0.2}
LARGEST = 1_000_000
"""Bytes of a page on three methods from three seeds with a thousand clients each."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[raypfl.Result]:
    folder = tmp_path_factory.mktemp("report")
    methods = [("fedavg", 0), ("fedavg", 1), ("ditto", 0), ("ditto", 1), ("local", 0), ("local", 1)]
    return [raypfl.run(experiment(folder, **SMALL, method=method, seed=seed)) for method, seed in methods]


@pytest.fixture(scope="module")
def source(results, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of all results, with a note."""
    return write(results, tmp_path_factory.mktemp("page") / "report.html", ["a <b> & c"]).read_text("utf-8")


@pytest.fixture(scope="module")
def whole(source) -> ElementTree.Element:
    """The page's root; a page that is not well-formed does not parse."""
    return ElementTree.fromstring(source)


def page(results: list[raypfl.Result], tmp_path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(write(results, tmp_path / "report.html").read_text("utf-8"))


def part(results: list[raypfl.Result]) -> Part:
    """The results as one part of a report."""
    return part_of(results)


def text(element: ElementTree.Element) -> str:
    return " ".join(" ".join(element.itertext()).split())


def section(root: ElementTree.Element, name: str) -> ElementTree.Element:
    (labelled,) = [element for element in root.iter("section") if element.get("aria-labelledby") == name]
    return labelled


def rows(table: ElementTree.Element) -> list[list[str]]:
    """Cells of a table, row by row, without blanks."""
    return [["".join("".join(cell.itertext()).split()) for cell in row] for row in table.iter("tr")]


def accuracy(result: raypfl.Result, protocol: str, model: str) -> np.ndarray:
    """The clients' accuracies of the last round, in %, straight from the run's table."""
    accuracies = []
    for row in result.evaluations.to_pylist():
        if (row["round"], row["protocol"], row["model"]) == (result.round, protocol, model):
            accuracies.append(100 * row["accuracy"])
    return np.array(accuracies)


def test_the_results_are_those_of_the_runs_tables_over_seeds(results, whole):
    heading, _, *lines = rows(next(section(whole, "results").iter("table")))
    by_method = {"fedavg": results[:2], "ditto": results[2:4], "local": results[4:]}
    assert heading[:5] == ["method", "personal", "global", "std", "worstdecile"]
    assert [line[0] for line in lines[:3]] == list(by_method)

    def over_seeds(values: list[float]) -> str:
        return f"{fmean(values):.1f}±{stdev(values):.1f}" if values else "–"

    for method, personal_cell, global_cell, spread_cell, *_ in lines[:3]:
        personal = [accuracy(result, "local", "personal") for result in by_method[method]]
        shared = [accuracy(result, "local", "global") for result in by_method[method]]
        assert personal_cell == over_seeds([values.mean() for values in personal if values.size])
        assert global_cell == over_seeds([values.mean() for values in shared if values.size])

        main_models = personal if personal[0].size else shared
        assert spread_cell == over_seeds([values.std() for values in main_models])


def test_the_best_values_of_a_column_are_bold_also_if_several_are_equal(results):
    headings, blocks = tables.result_tables(part(results))
    for j, heading in enumerate(headings):
        column = [cells[j] for _, _, cells in blocks[0].lines if cells[j].mean != "–"]
        best = min if heading in ("std", "ECE") else max
        best_value = best(float(cell.mean) for cell in column)
        assert [cell.best for cell in column] == [float(cell.mean) == best_value for cell in column]


def changed(result: raypfl.Result, *assignments: str) -> raypfl.Result:
    """The result as if the run had had other settings."""
    return replace(result, experiment=result.experiment.override(list(assignments)))


@pytest.mark.usefixtures("without_figures")
def test_runs_on_other_partitions_are_compared_in_separate_parts(results, tmp_path):
    other_partition = [changed(result, "partition.alpha=1") for result in results[:4]]
    other_partition = [shifted(result, {"global": 99, "personal": 98}) for result in other_partition]
    root = page([*results[:4], *other_partition], tmp_path)

    links = [link.get("href") for link in root.iter("a")]
    assert links == ["#part-1", "#part-2"] and "dirichlet(alpha=1.0)" in text(section(root, "data-2"))
    for part, headline in ((1, "The personal models of ditto are best"), (2, "The global model of fedavg is best")):
        printed = rows(next(section(root, f"results-{part}").iter("table")))
        assert [line[0] for line in printed[2:4]] == ["fedavg", "ditto"]
        assert headline in text(root.find("body/header/ol")[part - 1])
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))


@pytest.mark.usefixtures("without_figures")
def test_runs_on_the_tables_of_another_folder_are_no_repetitions_but_a_part_of_their_own(results, tmp_path):
    folders = {"first": "here/hearts", "second": "here/wines", "third": "there/wines"}
    for name, folder in folders.items():
        run = changed(results[0], f"data={{name: table, root: {folder}, target: kind}}")
        shutil.copytree(run.run_dir, tmp_path / "runs" / name)
        (tmp_path / "runs" / name / "experiment.yaml").write_text(run.experiment.to_yaml())

    runs, _ = find_runs([tmp_path / "runs"])
    with pytest.warns(UserWarning, match="second is left out: .*third, which ended later, is also fedavg from seed 0"):
        words = text(page(runs, tmp_path))
    assert "table(hearts) · 8 clients" in words and "table(wines) · 8 clients" in words


def test_options_that_only_some_methods_have_are_differences_if_they_are_not_at_their_default(results):
    for run, expected in ((results[2], []), (changed(results[2], "method.lam=2"), ["method.lam"])):
        differing, shared, at_default = tables.compare_settings(group_runs([results[4], run]))
        assert [key for key, _ in differing] == expected
        assert "method.lam" not in dict(shared)
        assert ("method.lam" in dict(at_default)) == (not expected)


def test_an_empty_option_of_one_method_is_not_shared_by_all(results):
    _, shared, at_default = tables.compare_settings(group_runs([results[0], changed(results[2], "method=fedper")]))
    assert "method.frozen" not in dict(shared) and dict(at_default)["method.frozen"] == [('""', ["fedper"])]


def test_runs_with_an_analysis_are_repetitions_beside_other_seeds_and_told_apart_from_the_same_seed(results, tmp_path):
    analysed = raypfl.run(experiment(tmp_path, **SMALL, method="fedavg", seed=2).override(["analyses=[ntk]"]))
    (group,) = groups = group_runs([*results[:2], analysed])
    assert group.label == "fedavg" and len(group.results) == 3
    name = analysed.logged["name"][0].as_py()
    assert numbers.logged_curve(group, name) is not None
    assert {excerpt.seed for excerpt in tables.logged(groups)[0]} == {2}
    differing, *_ = tables.compare_settings(groups)
    analysis = "ntk(every=10, probe=64, outputs=sum, sketch=0)"
    assert differing == [("analyses", [("none", ["fedavg (2 of 3 runs)"]), (analysis, ["fedavg (1 of 3 runs)"])])]

    same_seed = changed(analysed, "seed=1")
    assert [group.label for group in group_runs([*results[:2], same_seed])] == [
        "fedavg analyses=[]",
        f"fedavg analyses=[{analysis}]",
    ]


def test_the_only_personal_models_are_bold_where_the_headline_says_that_they_are_best(results, tmp_path):
    for personal in (97, 90):
        runs = [shifted(results[0], {"global": 95}), shifted(results[2], {"personal": personal, "global": 94})]
        _, blocks = tables.result_tables(part(runs))
        fedavg, ditto = (cells[:2] for _, _, cells in blocks[0].lines)
        assert ditto[0].best == (personal == 97) and fedavg[1].best


def test_the_round_that_validation_chose_has_rows_of_its_own(whole):
    words = text(section(whole, "results"))
    assert "On each client’s own test data, in the round that validation data chose" in words
    assert words.index("validation data chose") < words.index("On each client’s own validation data")


def test_a_curve_is_the_seeds_mean_and_its_band_spans_them(results):
    (fedavg, *_) = group_runs(results)
    curve = numbers.metric_curve(fedavg, "local", "global")
    finals = [accuracy(result, "local", "global").mean() for result in results[:2]]
    assert curve.x.tolist() == [1, 2, 3]
    last_point = [curve.mean[-1], curve.low[-1], curve.high[-1]]
    np.testing.assert_allclose(last_point, [np.mean(finals), min(finals), max(finals)])

    megabytes = numbers.metric_curve(fedavg, "local", "global", "megabytes").x
    np.testing.assert_allclose(megabytes[-1], fmean(sum(result.megabytes) for result in results[:2]))
    assert numbers.metric_curve(fedavg, "local", "personal") is None


@pytest.mark.usefixtures("without_figures")
def test_lines_in_the_same_place_are_named_below_their_figure(results):
    groups = group_runs(results[:4])
    assert "Equal lines: fedavg (global) and ditto (global)." in metric_figure(groups, "global", "round").caption
    assert loss_figure(groups).caption == "Equal lines: fedavg and ditto."
    same = group_runs([results[0], changed(results[0], "method=fedprox")])
    assert clients_figure(same, "local").caption == "Equal lines: fedavg (global) and fedprox (global)."


def test_dashes_of_several_global_models_leave_gaps_as_those_of_one():
    for turns in (1, 2, 3):
        offsets, patterns = zip(*(line_style("global", turn, turns)["linestyle"] for turn in range(turns)), strict=True)
        (dash, gap) = patterns[0]
        starts = sorted(-offset for offset in offsets)
        assert starts == pytest.approx([k * (dash + gap) / turns for k in range(turns)])
        assert turns * dash < 0.8 * (dash + gap)


def test_every_client_is_paired_with_itself(results):
    pairs = numbers.clients_with_both(group_runs(results)[1], "local")
    personal = np.concatenate([accuracy(result, "local", "personal") for result in results[2:4]])
    shared = np.concatenate([accuracy(result, "local", "global") for result in results[2:4]])
    np.testing.assert_array_equal(pairs, np.stack([shared, personal], axis=1))


def named(result: raypfl.Result, names: str) -> raypfl.Result:
    return replace(result, client_names=ClientNames(np.arange(len(names)), list(names)))


@pytest.mark.usefixtures("without_figures")
def test_named_clients_have_a_table_that_begins_with_those_whom_personal_models_help_most(results, tmp_path):
    root = page([named(result, "ABCDEFGH") for result in results[:4]], tmp_path)
    heading, *lines = rows(next(section(root, "clients").iter("table")))
    assert heading == ["client", "trainingsamples", "testedsamples", "fedavg,global", "ditto,personal", "difference"]

    shared = [accuracy(result, "local", "global") for result in results[:2]]
    personal = [accuracy(result, "local", "personal") for result in results[2:4]]
    gains = np.array(personal) - shared
    tested = {
        row["client"]: str(row["samples"]) for row in results[0].evaluations.to_pylist() if row["protocol"] == "local"
    }
    for name, _, samples, *cells in lines:
        client = "ABCDEFGH".index(name)
        assert samples == tested[client]
        by_seed = np.array([*zip(*shared, strict=True)][client]), np.array([*zip(*personal, strict=True)][client])
        expected = [f"{values.mean():.1f}±{values.std(ddof=1):.1f}" for values in by_seed]
        assert cells == [*expected, f"{gains[:, client].mean():+.1f}±{gains[:, client].std(ddof=1):.1f}"]
    shown = [float(line[-1].split("±")[0]) for line in lines]
    assert len(lines) == 8 and shown == sorted(shown, reverse=True)
    assert "seed by seed: ditto, personal minus fedavg, global." in text(section(root, "clients"))


def test_named_clients_compare_the_personal_models_of_one_method_with_its_global_model_if_that_is_trained(
    results, monkeypatch
):
    groups = group_runs([named(result, "ABCDEFGH") for result in results[2:4]])
    assert client_table(groups, "local", "ditto", []).compared == "ditto, personal minus ditto, global"
    monkeypatch.setattr(type(results[2].experiment.method), "leaves_untrained", lambda self: True)
    assert client_table(groups, "local", None, []).headings == ["ditto, personal"]


def test_the_table_of_named_clients_is_written_alone_as_csv_and_latex(results, tmp_path):
    runs = [named(result, "AB_DEFGH") for result in results[:4]]
    file = write(runs, tmp_path / "clients.csv", named_clients=True)
    lines = {line["client"]: line for line in csv.DictReader(file.read_text().splitlines())}
    personal = [accuracy(result, "local", "personal")[2] for result in results[2:4]]
    shared = [accuracy(result, "local", "global")[2] for result in results[:2]]
    third = lines["_"]
    assert float(third["ditto, personal"]) == pytest.approx(fmean(personal))
    assert float(third["ditto, personal_std_over_seeds"]) == pytest.approx(stdev(personal))
    assert float(third["difference"]) == pytest.approx(fmean(personal) - fmean(shared))
    assert third["compared"] == "ditto, personal minus fedavg, global" and int(third["training_samples"]) > 0

    text = write(runs, tmp_path / "clients.tex", named_clients=True).read_text()
    assert r"client & training samples & tested samples & fedavg, global & ditto, personal & difference \\" in text
    assert len(re.findall(r"^    (?:\\_|[A-H]) & ", text, re.MULTILINE)) == 8 and "seed by seed: ditto" in text


def test_a_table_of_clients_that_have_no_names_is_refused(results, tmp_path):
    with pytest.raises(ConfigError, match="These runs have no table of clients: it needs up to 60 clients"):
        write(results[:2], tmp_path / "clients.csv", named_clients=True)
    with pytest.raises(ConfigError, match=r"clients.html must end in .tex or .csv to hold only the table"):
        write(results[:2], tmp_path / "clients.html", named_clients=True)


@pytest.mark.parametrize("names", [["ABCDEFGH", "ABCDEFHG"], ["AABCDEFG"] * 2], ids=["other seed", "shared name"])
@pytest.mark.usefixtures("without_figures")
def test_names_that_are_not_of_one_client_in_all_seeds_make_no_table(names, results, tmp_path):
    root = page([named(result, clients) for result, clients in zip(results[:2], names, strict=True)], tmp_path)
    assert not list(section(root, "clients").iter("table"))


def test_the_ledger_by_tensor_adds_up_to_what_was_sent(results, whole):
    fedavg, _, local = group_runs(results)
    messages = numbers.messages(fedavg)
    assert [(message.direction, message.name) for message in messages] == [("down", "theta"), ("up", "theta")]
    total = fmean(sum(result.megabytes) for result in results[:2])
    assert sum(message.megabytes for message in messages) == pytest.approx(total)
    assert messages[0].times == 3 * 6 and messages[0].bytes == 4 * messages[0].numbers[0]

    assert numbers.messages(local) == []
    assert "local: sends nothing" in text(section(whole, "ledger"))


def test_megabytes_of_small_networks_are_no_zeros(results):
    (_, _, cells), (_, _, without_messages) = tables.costs(group_runs([*results[:2], *results[4:]]))
    up, _ = results[0].megabytes
    assert 0 < up < 1 and cells[1].mean == f"{up:.3f}" and without_messages[1].mean == "0.000"
    assert megabyte_digits([0.0]) == megabyte_digits([0.0, 1.4, 12.0]) == megabyte_digits([]) == 1


def test_megabytes_of_compressed_messages_have_two_digits_that_count_beside_large_ones():
    assert [f"{value:.{megabyte_digits([value, 2.31])}f}" for value in (0.577, 0.144, 0.0346)] == [
        "0.58",
        "0.14",
        "0.035",
    ]


def test_seconds_of_runs_that_advanced_together_have_no_deviation_and_the_tables_say_what_they_are(results, tmp_path):
    fedavg = [replace(result, metadata={**result.metadata, "together": 2}) for result in results[:2]]
    (*_, shared_cells), (*_, cells) = tables.costs(group_runs([*fedavg, *results[2:4]]))
    assert [cell.spread for cell in shared_cells[3:5]] == ["", ""] and all(cell.spread for cell in cells[3:5])

    root = page([*fedavg, *results[2:4]], tmp_path)
    sentence = "The runs of fedavg advanced together: their seconds are their own turns"
    assert sentence in text(section(root, "results"))
    with write([*fedavg, *results[2:4]], tmp_path / "table.csv").open() as file:
        counts = {row["method"]: row["runs_together"] for row in csv.DictReader(file)}
    assert counts == {"fedavg": "2", "ditto": "1"}


def test_methods_are_not_compared_by_the_seconds_of_runs_that_advanced_together(results, tmp_path):
    alone = text(section(page(results[:4], tmp_path), "effort"))
    assert "seconds" in alone and "Seconds are left out" not in alone

    fedavg = [replace(result, metadata={**result.metadata, "together": 2}) for result in results[:2]]
    groups = group_runs([*fedavg, *results[2:4]])
    assert budgets.axes_of(groups) == ["megabytes"]
    effort = section(page([*fedavg, *results[2:4]], tmp_path), "effort")
    assert "Seconds are left out: of runs that advanced together" in text(effort)
    assert not [heading for heading in effort.iter("th") if "seconds" in text(heading)]


def test_a_run_that_advanced_together_and_was_resumed_alone_counts_as_together(results, tmp_path):
    run = replace(results[0], run_dir=tmp_path)
    history.add(tmp_path, 0, run.experiment, metadata=run.metadata | {"together": 5})
    history.add(tmp_path, 1, run.experiment, metadata=run.metadata)
    (group,) = group_runs([run])
    assert numbers.runs_together(group) == 5


def test_only_the_settings_that_differ_between_runs_are_listed(results):
    other = changed(results[0], "training.lr=0.5", "seed=7", "partition.alpha=1", "output=elsewhere")
    differing, shared, _ = tables.compare_settings(group_runs([results[0], other]))
    names = ["fedavg", "fedavg partition.alpha=1.0 training.lr=0.5"]
    assert differing == [
        ("partition.alpha", [("0.3", [names[0]]), ("1.0", [names[1]])]),
        ("training.lr", [("0.1", [names[0]]), ("0.5", [names[1]])]),
    ]
    assert ("training.batch_size", "50") in shared and not {"training.lr", "seed"} & {key for key, _ in shared}


def test_classes_of_devices_which_have_no_names_are_listed_by_their_options(results):
    device = "{ms_per_sample: 5, down_kbps: 2000, up_kbps: 500, share: 2}"
    run = changed(results[0], f"devices.hardware={{name: classes, classes: [{device}]}}")
    _, shared, _ = tables.compare_settings(group_runs([run]))
    assert dict(shared)["devices.hardware.classes"].startswith("(ms_per_sample=5.0, down_kbps=2000.0, up_kbps=500.0, ")


def test_a_networks_option_that_is_given_at_its_default_is_no_difference(results):
    network = {"name": "mlp", "hidden": [128]}
    explicit, implicit = (
        replace(results[0], experiment=results[0].experiment.replace(model=model)) for model in (network, "mlp")
    )
    (group,) = group_runs([explicit, implicit])
    assert group.label == "fedavg" and not tables.compare_settings([group])[0]


def shifted(result: raypfl.Result, points: dict[str, float]) -> raypfl.Result:
    """The run as if each client's accuracy were the same, in %, by model."""
    columns = result.evaluations.to_pydict()
    columns["accuracy"] = [points[model] / 100 for model in columns["model"]]
    return replace(result, evaluations=pa.table(columns))


@pytest.mark.usefixtures("without_figures")
def test_the_headline_says_whose_models_it_compares_and_how_they_spread(results, tmp_path):
    def lead(*levels: dict[str, float], of: list[raypfl.Result] = results[:4]) -> str:
        runs = [shifted(result, level) for result, level in zip(of, levels, strict=True)]
        paragraphs = page(runs, tmp_path).iter("p")
        (headline,) = [paragraph for paragraph in paragraphs if paragraph.get("class") == "lead"]
        return text(headline)

    close = lead({"global": 94}, {"global": 96}, {"personal": 96, "global": 95}, {"personal": 97, "global": 95})
    assert close == (
        "The personal models of ditto are best on each client’s own test data: 96.5 ± 0.7 %, 1.5 points above the "
        "global model of fedavg, ahead in 2 of 2 seeds (95% interval +1.0 to +2.0). The global model of ditto has "
        "95.0 ± 0.0 %."
    )

    levels = [{"global": 90}, {"global": 96}, {"personal": 96, "global": 95}, {"personal": 94, "global": 95}]
    wide = lead(*levels)
    assert "2.0 points above the global model of fedavg, but the 95% interval of the difference includes 0" in wide

    on_other_data = [replace(run, metadata=run.metadata | {"data": "another partition"}) for run in results[:2]]
    unpaired = lead(*levels, of=[*on_other_data, *results[2:4]])
    assert "2.0 points above the global model of fedavg, which is within the spread over seeds (± 4.2)." in unpaired

    fewer_seeds = lead({"global": 98}, {"global": 90}, {"personal": 96, "global": 95}, of=results[:3])
    assert fewer_seeds.startswith(
        "The personal models of ditto are best on each client’s own test data: 96.0 %, 2.0 points above the global "
        "model of fedavg; in the seed that both have, the difference is -2.0 (95% interval -2.0 to -2.0). "
    )

    won = lead({"global": 97}, {"global": 97}, {"personal": 90, "global": 95}, {"personal": 90, "global": 95})
    assert won.startswith("The global model of fedavg is best")
    assert "7.0 points above the personal models of ditto, ahead in 2 of 2 seeds" in won

    unused = lead({"global": 94}, {"global": 94}, {"personal": 90, "global": 95}, {"personal": 90, "global": 95})
    assert unused.startswith("The global model of fedavg is best")
    assert unused.endswith("the models that clients would use; the global model of ditto has 95.0 ± 0.0 %.")

    deployed = lead({"global": 80}, {"global": 80}, {"personal": 90, "global": 95}, {"personal": 90, "global": 95})
    assert deployed.count("lobal model of ditto has") == 1

    alone = lead({"personal": 90, "global": 95}, of=results[2:3])
    assert alone.startswith("The personal models of ditto reach 90.0 %")
    assert alone.endswith("the models that clients would use; the global model of ditto has 95.0 %.")


def test_runs_with_other_settings_are_no_seeds_of_one_method(results):
    moved = changed(results[1], "checkpoint.every=3", "output=elsewhere")
    other = changed(results[0], "partition.alpha=1")
    assert [len(group.results) for group in group_runs([results[0], moved, other])] == [2, 1]


def test_the_page_refers_to_no_other_file(whole, source):
    links = []
    for element in whole.iter():
        links += [value for name, value in element.attrib.items() if name in ("src", "href", "srcset", "data")]
    assert links and all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"https?:|//\w+\.|@import|<script|<link", source)


def test_ids_are_unique_and_every_reference_has_a_target(whole, source):
    ids = [element.get("id") for element in whole.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:url\(|href=\"|labelledby=\")#?([\w-]+)", source)) <= set(ids)


def test_every_picture_has_a_description_for_screen_readers(whole):
    pictures = list(whole.iter("svg"))
    assert len(pictures) >= 8
    assert all(picture.get("role") == "img" and len(picture.get("aria-label", "")) > 40 for picture in pictures)


def test_tables_have_headers_of_columns_and_rows(whole):
    for table in whole.iter("table"):
        assert all(cell.get("scope") == "col" for cell in table.find("thead").iter("th"))
        body = [row for part in table.findall("tbody") for row in part]
        assert all(row[0].tag == "th" and row[0].get("scope") in ("row", "rowgroup") for row in body)


def test_pictures_take_all_colours_from_the_style_sheet_and_one_for_each_method(source):
    pictures = "".join(re.findall(r"<svg.*?</svg>", source, re.DOTALL))
    pictures = re.sub(r"data:image/png[^\"]*", "", pictures)
    assert set(re.findall(r"var\(--m(\d)\)", pictures)) == {"0", "1", "2"}

    without_links = re.sub(r"(?:href=\"|url\()#\w+", "", pictures)
    assert not re.findall(r"#(?:[0-9a-f]{6}|[0-9a-f]{3})\b(?=[;\"\s])", without_links)


def test_a_page_has_a_colour_for_each_of_hundreds_of_methods():
    picture = svg("many", "", 100, 100, lambda figure: figure.subplots().plot([0, 1], **page_paint(256)))
    assert "var(--m256)" in picture


def contrast(a: str, b: str) -> float:
    """The contrast of two colours ``#rrggbb``, from 1 to 21 (WCAG 2.2)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("index", range(len(COLOURS)))
def test_colours_stand_out_on_light_and_on_dark_backgrounds(index):
    light, dark = shades(index)
    assert contrast(light, "#ffffff") >= 3 and contrast(dark, "#14171c") >= 3


@pytest.mark.usefixtures("without_figures")
def test_a_run_that_was_not_tested_client_by_client_makes_a_page(results, tmp_path):
    evaluations = results[0].evaluations.filter(pc.field("protocol") == "global")
    root = page([replace(results[0], evaluations=evaluations)], tmp_path)
    assert "No protocol tested clients one by one" in text(section(root, "clients"))
    assert "on all clients’ test data together" in text(root.find("body/header"))


@pytest.mark.usefixtures("without_figures")
def test_runs_whose_metric_is_undefined_make_a_page_and_no_comparison(results, tmp_path, monkeypatch):
    monkeypatch.setattr(Measures, "always", lambda measures, name: False)  # as for an AUC
    undefined = []
    for result in (results[0], results[2]):
        evaluations = result.evaluations
        column = evaluations.column_names.index("accuracy")
        values = pa.nulls(evaluations.num_rows, pa.float64())
        undefined.append(replace(result, evaluations=evaluations.set_column(column, "accuracy", values)))

    sentence = "Accuracy is undefined for all clients on each client’s own test data."
    assert sentence in text(page(undefined, tmp_path).find("body/header"))
    with pytest.raises(ConfigError, match="no two methods have a value of accuracy on the same test"):
        raypfl.compare(undefined)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ("finished", "has no results, since no client was tested in it"),
        ("stopped", "ended before its first evaluation"),
    ],
)
def test_a_run_that_was_never_evaluated_is_refused(results, tmp_path, status, sentence):
    untested = replace(results[0], evaluations=results[0].evaluations.slice(0, 0), status=status)
    with pytest.raises(ConfigError, match=sentence):
        write([results[2], untested], tmp_path / "report.html")


def test_one_run_makes_a_page(results, tmp_path):
    words = text(page(results[:1], tmp_path))
    assert "There is one run, so nothing differs." in words
    assert "No method has both personal models and a global one" in words
    assert "±" not in words and "Other seeds" not in words


@pytest.mark.usefixtures("without_figures")
def test_the_key_has_a_line_for_existing_models_only(results, whole, tmp_path):
    learning, effort = (section(page(results[:1], tmp_path), name) for name in ("learning", "effort"))
    assert "by round. global model." in text(learning) and "own test data. global model." in text(effort)
    assert "personal models, global model" in text(section(whole, "learning"))


def test_a_single_evaluation_is_in_the_middle_of_whole_rounds(results):
    last = results[0].evaluations.filter(pc.field("round") == results[0].round)
    drawing = metric_figure(group_runs([replace(results[0], evaluations=last)]), "local", "round")
    words = [text(element) for element in ElementTree.fromstring(drawing.svg).iter() if element.tag.endswith("text")]
    assert words[: words.index("round")] == [str(results[0].round + step) for step in (-1, 0, 1)]


@pytest.mark.usefixtures("without_figures")
def test_runs_that_sent_nothing_make_a_page(results, tmp_path):
    assert "Nothing was sent: clients trained alone." in text(page(results[4:], tmp_path))


@pytest.mark.usefixtures("without_figures")
def test_seeds_of_different_lengths_are_compared_in_common_rounds_and_the_page_says_so(results, tmp_path):
    short = replace(
        results[1],
        status="stopped",
        round=2,
        rounds=results[1].rounds.slice(0, 2),
        evaluations=results[1].evaluations.filter(pc.field("round") <= 2),
    )

    words = text(page([results[0], short], tmp_path))
    assert "fedavg, seed 1, stopped after round 2 of 3." in words
    assert "The seeds of fedavg ended after 2 and 3 rounds" in words
    assert numbers.metric_curve(group_runs([results[0], short])[0], "local", "global").x.tolist() == [1, 2]


@pytest.mark.usefixtures("without_figures")
def test_methods_of_different_lengths_are_ranked_with_a_caution(results, tmp_path):
    shorter = replace(results[2], evaluations=results[2].evaluations.filter(pc.field("round") <= 2))
    caution = "The methods are ranked as they were after 2 to 3 rounds, each at its own end"
    assert caution in text(page([results[0], shorter], tmp_path))
    # Rounds of fewer replies, but as many replies in all.
    asynchronous = changed(shorter, "devices.hardware=lognormal", "asynchronous.buffer=2")
    for comparison in (results, [results[0], asynchronous]):
        assert not [line for line in legend(group_runs(comparison)) if "ranked" in line]


def test_a_table_says_where_a_global_model_has_a_part_that_is_not_trained(results):
    partial = [changed(results[0], f"method={name}") for name in ("fedrep", "fedgh", "fedbabu")]
    (sentence,) = [line for line in legend(group_runs([*results[2:4], *partial])) if "initial" in line]
    assert sentence == "In the global model of fedrep and of fedgh, what clients keep has its initial values."


@pytest.mark.usefixtures("without_figures")
def test_seeds_that_failed_alike_are_told_once_with_the_lines_of_their_error_and_paths_from_here(
    results, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    error = f'Client 0 failed:\n  File "{tmp_path}/mine.py", line 5'
    Path("summary.json").write_text(
        json.dumps({"status": "failed", "round": 3, "weights_hash": "", "error": error, "best_round": None})
    )
    failed = [replace(result, status="failed", run_dir=tmp_path) for result in results[2:4]]
    notes = page([*results[:2], *failed], tmp_path).find("body/header/ul[@class='notes']")
    assert [note.text for note in notes] == [
        "Without a result, and in no mean or difference: ditto, seeds 0 and 1 (failed after round 3 of 3).",
        'ditto, seeds 0 and 1, failed after round 3 of 3: Client 0 failed:\n  File "mine.py", line 5',
    ]
    assert ".notes li { white-space: pre-wrap;" in Path("report.html").read_text()


def test_a_table_of_runs_that_were_stopped_says_so(results, tmp_path):
    stopped = replace(results[0], status="stopped", round=2, rounds=results[0].rounds[:2])
    stopped = replace(stopped, evaluations=stopped.evaluations.filter(pc.field("round") <= 2))
    assert "Not finished: fedavg, seed 0 (2 of 3 rounds)." in legend(group_runs([stopped, *results[2:]]))
    unscored = replace(stopped, evaluations=stopped.evaluations.filter(pc.field("round") == 1))
    assert "Not finished: fedavg, seed 0 (2 of 3 rounds, evaluated after 1)." in legend(group_runs([unscored]))
    with write([stopped, *results[1:4]], tmp_path / "table.csv").open() as file:
        counts = {row["method"]: row["unfinished"] for row in csv.DictReader(file)}
    assert counts == {"fedavg": "1", "ditto": "0"}
    assert not any("Not finished" in line for line in legend(group_runs(results)))


def test_a_method_whose_seeds_have_no_round_in_common_is_named(results):
    disjoint = []
    for result, round in zip(results[:2], (1, 2), strict=True):
        disjoint.append(replace(result, evaluations=result.evaluations.filter(pc.field("round") == round)))

    drawing = metric_figure(group_runs([*disjoint, *results[2:]]), "local", "round")
    assert drawing.caption == "Not drawn: fedavg, whose seeds were never evaluated in the same round."


@pytest.mark.usefixtures("without_figures")
def test_data_that_are_missing_or_changed_are_reported_on_a_complete_page(results, tmp_path):
    without_data = changed(results[0], "data={name: cifar10, root: nowhere}")
    words = text(section(page([without_data], tmp_path), "data"))
    assert "There is no picture of this partition." in words and "nowhere" in words

    on_other_data = replace(results[0], metadata=results[0].metadata | {"data": "0" * 64})
    words = text(section(page([on_other_data], tmp_path), "data"))
    assert "The data has changed since the run." in words


def with_a_thousand_clients(result: raypfl.Result, seed: int) -> raypfl.Result:
    """The run as if it had had a thousand clients and fifty evaluations."""
    draws = np.random.default_rng(seed)
    models = [model for model in ("personal", "global") if accuracy(result, "local", model).size]
    keys = list(product(range(1, 51), models))
    count = 1000 * len(keys)
    columns = {
        "round": pa.array(np.repeat([round for round, _ in keys], 1000), pa.int32()),
        "client": pa.array(np.tile(np.arange(1000), len(keys)), pa.int32()),
        "protocol": ["local"] * count,
        "model": np.repeat([model for _, model in keys], 1000),
        "samples": np.full(count, 997),
        "accuracy": draws.integers(400, 998, count) / 997,
        "loss": np.ones(count),
    }

    number = np.arange(1, 51)
    traffic = dict.fromkeys(("bytes_up", "bytes_down"), number)
    rounds = pa.table({"round": number, "clients": number, "loss": 1 / number, "seconds": 0.1 * number, **traffic})
    return replace(result, round=50, rounds=rounds, evaluations=pa.table(columns), best_round=None)


@pytest.mark.thorough
def test_a_page_on_a_thousand_clients_stays_small(results, tmp_path):
    many = []
    for i, (result, seed) in enumerate(product(results[::2], range(3))):
        many.append(with_a_thousand_clients(changed(result, f"seed={seed}"), 10 * i + seed))
    assert write(many, tmp_path / "report.html").stat().st_size < LARGEST


@pytest.mark.thorough
def test_methods_that_share_a_colour_differ_in_their_marks(results, tmp_path):
    many = [changed(results[2], f"method.lam={i}") for i in range(len(COLOURS) + 2)]
    picture = next(section(page(many, tmp_path), "learning").iter("svg"))
    marked = {group.get("class") for group in picture.iter("g") if group.get("class") and list(group.iter("use"))}
    assert marked == {f"of-{len(COLOURS)}", f"of-{len(COLOURS) + 1}"}


def test_notes_are_escaped(whole):
    assert "a <b> & c" in text(whole)


@pytest.mark.usefixtures("without_figures")
def test_the_command_finds_the_runs_of_a_folder_and_prints_the_pages_path(results, tmp_path):
    out = tmp_path / "page.html"
    reported = command("report", str(results[0].run_dir.parent), "--out", str(out))
    assert reported.exit_code == 0 and reported.stdout == f"Report: {out}\n"
    assert len(rows(next(section(ElementTree.parse(out).getroot(), "runs").iter("table")))) == 1 + len(results)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "raypfl report needs a run's folder or several, such as: raypfl report runs/digits-*"),
        (["nowhere"], "There is no folder nowhere; did you mean 'nowhere-2'?"),
        (["elsewhere/run"], "There is no folder elsewhere/run. Runs are in cut-off, nowhere-2."),
        (
            ["."],
            ". is not a run's folder, and contains none: a run's folder has an experiment.yaml, and a sweep's has",
        ),
        (["picture.png"], "There is no run in picture.png, only files."),
        (["cut-off"], "cut-off has no finished run; `raypfl resume cut-off` finishes an interrupted one."),
    ],
)
def test_a_report_without_a_run_is_a_sentence(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if words != ["."]:
        Path("picture.png").touch()
        Path("cut-off").mkdir()
        Path("cut-off", "experiment.yaml").write_text("seed: 0\n")
        Path("nowhere-2").mkdir()
        Path("nowhere-2", "experiment.yaml").write_text("seed: 0\n")

    refused = command("report", *words)
    assert refused.exit_code == 2 and sentence in refused.stderr and "Traceback" not in refused.output
    assert not Path("report.html").exists()


def test_a_page_of_no_runs_or_for_a_folder_that_does_not_exist_is_a_sentence(results, tmp_path):
    with pytest.raises(ConfigError, match=r"^raypfl\.report\.write takes a list of results"):
        write([], tmp_path / "report.html")
    with pytest.raises(ConfigError, match="there is no folder"):
        write(results, tmp_path / "nowhere" / "report.html")


def test_folders_without_a_run_and_runs_that_cannot_be_read_are_left_out_and_listed(results, tmp_path):
    def copy(name: str) -> Path:
        return Path(shutil.copytree(results[0].run_dir, tmp_path / name))

    (tmp_path / "mlartifacts").mkdir()
    (copy("bad-json") / "summary.json").write_text("{")
    (copy("bad-table") / "evaluations.parquet").write_bytes(b"PAR1")
    (copy("no-key") / "summary.json").write_text("{}")
    described = copy("no-class") / "experiment.yaml"
    described.write_text(described.read_text().replace("name: fedavg", "name: not_there:Mine"))
    comparison = tmp_path / "comparison"
    shutil.copytree(results[2].run_dir, comparison / "ditto-s0")
    (comparison / "comparison.yaml").write_text("runs: [")

    runs, notes = find_runs(sorted(tmp_path.iterdir()))

    assert [run.run_dir.name for run in runs] == ["ditto-s0"]
    for name, reason in (
        ("mlartifacts", "contains none"),
        ("bad-json", "is damaged"),
        ("bad-table", "is missing or damaged"),
        ("no-key", "is damaged"),
        ("no-class", "'not_there:Mine' cannot be imported"),
    ):
        (note,) = [note for note in notes if str(tmp_path / name) in note]
        assert reason in note


def test_attempts_that_failed_before_a_round_was_finished_are_one_sentence_unless_there_is_nothing_else(
    results, tmp_path
):
    for attempt in ("first", "second"):
        summary = Path(shutil.copytree(results[0].run_dir, tmp_path / attempt)) / "summary.json"
        failed = {"status": "failed", "round": 0, "error": "A sentence."}
        summary.write_text(json.dumps(json.loads(summary.read_text()) | failed))
    attempts = [tmp_path / "first", tmp_path / "second"]
    shutil.copytree(results[2].run_dir, tmp_path / "good")

    runs, notes = find_runs([tmp_path])
    assert [run.run_dir.name for run in runs] == ["good"]
    assert notes == [f"Left out, since no round was finished before the failure: {attempts[0]}, {attempts[1]}."]
    assert [run.run_dir for run in find_runs(attempts)[0]] == attempts


def test_files_are_ignored_and_a_run_that_is_named_twice_is_one(results, tmp_path, monkeypatch):
    (tmp_path / "compared.png").touch()
    monkeypatch.chdir(results[0].run_dir.parent)
    twice = [results[0].run_dir, Path(results[0].run_dir.name)]
    runs, notes = find_runs([*twice, tmp_path / "compared.png", results[2].run_dir])
    assert [run.weights_hash for run in runs] == [results[0].weights_hash, results[2].weights_hash] and not notes


def test_a_run_that_repeats_another_is_left_out_of_a_report_which_warns_of_it(results, tmp_path):
    again = raypfl.run(results[0].experiment.replace(output=str(tmp_path)))
    sentence = f"{results[0].run_dir} is left out: {again.run_dir}, which ended later, is also fedavg from seed 0."
    for runs in ([results[0], again, results[2]], [again, results[0], results[2]]):
        with pytest.warns(UserWarning, match=f"^{re.escape(sentence)}$"):
            file = write(runs, tmp_path / "table.csv")
    assert {(row["method"], row["seeds"]) for row in csv.DictReader(file.open())} == {("fedavg", "1"), ("ditto", "1")}

    reported = command("report", str(results[0].run_dir), str(again.run_dir), "--out", str(tmp_path / "page.html"))
    assert sentence in " ".join(reported.stderr.split())
    assert sentence in text(ElementTree.fromstring((tmp_path / "page.html").read_text("utf-8")))


def test_of_a_run_that_continues_another_one_the_first_settings_are_said(results, tmp_path):
    parent = results[0]
    branch = {"from_round": 2, "new_run_dir": tmp_path / "branch"}
    lower = raypfl.resume(parent.run_dir, **branch, overrides=["training.lr=0.001"])
    _, notes = find_runs([parent.run_dir, lower.run_dir])
    lr = parent.experiment.training.lr
    assert notes == [f"Up to round 2, {lower.run_dir} is {parent.run_dir}, with training.lr={lr}."]


def test_a_runs_metadata_have_its_clients_device_and_versions(results):
    metadata = raypfl.Result.load(results[0].run_dir).metadata
    assert metadata["num_clients"] == 8 and metadata["device"] == "cpu"
    assert metadata["versions"]["raypfl"] == raypfl.__version__


def test_a_report_in_an_unknown_format_is_refused(results, tmp_path):
    with pytest.raises(ConfigError, match=r"table.docx must end in .html, .tex, .csv, .pdf, .svg or .png"):
        write(results, tmp_path / "table.docx")
    assert not (tmp_path / "table.docx").exists()

    before_reading = command("report", str(tmp_path / "no-such-folder"), "--out", str(tmp_path / "table.docx"))
    assert before_reading.exit_code == 2 and "must end in .html" in before_reading.stderr


@pytest.mark.parametrize(("suffix", "begins"), [("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_report_that_ends_like_a_picture_is_the_picture_of_runs_on_the_same_data(results, tmp_path, suffix, begins):
    file = write(results, tmp_path / f"figure.{suffix}")
    assert file.read_bytes().startswith(begins)

    elsewhere = raypfl.run(results[0].experiment.override(["partition.alpha=5"]), run_dir=tmp_path / "other")
    with pytest.raises(ConfigError, match="holds one picture, but the runs are on 2 different data sets"):
        write([*results, elsewhere], tmp_path / f"both.{suffix}")
    assert not (tmp_path / f"both.{suffix}").exists()


def test_only_a_sweeps_own_folder_is_shown_as_a_search_and_a_killed_one_says_so(results, tmp_path):
    other = tmp_path / "mine"
    shutil.copytree(results[0].run_dir, other / "run")
    (other / "trials.csv").write_text("trial,score\n1,0.5\n")
    (other / "sweep.yaml").write_text("search: {training.lr: {loguniform: [0.01, 1]}}\n")
    assert not has_search(other)
    assert [run.run_dir for run in find_runs([other])[0]] == [other / "run"]

    sweep = tmp_path / "rates"
    shutil.copytree(results[0].run_dir, sweep / "trials/00000")
    shutil.copy(other / "sweep.yaml", sweep)
    (run,), notes = find_runs([sweep])
    assert run.run_dir == sweep / "trials/00000" and "has no trials.csv, since its sweep was killed" in notes[0]
    assert not has_search(sweep)
    _, notes = find_runs([tmp_path, other])
    assert notes[0] == f"The sweep {sweep} is left out: raypfl report {sweep} shows it."
    assert notes[1].startswith(f"{tmp_path} is not a run's folder") and notes[1].endswith(f"raypfl report {tmp_path}/*")

    (sweep / "trials.csv").write_text(
        "trial,status,round,accuracy/val,training.lr,error\n"
        "00000,finished,3,0.9,0.1,\n00002,stopped,1,0.4,0.5,\n00001,failed,0,,0.9,diverged\n"
    )
    assert has_search(sweep)
    (method,) = read_search(sweep, results[0].experiment.measures).methods
    assert method.headings == ["trial", "status", "round", "accuracy/val (%)", "training.lr", "error"]
    assert method.rows[0] == (["00000", "finished", "3", "90.0", "0.1", "–"], True)
    (figure,) = method.figures
    assert figure.caption == "Pale: ended before the last round. Not drawn: 1 trial without a score."
    assert [tick for tick in ("0.01", "0.1", "1") if f">{tick}<" in figure.svg] == ["0.01", "0.1", "1"], "a log axis"


@pytest.mark.usefixtures("without_figures")
def test_searches_by_different_metrics_are_on_one_page_and_a_sweep_of_one_configuration_has_a_page(results, tmp_path):
    rates = swept(results[0], tmp_path / "rates")[:1]
    errors = swept(results[0], tmp_path / "errors")[:1]
    described = errors[0].experiment.override(["objective=regression"])
    measured = errors[0].evaluations.to_pandas().rename(columns={"accuracy": "mse"})
    errors = [replace(errors[0], experiment=described, evaluations=pa.Table.from_pandas(measured))]
    for (trial,) in (rates, errors):
        (trial.run_dir / "experiment.yaml").touch()
    trials = tmp_path / "errors/trials.csv"
    trials.write_text(trials.read_text().replace("accuracy", "mse"))

    for searches in (["rates", "errors"], ["errors", "rates"]):
        folders = [tmp_path / name for name in searches]
        shown = text(ElementTree.fromstring(write([*rates, *errors], tmp_path / "page.html", (), folders).read_text()))
        assert "the best first by accuracy/val" in shown and "the best first by mse/val" in shown

    trials.write_text(trials.read_text().replace("mse", "elsewhere"))
    with pytest.raises(ConfigError, match=r"^The search in .*errors cannot be read"):
        write([*rates, *errors], tmp_path / "page.html", (), folders)


@pytest.mark.usefixtures("without_figures")
def test_a_page_leaves_a_global_model_that_is_partly_untrained_out_of_comparisons_and_says_why(results, tmp_path):
    fedper = changed(shifted(results[2], {"personal": 90, "global": 95}), "method=fedper")
    root = page([fedper], tmp_path)
    headline = text(root.find("body/header/p[@class='lead']"))
    words = text(root)
    assert headline == "The personal models of fedper reach 90.0 % on each client’s own test data."
    assert "In the global model of fedper, what clients keep has its initial values." in words
    assert "Better for" not in words and "nothing to compare client by client" in words

    # Here clients have no other model.
    untrained = changed(shifted(results[0], {"global": 95}), "method=fedper")
    (alone, beside) = (lead_of(part(runs), "global") for runs in ([untrained], [untrained, results[2]]))
    assert alone == "No model with all its parts trained was tested on all clients’ test data together."
    assert "ditto" in beside and "fedper" not in beside


CHOSEN = "00000,finished,3,0.9,0.5,\n00002,finished,3,0.9,0.5,\n"
"""Two trials with the settings that a search chose, in its table."""


def swept(result: raypfl.Result, folder: Path, chosen: str = CHOSEN) -> list[raypfl.Result]:
    """Three trials of the sweep `folder`: 90, 95 and 90 % on test data, of which its search chose the first or last."""
    folder.mkdir()
    (folder / "sweep.yaml").write_text("search: {training.lr: {uniform: [0.1, 1]}}\n")
    table = f"trial,status,round,accuracy/val,training.lr,error\n{chosen}00001,finished,3,0.6,0.2,\n"
    (folder / "trials.csv").write_text(table)
    trials = []
    for name, lr, on_test in (("00000", 0.5, 90), ("00001", 0.2, 95), ("00002", 0.5, 90)):
        (folder / "trials" / name).mkdir(parents=True)
        trial = changed(shifted(result, {"global": on_test, "personal": on_test}), f"training.lr={lr}")
        trials.append(replace(trial, run_dir=folder / "trials" / name))
    return trials


def test_trials_of_a_sweep_are_labelled_with_all_that_it_searches_also_at_its_default(results, tmp_path):
    trials = swept(results[0], tmp_path / "rates")[:2]
    other = replace(trials[1], experiment=trials[1].experiment.override(["training.epochs=2", "training.lr=0.1"]))
    sweep = "search: {training.lr: {choice: [0.1, 0.5]}, training.epochs: {choice: [1, 2]}}\n"
    (tmp_path / "rates/sweep.yaml").write_text(sweep)
    expected = ["fedavg training.epochs=1 training.lr=0.5", "fedavg training.epochs=2 training.lr=0.1"]
    assert run_labels([trials[0], other]) == expected
    assert find_baseline([trials[0], other], expected[1]) == expected[1]

    (tmp_path / "rates/sweep.yaml").write_text("search: [")
    assert run_labels([trials[0], other]) == ["fedavg training.lr=0.5", "fedavg training.epochs=2"]


def test_the_headline_of_a_sweep_names_the_configuration_that_the_search_chose_never_the_best_on_test_data(
    results, tmp_path
):
    trials = swept(results[0], tmp_path / "rates")
    expected = (
        "The search rates chose fedavg training.lr=0.5, the best by accuracy/val. "
        "The global model of fedavg training.lr=0.5 reaches 90.0\u00a0% on each client’s own test data."
    )
    assert lead_of(part(trials[:2]), "local") == expected
    # Of two trials with the same settings, a report has the later one.
    assert lead_of(part(trials[1:]), "local") == expected

    # The search's choice competes with runs from elsewhere.
    beside = lead_of(part([*trials[:2], shifted(results[2], {"personal": 93, "global": 80})]), "local")
    assert "The personal models of ditto training.lr=0.1 are best" in beside and "training.lr=0.2" not in beside

    (tmp_path / "rates/trials.csv").unlink()
    assert lead_of(part(trials[:2]), "local") == "The search rates chose none of these configurations."


@pytest.mark.usefixtures("without_figures")
def test_a_sweeps_trials_are_compared_with_what_the_search_chose_and_no_other_is_bold(results, tmp_path):
    def bold(runs: list[raypfl.Result]) -> set[str]:
        """Methods with a bold number on clients' own test data."""
        body = next(section(page(runs, tmp_path), "results").iter("tbody"))
        methods = set()
        for row in list(body)[1:]:
            if any(element.get("class") == "best" for element in row.iter()):
                methods.add(text(row[0]))
        return methods

    def baselines(runs: list[raypfl.Result]) -> set[str]:
        table = write(runs, tmp_path / "table.csv").read_text()
        return {line["against"] for line in csv.DictReader(table.splitlines()) if line["against"]}

    trials = swept(results[0], tmp_path / "rates")[:2]
    assert bold(trials) == {"fedavg training.lr=0.5"} and baselines(trials) == {"fedavg training.lr=0.5"}
    assert r"\textbf" not in write(trials, tmp_path / "table.tex").read_text()

    others = [shifted(run, {"personal": 93, "global": 93}) for run in (results[2], results[4])]
    names = ("fedavg training.lr=0.5", "ditto training.lr=0.1", "local training.lr=0.1")
    beside = [*trials, *others]
    assert bold(beside) <= {*names} and baselines(beside) == {"fedavg training.lr=0.5"}
    assert "Bold: the best of a column, of what searches chose and of other runs." in text(page(beside, tmp_path))

    # Two sweeps, then one that was killed, whose trials are in no order.
    second = swept(results[2], tmp_path / "pulls", chosen="00000,finished,3,0.9,0.5,\n")[:2]
    assert bold([*trials, *second]) == {"fedavg training.lr=0.5", "ditto training.lr=0.5"}
    assert baselines([*second, *trials]) == {"ditto training.lr=0.5"}
    for sweep in ("rates", "pulls"):
        (tmp_path / sweep / "trials.csv").unlink()
    assert not bold([*trials, *second]) and baselines(trials[::-1]) == {"fedavg training.lr=0.2"}
    assert baselines([*trials, *others]) == {"ditto training.lr=0.1"}
