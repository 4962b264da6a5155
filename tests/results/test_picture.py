"""The picture, the table and the progress of runs, all from made-up results."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import numpy as np
import pyarrow as pa
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from raypfl.cli import messages
from raypfl.devices import Turn
from raypfl.engine.events import Evaluated, Progress, RoundFinished, RunFinished, RunStarted, Warned
from raypfl.evaluation import summarise
from raypfl.experiment import Experiment, experiments
from raypfl.experiment.recipes import settings_of
from raypfl.federation.ledger import LEDGER
from raypfl.integrations.tracking.entries import comparison_description, run_params
from raypfl.results.display import outcome, run_line
from raypfl.results.display.console import LiveView, LogView, View, step_printer, view
from raypfl.results.display.fitting import ProgressConsole
from raypfl.results.display.run_line import RunLine, lines_for, minutes
from raypfl.results.drawing import canvas, draw
from raypfl.results.drawing.plan import draw as draw_plan
from raypfl.results.labels import labels
from raypfl.results.run_groups import group_runs
from raypfl.results.setting_text import setting_text
from raypfl.results.units import over_seeds
from raypfl.runs.planning.plan import Plan
from raypfl.runs.planning.turns import PlannedTurn
from raypfl.storage.columns import Columns
from raypfl.storage.tables import to_arrow

PNG = b"\x89PNG"


@dataclass(frozen=True)
class MadeUp:
    """The attributes that the picture and the table read of a Result."""

    experiment: Experiment
    run_dir: Path
    rounds: pa.Table
    evaluations: pa.Table
    round: int = 10
    status: str = "finished"
    counts: bool = True
    weights_hash: str = "3fa2c19d88e0ffff"
    megabytes: tuple[float, float] = (23.1, 23.0)
    best_round: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    history: tuple[dict[str, Any], ...] = ()
    privacy: pa.Table | None = None
    ledger: pa.Table = field(default_factory=lambda: to_arrow(Columns(LEDGER)))

    @property
    def last_rounds(self) -> list[int]:
        return [max(self.evaluations["round"].to_pylist())]

    def summary(self, round: int | None = None) -> list[dict]:
        round = round or self.last_rounds[0]
        of_round = self.evaluations.filter(pa.compute.equal(self.evaluations["round"], round))
        return summarise(self.experiment.measures, of_round.to_pydict())


def made_up(method, models=("global",), level=0.8, seed=0, clients=20, rounds=(5, 10)) -> MadeUp:
    """A run whose clients' accuracies scatter around a level."""
    keys = product(rounds, ("local", "global"), models, range(clients))
    keys = [(round, client, protocol, model) for round, protocol, model, client in keys]
    accuracy = np.clip(level + np.random.default_rng(seed).normal(0, 0.05, len(keys)), 0, 1)
    names = ("round", "client", "protocol", "model")
    columns = dict(zip(names, map(list, zip(*keys, strict=True)), strict=True))
    evaluations = pa.table(columns | {"samples": [9] * len(keys), "accuracy": accuracy, "loss": 1 - accuracy})
    experiment = Experiment(name="made-up", method=method, seed=seed, rounds=10)
    rounds = pa.table({"round": range(1, 11), "seconds": [0.5] * 10, "clients": [4] * 10})
    return MadeUp(experiment, Path(f"runs/{seed}"), rounds, evaluations)


def without_local_tests(run: MadeUp) -> MadeUp:
    return replace(run, evaluations=run.evaluations.filter(pa.compute.field("protocol") != "local"))


def comparison(seeds: int = 1) -> list[MadeUp]:
    fedavg = [made_up("fedavg", ("global",), 0.8, seed) for seed in range(seeds)]
    ditto = [made_up("ditto", ("personal", "global"), 0.9, seed) for seed in range(seeds)]
    return fedavg + ditto


def show(console: Console, results: list, pictures: dict, words: list[str]) -> None:
    """Show the outcome of a command with these words."""
    outcome.show(console, results, pictures, words, Path("runs/2026"), "mlflow ui")


def printed(show, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    show(console)
    return console.file.getvalue()


def terminal(width: int) -> Console:
    """A console that takes itself for a terminal."""
    return Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)


def without_test_samples(run: MadeUp, client: int) -> MadeUp:
    columns = run.evaluations.to_pydict()
    columns["samples"][client] = 0
    columns["accuracy"][client] = nan
    return replace(run, evaluations=pa.table(columns))


@pytest.mark.parametrize(
    "results",
    [
        comparison(seeds=3),
        [made_up("local", models=("personal",), clients=500, rounds=(10,))],
        [made_up("fedavg"), without_local_tests(made_up("fedamp", ("personal",)))],
        [without_test_samples(made_up("fedavg"), client=0)],
    ],
    ids=["three seeds", "one evaluation, no global model", "a method not tested so", "a client without test data"],
)
def test_runs_are_drawn_whatever_models_tests_or_rounds_they_lack(results, tmp_path: Path):
    assert draw(results, tmp_path / "picture.png").read_bytes().startswith(PNG)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures of all pictures that are drawn."""
    figures: list[Figure] = []

    def keep_figure(**options: Any) -> Figure:
        figures.append(Figure(**options))
        return figures[-1]

    monkeypatch.setattr(canvas, "Figure", keep_figure)
    return figures


def test_a_picture_of_runs_in_simulated_time_shows_when_models_were_good(tmp_path: Path, figures: list[Figure]):
    slow, fast = comparison()
    times = {"slow": 3600.0 * np.arange(1, 11), "fast": 60.0 * np.arange(1, 11)}
    slow = replace(slow, rounds=slow.rounds.append_column("simulated_time", [times["slow"]]))
    timed = replace(fast, rounds=fast.rounds.append_column("simulated_time", [times["fast"]]))

    draw([slow, timed], tmp_path / "timed.png")
    draw([slow, slow], tmp_path / "equal.png")
    draw([slow, fast], tmp_path / "untimed.png")

    axes, equal_axes, untimed_axes = (figure.axes[0] for figure in figures)
    lines = [line.get_xdata().tolist() for line in axes.get_lines()]
    assert (axes.get_xlabel(), axes.get_xscale()) == ("simulated hours, logarithmic", "log")
    assert (equal_axes.get_xlabel(), equal_axes.get_xscale()) == ("simulated hours", "linear")
    assert untimed_axes.get_xlabel() == "round"
    marks = [label.get_text() for label in axes.get_xticklabels()]
    assert {"0.1", "0.2", "0.5", "1", "2", "5", "10"} <= set(marks)
    assert "over simulated time" in axes.get_title("left") and "over rounds" in untimed_axes.get_title("left")
    assert lines == [[5, 10], [5 / 60, 10 / 60], [5 / 60, 10 / 60]]

    accuracy = slow.evaluations.schema.get_field_index("accuracy")
    without_values = pa.nulls(slow.evaluations.num_rows, pa.float64())
    undefined = replace(slow, evaluations=slow.evaluations.set_column(accuracy, "accuracy", without_values))
    draw([undefined], tmp_path / "undefined.png")
    assert not figures[-1].axes[0].get_lines()


def test_the_picture_of_a_plan_has_its_title_and_shows_every_reply(tmp_path: Path, figures: list[Figure]):
    turns = [PlannedTurn(round, 0, 0, round - 1.0, float(round), "counted", 0) for round in range(1, 5)]
    numbers = {"begins": np.arange(4.0), "seconds": np.ones(4)}
    for name in ("joules", "bytes_down", "bytes_up", "clients", "dropped", "late", "taken_part", "drawn"):
        numbers[name] = np.ones(4)
    staleness = np.repeat([0, 1, 30], [100_000, 5_000, 1])
    title = "fedavg " + " ".join(f"asynchronous.option_{i}={i}" for i in range(9))

    draw_plan(Plan(Turn(()), 4, turns=tuple(turns), staleness=staleness, **numbers), tmp_path / "plan.png", title)

    (figure,) = figures
    figure.draw_without_rendering()
    assert figure.get_suptitle().split() == title.split()
    extent = figure._suptitle.get_window_extent()
    assert extent.x0 > 0 and extent.x1 < figure.bbox.width
    replies = figure.subfigs[1].axes[1]
    heights = [bar.get_window_extent().height for bar in replies.patches if bar.get_height()]
    assert len(heights) == 3 and min(heights) > 2, "a bar is less than two pixels high"


@pytest.mark.parametrize("methods", [1, 6])
def test_no_legend_covers_data(methods: int, tmp_path: Path, figures: list[Figure]):
    runs = []
    for lam, seed in product(range(methods), (0, 1)):
        runs.append(made_up({"name": "ditto", "lam": lam}, ("personal", "global"), seed=seed))

    draw(runs, tmp_path / "picture.png")

    (figure,) = figures
    figure.draw_without_rendering()
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    labels_shown = [text.get_text() for legend in legends for text in legend.get_texts()]
    explained = {"personal model", "global model", "band: from the lowest to the highest seed"}
    if methods > 1:
        explained.add("dashes of several colours: equal values")
    assert explained < set(labels_shown) and len(labels_shown) == methods + len(explained)
    for legend, axes in product(legends, figure.axes):
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_a_setting_of_many_words_stays_on_the_picture(tmp_path: Path):
    spiral = made_up("fedavg")
    model = {"name": "mlp", "hidden": [64] * 12, "latent": 2, "head_bias": False}
    long = replace(spiral, experiment=spiral.experiment.replace(model=model))
    pixels = imread(draw([long], tmp_path / "picture.png"))[:, :, :3]
    assert (pixels[:, :4] == 1).all() and (pixels[:, -4:] == 1).all()


def setting_of(experiment: Experiment, **metadata: Any) -> str:
    return setting_text([RunStarted("run", "runs/run", experiment, metadata, first_round=0)])


@pytest.mark.parametrize(("reader", "options"), [("table", {}), ("text_table", {"text": "review"})])
def test_tables_in_two_folders_are_two_settings(reader, options):
    texts = []
    for folder in ("films", "shops"):
        data = {"name": reader, "root": f"/data/{folder}", "target": "opinion", **options}
        texts.append(setting_of(Experiment(data=data)))
    assert f"{reader}(films)" in texts[0] and f"{reader}(shops)" in texts[1]


def test_a_setting_names_the_options_of_the_partition_that_are_not_at_their_default():
    usual = {"name": "dirichlet", "alpha": 0.3}
    patient = usual | {"tries": 50}
    assert setting_of(Experiment(partition=usual)) == "digits · 20 clients · dirichlet(alpha=0.3) · mlp"
    assert "dirichlet(alpha=0.3, tries=50)" in setting_of(Experiment(partition=patient))


def test_a_setting_prints_options_as_a_command_has_them_also_those_of_networks_within_a_network():
    networks = {"name": "heterogeneous", "networks": [{"name": "mlp", "hidden": [64]}, "cnn"]}
    text = setting_of(Experiment(method="local", model=networks, compression="top_k"))
    assert "heterogeneous(networks=[mlp(hidden=[64]), cnn]" in text and "top_k(error_feedback=true, " in text


def test_a_population_is_announced_with_its_clients_and_without_a_partition():
    described = Experiment(data="tests.support.federated_data:GeneratedClients")
    text = setting_of(described, num_clients=4)
    assert text == "tests.support.federated_data:GeneratedClients · 4 clients · mlp"
    assert not [key for key in run_params(described) if key.startswith("partition")]


def test_twelve_methods_have_colours_of_their_own():
    runs = [made_up({"name": "ditto", "lam": i}) for i in range(12)]
    assert len({group.colour for group in group_runs(runs)}) == 12


def test_namesakes_are_labelled_with_the_options_that_differ():
    runs = [Experiment(method=m) for m in ("fedavg", {"name": "ditto", "lam": 0.1}, {"name": "ditto", "lam": 1})]
    assert labels(runs) == ["fedavg", "ditto lam=0.1", "ditto lam=1.0"]

    # An option that is off by default is shown only where it is on.
    runs = [Experiment(method={"name": "ditto", "personal_epochs": epochs}) for epochs in (None, 2)]
    assert labels(runs) == ["ditto", "ditto personal_epochs=2"]
    runs = [Experiment(method={"name": "fedpac", "head_lr": lr}) for lr in (None, 0.1)]
    assert labels(runs) == ["fedpac head_lr=null", "fedpac head_lr=0.1"]


def test_a_label_has_the_settings_of_its_method_and_the_first_label_has_none():
    ditto_settings = {"training": {"lr": 0.05}, "model.hidden": [8]}
    local_settings = {"training.lr": 0.2}
    methods = [
        "fedavg",
        {"name": "ditto", "settings": ditto_settings},
        {"name": "local", "settings": local_settings},
    ]
    expected = ["fedavg", "ditto training.lr=0.05 model.hidden=[8]", "local training.lr=0.2"]
    assert labels(experiments({"methods": methods})) == expected
    assert labels(experiments({"methods": methods, "seeds": 2})) == [label for label in expected for _ in range(2)]

    twice = ["fedavg", {"name": "fedavg", "settings": {"training.lr": 0.2}}]
    assert labels(experiments({"methods": twice})) == ["fedavg training.lr=0.1", "fedavg training.lr=0.2"]


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({"model": "lenet", "training.optimizer": "adam"}, "ditto model=lenet training.optimizer=adam"),
        (
            {f"training.{key}": 3 for key in ("epochs", "batch_size", "clip_norm", "weight_decay")},
            "ditto training.epochs=3 training.batch_size=3 training.weight_decay=3.0 training.clip_norm=3.0",
        ),
        (
            {"model.hidden": [8, 8], "training.lr": 0.05, "training.epochs": 3},
            "ditto training.epochs=3 training.lr=0.05 model.hidden=[8, 8]",
        ),
        (
            {"model": "lenet", "training.epochs": 3, "training.weight_decay": 0.001},
            "ditto model=lenet training.epochs=3 training.weight_decay=0.001",
        ),
    ],
)
def test_settings_stand_in_a_label_in_their_order(settings: dict[str, Any], label: str):
    methods = ["fedavg", {"name": "ditto", "settings": settings}]
    assert labels(experiments({"methods": methods})) == ["fedavg", label]


def test_settings_of_the_first_method_are_those_that_other_labels_differ_from():
    methods = [
        {"name": "fedavg", "settings": {"model.hidden": [8, 8]}},
        {"name": "ditto", "settings": {}},
        {"name": "local", "settings": {"training": {"lr": 0.2, "epochs": 3}, "model": "lenet"}},
    ]
    assert labels(experiments({"methods": methods})) == [
        "fedavg",
        "ditto model.hidden=default",
        "local model=lenet training.epochs=3 training.lr=0.2",
    ]


def test_runs_with_other_settings_are_labelled_with_those_that_differ():
    runs = [Experiment(method=m) for m in ("fedavg", {"name": "ditto", "lam": 0.1}, {"name": "ditto", "lam": 1})]
    faster = runs[1].override(["training.lr=0.5"])
    names = ["fedavg training.lr=0.1", "ditto lam=0.1 training.lr=0.1", "ditto lam=1.0 training.lr=0.1"]
    assert labels([*runs, faster]) == [*names, "ditto lam=0.1 training.lr=0.5"]

    longer = faster.override(["rounds=4"])
    assert labels([*runs, faster, longer]) == [
        *("fedavg", "ditto lam=0.1", "ditto lam=1.0"),
        "ditto lam=0.1 training.lr=0.5",
        "ditto lam=0.1 rounds=4 training.lr=0.5",
    ]

    searched = [faster.override([f"rounds={n}", f"training.lr={n}"]) for n in range(1, 29)]
    assert labels(searched)[:2] == ["ditto rounds=1 training.lr=1.0", "ditto rounds=2 training.lr=2.0"]
    many = [trial.override([f"training.weight_decay={trial.rounds}"]) for trial in searched]
    assert labels(many)[27] == "ditto rounds=28 training.lr=28.0 training.weight_decay=28.0"
    assert len(set(labels(many))) == 28


def test_runs_of_one_label_have_the_same_settings():
    networks = [{"name": "mlp", "hidden": [8]}, *({"name": "vit_s_16", "depth": depth} for depth in (1, 2))]
    runs = [Experiment(method="ditto", model=network) for network in networks]
    expected = ["ditto model.hidden=[8]", "ditto model=vit_s_16 model.depth=1", "ditto model=vit_s_16 model.depth=2"]
    assert labels([Experiment(), *runs]) == ["fedavg", *expected]
    assert labels(runs) == expected

    assert labels(experiments(settings_of("devices-digits"))[:3]) == [
        "fedavg",
        "fedavg cohort.over_selection=1.5",
        "fedavg cohort.deadline=1.0 cohort.late=partial",
    ]

    private = [Experiment(method="fedavg", privacy={"noise": 1.0}), Experiment(method="ditto")]
    both = [*private, private[1].override(["privacy={noise: 1.0}"])]
    assert labels(both) == ["fedavg privacy.noise=1.0", "ditto", "ditto privacy.noise=1.0"]


def test_labels_do_not_name_a_file_of_weights_that_other_differing_settings_determine():
    pretrained = []
    for planned in experiments(settings_of("lora-digits")):
        pretrained.append(planned.override([f"model.weights=/cache/{planned.model.lora}.safetensors"]))
    named = [
        "fedavg",
        "partial",
        "fedper",
        "ffa-lora",
        "flexlora",
        "fedsa-lora",
        "fedavg model.lora=0 training.lr=0.02",
    ]
    of_output_layers = [f"{method} model.lora=0 model.trained=output layer" for method in ("fedavg", "local")]
    assert labels(pretrained) == [*named, *of_output_layers]
    assert "weights" not in setting_of(pretrained[0])


def test_runs_that_differ_in_their_seed_alone_are_one_group():
    assert [len(group.results) for group in group_runs(comparison(seeds=3))] == [3, 3]


def test_several_seeds_give_mean_and_deviation():
    assert [str(over_seeds(values)) for values in ([], [1.25], [1.0, 2.0])] == ["–", "1.2", "1.5±0.7"]
    assert [str(over_seeds([1.0, value])) for value in (inf, nan)] == ["inf±nan", "nan±nan"]


def test_the_spread_over_seeds_is_explained_where_there_is_one():
    for seeds in (1, 2):
        results = comparison(seeds=seeds)
        on_terminal = printed(lambda console, results=results: show(console, results, {}, ["digits"]))
        for text in (on_terminal, comparison_description(results)):
            assert ("±" in text.replace("±:", "")) == ("±: standard deviation over seeds." in text) == (seeds == 2)


def test_the_table_has_a_row_for_each_method_and_protocol_and_fits_eighty_columns():
    text = printed(lambda console: console.print(outcome.table(comparison())))
    rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows if len(row) > 5][-2:] == ["fedavg", "ditto"]
    assert sum("local" in row for row in rows) == sum("global" in row for row in rows) - 1 == 2
    assert max(map(len, text.splitlines())) <= 80


def test_runs_with_a_best_round_have_a_row_for_it():
    results = [replace(result, best_round=5) for result in comparison(seeds=2)]
    text = printed(lambda console: show(console, results, {}, ["digits"]))
    rows = [line for line in text.partition("Accuracy in %")[0].splitlines() if "local*" in line]
    means = [group.scores("local", best=True) for group in group_runs(results)]
    assert all(str(over_seeds(mean)) in row for row, mean in zip(rows, means, strict=True))
    assert "best on the clients' validation data" in text
    assert max(len(line) for line in text.splitlines() if "mlflow ui" not in line) <= 80  # that names this folder
    assert "local*" not in printed(lambda console: console.print(outcome.table(comparison())))


def test_one_model_on_one_test_set_has_no_spread():
    text = printed(lambda console: console.print(outcome.table([made_up("fedavg")])))
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["global"]]
    assert row[1] == row[3] == row[4] == "–"


def with_columns(results: list[MadeUp], **values: float) -> list[MadeUp]:
    """The same results with further metrics, of the same value in all rows."""
    changed = []
    for result in results:
        columns = result.evaluations.to_pydict()
        added = {name: [value] * len(columns["round"]) for name, value in values.items()}
        changed.append(replace(result, evaluations=pa.table(columns | added)))
    return changed


def with_setting(results: list[MadeUp], assignment: str) -> list[MadeUp]:
    """The same results as if the runs had had another setting."""
    return [replace(result, experiment=result.experiment.override([assignment])) for result in results]


def test_multi_label_runs_are_compared_by_their_auc():
    results = with_columns(with_setting(comparison(), "objective=multi-label"), auc=0.777, left_out=0.0)
    text = printed(lambda console: show(console, results, {}, ["digits"]))

    rows = [line.split()[2:7] for line in text.splitlines() if line.split()[1:2] == ["local"]]
    fedavg, ditto = (group.scores("local", aggregate="accuracy") for group in group_runs(results))
    assert rows == [
        ["–", "77.7", "0.0", "77.7", str(over_seeds(fedavg))],
        ["77.7", "77.7", "0.0", "77.7", str(over_seeds(ditto))],
    ]
    assert "Macro AUC in %" in text and "Accuracy in %" not in text and "ECE" not in text


def test_calibration_errors_are_shown_where_there_is_room():
    results = with_columns(comparison(), ece=0.0666)
    wide = printed(lambda console: show(console, results, {}, ["digits"]), 80)
    narrow = printed(lambda console: show(console, results, {}, ["digits"]), 64)
    assert "ECE" in wide and " 6.7 " in wide
    assert "ECE" not in narrow.partition("Accuracy in %")[0] and " 6.7 " not in narrow
    assert "A wider terminal has room for more columns: ECE" in narrow


def test_the_first_rounds_start_does_not_make_a_method_look_slow():
    first, second = comparison()
    rounds = pa.table({"round": range(1, 11), "seconds": [99.0, 7.0] + [0.5] * 8, "clients": [4] * 10})
    text = printed(lambda console: show(console, [replace(first, rounds=rounds), second], {}, ["digits"]))
    table, _, notes = text.partition("Accuracy in %")
    assert table.count(" 5.0 ") == 2 and "Seconds: number of rounds x median round" in notes


def test_below_the_table_stands_what_the_seconds_of_runs_are_that_advanced_together():
    apart, joined = comparison()
    runs = [apart, replace(joined, metadata={"together": 2})]
    text = " ".join(printed(lambda console: show(console, runs, {}, ["digits"])).split())
    assert "without evaluation. The runs of ditto advanced together: their seconds are their own turns" in text


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ((1, 1), "1 client without test samples is left out of local."),
        ((2, 2), "2 clients without test samples are left out of local."),
        ((0, 2), "0 to 2 clients, by the seed, have no test samples and are left out of local."),
    ],
)
def test_below_the_table_stands_how_many_clients_have_no_test_samples(numbers: tuple[int, int], sentence: str):
    runs = [
        replace(run, metadata={**run.metadata, "clients_without_test_samples": number})
        for run, number in zip(comparison(), numbers, strict=True)
    ]
    assert sentence in " ".join(printed(lambda console: show(console, runs, {}, ["digits"])).split())
    assert "left out" not in printed(lambda console: show(console, comparison(), {}, ["digits"]))


def test_methods_keep_whole_words_where_the_table_is_narrow_and_columns_make_room_for_them():
    namesakes = [{"name": "ditto", "lam": lam} for lam in (0.1, 1.0)]
    runs = [made_up(method, ("personal", "global"), seed=seed) for method in namesakes for seed in range(3)]
    runs = with_columns(runs, ece=0.0666)
    for width, dropped in ((80, ["ECE"]), (71, ["ECE", "std"]), (62, ["ECE", "std", "AUC\nstd", "seconds"])):
        text = printed(lambda console: show(console, runs, {}, ["digits"]), width)
        table = text.partition("Accuracy in %")[0]

        whole = printed(lambda console, dropped=dropped: console.print(outcome.table(runs, dropped)), 200)
        words = {word for word in whole.split() if "─" not in word}
        assert words <= set(table.split()), table
        assert not {"…", dropped[0], dropped[-1]} & set(table.split())
        assert ("(std, worst decile)" in text) == ("std" not in dropped)


@pytest.mark.parametrize("width", [60, 50, 40])
def test_a_narrow_terminal_has_fewer_columns_and_no_number_is_cropped(width):
    runs = [made_up({"name": "ditto", "lam": 0.1}, ("personal", "global"), seed=seed) for seed in range(3)]
    lines = printed(lambda console: show(console, runs, {}, ["digits"]), width).splitlines()
    (row,) = [line.split() for line in lines if "local" in line.split()]
    (group,) = group_runs(runs)
    for model in ("personal", "global"):
        assert str(over_seeds(group.scores("local", model))) in row
    words = " ".join(" ".join(lines).split())
    assert "room for more columns: std, " in words and ("worst decile." in words) == (width == 40)
    assert all(len(line) <= width for line in lines if "local" in line or "─" in line)


def test_a_narrow_terminal_shows_progress_without_cropping_it():
    console = terminal(50)
    line = RunLine("fedavg", 2000)
    with LiveView(console, [line]) as shown:
        for event in (started(2000), finished(1234), evaluated(1234)):
            shown.listener(0)(event)
        text = printed(lambda plain: plain.print(shown.render()), 50)
    assert "1234/2000" in text and "– / 12,340.0" in text and "MB" not in text


def times_left(
    monkeypatch: pytest.MonkeyPatch, rounds: int, every: int, recorded: list[tuple[RoundFinished | Evaluated, float]]
) -> list[str]:
    """What is shown after each event, at these recorded seconds since the start."""
    line = RunLine("fedavg")
    now = iter([0.0, *(seconds for _, seconds in recorded)])
    monkeypatch.setattr(run_line.time, "monotonic", lambda: next(now))
    line(replace(started(rounds), experiment=Experiment(rounds=rounds, evaluation={"every": every})))
    shown = []
    for event, _ in recorded:
        line(event)
        shown.append(line.clock)
    return shown


def test_the_time_left_does_not_count_the_rounds_that_warmed_up(monkeypatch: pytest.MonkeyPatch):
    # Ditto with the CNN on digits.
    ends = [0.609, 1.446, 2.121, 2.449, 2.838, 3.198, 3.526, 3.866, 4.262, 4.654]
    recorded = [(finished(round), seconds) for round, seconds in enumerate(ends, start=1)]
    shown = times_left(monkeypatch, 200, 0, recorded)
    # 196 rounds of 0.33 s, then 190 of 0.36 s.
    assert shown[:4] == ["", "", "", "1:04 left"] and shown[-1] == "1:09 left"


def test_the_time_left_counts_each_evaluation_to_come_once(monkeypatch: pytest.MonkeyPatch):
    recorded = [(finished(round), 2.0 * round) for round in range(1, 11)]
    recorded += [(evaluated(10), 50.0), (finished(11), 52.0)]
    # 89 rounds of 2 s and nine evaluations of 30 s.
    assert times_left(monkeypatch, 100, 10, recorded)[-2:] == ["7:30 left", "7:28 left"]
    assert times_left(monkeypatch, 100, 0, recorded)[-1] == "3:28 left"


def test_the_time_left_of_long_rounds_is_shown_after_the_second(monkeypatch: pytest.MonkeyPatch):
    recorded = [(finished(1), 80.0), (finished(2), 140.0)]
    assert times_left(monkeypatch, 5, 0, recorded) == ["", "3:00 left"]


def test_a_warning_is_shown_once_and_stays_above_the_table_that_is_redrawn():
    console = terminal(80)
    with LiveView(console, [RunLine("fedavg")]) as shown, catch_warnings():
        showwarning = partial(messages._show_warning, None, set())
        for line in (1, 2):
            showwarning(UserWarning("beware of it"), UserWarning, "method.py", line)
        # Not shown: what a library's developers say to each other. It would be shown by None.
        showwarning(Warning("needs another package"), Warning, pytest.__file__, 1)
        shown.console.print("and go on")
    text = console.file.getvalue()
    assert text.count("Warning: beware of it\n") == 1 and text.index("beware") < text.index("and go on")


def test_suggested_commands_keep_changed_settings():
    words = ["mine.yaml", "data.root=/d/my images", "partition.alpha=1", "methods=[fedavg,ditto]", "method.lam=2"]
    text = printed(lambda console: show(console, comparison(), {}, words))
    same = "raypfl run mine.yaml 'data.root=/d/my images'"
    assert f"{same} partition.alpha=1 'methods=[fedavg,ditto]' method.lam=2 seeds=3\n" in text
    whole = ["digits", "partition={name: dirichlet, alpha: 1}"]
    text = printed(lambda console: show(console, comparison(), {}, whole))
    assert "raypfl run digits 'partition={name: dirichlet, alpha: 1}' seeds=3\n" in text
    text = printed(lambda console: show(console, comparison(), {}, ["digits", "rounds=5"]))
    assert "raypfl run digits rounds=5 partition.alpha=0.1 seeds=3\n" in text

    # What a user's file says of the partition stays.
    assert "raypfl run mine.yaml seeds=3\n" in printed(lambda console: show(console, comparison(), {}, ["mine.yaml"]))

    skewed = with_setting(comparison(), "partition.alpha=0.1")
    assert "raypfl run digits seeds=3\n" in printed(lambda console: show(console, skewed, {}, ["digits"]))


def test_the_outcome_ends_with_all_files_and_suggestions():
    text = printed(lambda console: show(console, comparison(), {"Picture": Path("runs/p.png")}, ["digits"]))
    for part in ("runs/p.png", "3fa2c19d88e0", "mlflow ui", "raypfl resume runs/2026 rounds=20"):
        assert part in text
    assert "raypfl report runs/2026\n" in text

    longer = with_setting(comparison()[:1], "rounds=30")
    of_own_lengths = [*comparison()[1:], *longer]
    assert "raypfl resume" not in printed(lambda console: show(console, of_own_lengths, {}, ["digits"]))


def test_a_comparison_suggests_to_go_on_with_the_method_that_was_best():
    of_people = "data={name: table, root: people.csv, target: bought}"
    of_reviews = "data={name: text_table, root: reviews.csv, text: review, target: stars}"
    for table in (of_people, of_reviews):
        runs_of_table = enumerate(with_setting(comparison(), table))
        fedavg, ditto = (replace(run, run_dir=Path(f"runs/{i}")) for i, run in runs_of_table)
        for runs in ([fedavg, ditto], [ditto, fedavg]):
            text = printed(lambda console, runs=runs: show(console, runs, {}, ["mine.yaml"]))
            assert "raypfl list methods ditto\n" in text and "raypfl predict runs/1 NEW_ROWS.csv\n" in text
        alone = printed(lambda console, run=fedavg: show(console, [run], {}, ["mine.yaml"]))
        assert "raypfl list methods\n" in alone and "raypfl predict runs/0 NEW_ROWS.csv\n" in alone


def test_the_outcome_as_json_is_plain():
    document = json.loads(json.dumps(outcome.as_json(comparison(), {})))
    assert [run["experiment"]["method"]["name"] for run in document["runs"]] == ["fedavg", "ditto"]
    assert {row["protocol"] for row in document["runs"][0]["summary"]} == {"local", "global"}


def events(experiment: Experiment):
    """The events of a run, as a listener gets them."""
    yield Progress("starting Ray")
    metadata = {"num_clients": 20, "parameters": 9610, "executor": "vectorised", "group_size": 10, "actors": 2}
    yield RunStarted("made-up", "runs/made-up", experiment, metadata, first_round=0)
    for round in range(1, experiment.rounds + 1):
        yield finished(round)
    yield Evaluated(experiment.rounds, [{"protocol": "local", "model": "global", "accuracy": 0.5}])
    yield Warned("The cache was damaged.")
    yield RunFinished("finished", experiment.rounds, "3fa2c1")


def test_the_screen_names_no_step_before_there_is_one():
    assert "Ray" not in printed(lambda console: console.print(LiveView(console, [RunLine("fedavg")]).render()))


def test_a_line_follows_its_run():
    experiment = Experiment(rounds=4)
    line = RunLine("fedavg")
    statuses = []
    for event in events(experiment):
        line(event)
        statuses.append(line.status)
    assert (line.round, line.rounds, line.scores, line.traffic) == (4, 4, "– / 50.0", "4.0 / 8.0")
    assert list(dict.fromkeys(statuses)) == ["waiting", "running", "finished"]


def test_a_line_has_no_accuracies_after_an_evaluation_without_a_model():
    line = RunLine("mine", 3)
    line(Evaluated(1, []))
    assert line.scores == ""


def test_runs_with_several_seeds_say_which():
    planned = [Experiment(method=method, seed=seed) for method in ("fedavg", "ditto") for seed in (0, 1)]
    lines = lines_for(planned)
    assert [line.label for line in lines] == ["fedavg · seed 0", "fedavg · seed 1", "ditto · seed 0", "ditto · seed 1"]
    assert lines[0].colour == lines[1].colour != lines[2].colour


def test_without_a_terminal_a_long_run_takes_about_ten_lines():
    experiment = Experiment(rounds=1000)

    def play(console: Console) -> None:
        with view(console, lines_for([experiment])) as shown:
            assert isinstance(shown, LogView)
            for event in events(experiment):
                shown.listener(0)(event)

    text = printed(play)
    assert text.count("fedavg: round") == 10
    assert (
        "starting Ray" in text
        and "Warning: The cache was damaged." in text
        and "fedavg: finished, 1,000 rounds in" in text
    )


@pytest.mark.parametrize(
    ("seeds", "line"), [(1, ""), (2, "2 runs: fedavg · seed 0, fedavg · seed 1"), (40, "40 runs: fedavg · seed 0, ")]
)
def test_without_a_terminal_several_runs_are_announced(seeds: int, line: str):
    def begin(console: Console) -> None:
        with view(console, lines_for([Experiment(seed=seed) for seed in range(seeds)])):
            pass

    text = printed(begin)
    assert text.startswith(line) and len(text) < 400 and bool(text) == bool(line)


def logged_lines(events, clock=lambda: 0.0) -> list[str]:
    """The lines that are printed for a run without a terminal."""

    def play(console: Console) -> None:
        with LogView(console, [RunLine("fedavg", colour="#000000")], clock) as shown:
            for event in events:
                shown.listener(0)(event)

    return printed(play, 200).splitlines()


def started(rounds: int, first_round: int = 0) -> RunStarted:
    return RunStarted("made-up", "runs/made-up", Experiment(rounds=rounds), {}, first_round)


def finished(round: int) -> RoundFinished:
    totals = {"bytes_up_total": 1_000_000 * round, "bytes_down_total": 2_000_000 * round}
    return RoundFinished(round, 1 / round, 0.1, 1_000_000, 2_000_000, clients=20, dropped=0, failed=0, **totals)


def evaluated(round: int) -> Evaluated:
    return Evaluated(round, [{"protocol": "local", "model": "global", "accuracy": round / 10}])


def test_after_half_a_minute_of_silence_a_round_has_a_line_before_the_next_tenth():
    now = iter(range(0, 10_000, 4))
    forty_rounds = [started(2000), *(finished(round) for round in range(1, 41))]
    lines = logged_lines(forty_rounds, lambda: next(now))
    rounds = [int(line.split("round ")[1].partition("/")[0]) for line in lines if "fedavg: round" in line]
    assert len(rounds) >= 3 and max(rounds) < 200
    assert len(logged_lines(forty_rounds)) == 1


def test_the_accuracy_of_an_earlier_round_is_shown_with_that_round():
    rounds = [finished(1), finished(2), evaluated(2), finished(3)]
    first, second, third, end = logged_lines([started(3), *rounds, RunFinished("stopped", 3, "3fa2c1")])[1:]
    assert "global" not in first
    assert "global 20.0 %, " in second
    assert "global 20.0 % (round 2), " in third and end.endswith("global 20.0 % (round 2)")


def test_a_round_without_a_training_loss_shows_none():
    _, line, _ = logged_lines(
        [started(2), replace(finished(1), loss=float("nan")), RunFinished("stopped", 1, "3fa2c1")]
    )
    assert "round 1/2" in line and "loss" not in line and "nan" not in line


def test_the_table_on_a_terminal_marks_the_accuracy_of_an_earlier_round_too():
    console = terminal(100)
    with LiveView(console, [RunLine("fedavg")]) as shown:
        tables = []
        for event in (started(3), finished(1), finished(2), evaluated(2), finished(3)):
            shown.listener(0)(event)
            tables.append(printed(lambda plain: plain.print(shown.render()), 100))
    assert "– / 20.0 (round 2)" in tables[-1] and "– / 20.0" in tables[-2] and "(round 2)" not in tables[-2]


def test_a_step_of_the_start_up_is_logged_once_a_run():
    preparing = Progress("preparing data")
    first_run = [preparing, Progress("starting Ray"), preparing, started(1), finished(1)]
    lines = logged_lines([*first_run, RunFinished("finished", 1, "3fa2c1"), preparing])
    assert lines[:2] == ["preparing data", "starting Ray"] and lines.count("preparing data") == 2
    assert lines[-1] == "preparing data"


def test_the_address_of_the_dashboard_stays_on_the_screen():
    dashboard = Progress("Ray's dashboard: http://127.0.0.1:8265.", stays=True)
    assert logged_lines([Progress("starting Ray"), dashboard, started(1)])[:2] == ["starting Ray", dashboard.text]

    console = terminal(80)
    with LiveView(console, [RunLine("fedavg")]) as shown:
        shown.listener(0)(dashboard)
    assert console.file.getvalue().count(dashboard.text) == 1


def test_the_last_line_has_the_rounds_and_their_time():
    whole = logged_lines([started(2), finished(1), finished(2), RunFinished("finished", 2, "3fa2c1")])
    assert whole[-1] == "fedavg: finished, 2 rounds in 0:00"
    joined = replace(started(1), metadata={"together": 3})
    ended = logged_lines([joined, finished(1), RunFinished("finished", 1, "3fa2c1")])[-1]
    assert ended == "fedavg: finished, 1 round in 0:00 with 2 other runs in one process"
    resumed = logged_lines([started(3, 2), finished(3), RunFinished("finished", 3, "3fa2c1")])
    assert resumed[-1] == "fedavg: finished after round 3, 1 round in 0:00"


def test_on_a_terminal_the_table_shows_every_run():
    console = terminal(80)
    planned = [Experiment(method=method, rounds=2) for method in ("fedavg", "ditto")]
    with view(console, lines_for(planned)) as shown:
        assert isinstance(shown, LiveView)
        for event in events(planned[0]):
            shown.listener(0)(event)
        text = printed(lambda plain: plain.print(shown.render()))
    assert "✓  fedavg" in text and "2/2" in text and "·  ditto" in text and "0/2" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_terminal_too_small_for_all_runs_shows_those_that_are_running():
    console = terminal(80)
    planned = [Experiment(seed=seed, rounds=2) for seed in range(30)]
    with view(console, lines_for(planned)) as shown:
        assert isinstance(shown, LiveView)
        for event in events(planned[0]):
            shown.listener(0)(event)
        shown.listener(7)(next(event for event in events(planned[7]) if isinstance(event, RunStarted)))
        text = printed(lambda plain: plain.print(shown.render()))
    assert "1 of 30 runs have ended, 1 are running" in text and text.count("fedavg · seed") == 1
    assert "fedavg · seed 7" in text


def test_lines_of_concurrent_runs_are_not_repeated():
    planned = [Experiment(seed=seed, rounds=1) for seed in range(2)]

    def play(console: Console) -> None:
        with view(console, lines_for(planned)) as shown:
            for simultaneous in zip(*map(events, planned), strict=True):
                for i, event in enumerate(simultaneous):
                    shown.listener(i)(event)

    assert printed(play).count("round 1/1") == 2


def test_quietly_only_warnings_are_shown():
    def play(console: Console) -> None:
        with view(console, [RunLine("fedavg")], quiet=True) as shown:
            assert type(shown) is View
            for event in events(Experiment()):
                shown.listener(0)(event)

    assert printed(play) == "Warning: The cache was damaged.\n"


def test_a_run_goes_on_and_prints_its_result_after_the_reader_of_its_lines_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As in `raypfl run ... 2>&1 | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with (tmp_path / "stdout").open("w") as stdout, os.fdopen(writer, "w") as lines:
        monkeypatch.setattr(sys, "stdout", stdout)
        with view(ProgressConsole(lines), [RunLine("fedavg")]) as shown:
            for event in events(Experiment()):
                shown.listener(0)(event)
        print("the result")
    assert shown.lines[0].status == "finished"
    assert (tmp_path / "stdout").read_text() == "the result\n"


def test_a_warning_names_the_run_if_there_are_several():
    def play(console: Console) -> None:
        with view(console, [RunLine("fedavg · seed 0"), RunLine("fedavg · seed 1")], quiet=True) as shown:
            shown.listener(1)(Warned("The run ends after round 4."))

    assert printed(play) == "Warning: fedavg · seed 1: The run ends after round 4.\n"


def test_a_warning_of_many_runs_is_shown_at_once_and_counted_at_their_end():
    def play(console: Console) -> None:
        with view(console, [RunLine(f"fedavg · seed {seed}") for seed in range(4)], quiet=True) as shown:
            shown.listener(0)(Warned("Labels are missing."))
            for seed in (1, 3):
                shown.listener(seed)(Warned("Labels are missing."))
                shown.listener(seed)(Warned("Labels are missing."))
            console.print("the last round")

    assert printed(play).splitlines() == [
        "Warning: fedavg · seed 0: Labels are missing.",
        "the last round",
        "Warning: fedavg · seed 0 and 2 more runs: Labels are missing.",
    ]


def test_durations_read_as_on_a_clock():
    assert [minutes(s) for s in (0, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]


@pytest.mark.parametrize(("quiet", "shown"), [(False, "reading data[old]/rows.csv\n"), (True, "")])
def test_a_step_is_printed_as_it_is_brackets_included(quiet: bool, shown: str):
    def steps(console: Console) -> None:
        step_printer(console, quiet)(Progress("reading data[old]/rows.csv"))

    assert printed(steps) == shown
