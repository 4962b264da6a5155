"""What is shown of results: the picture, the table and the lines on the way, all from made-up runs."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, replace
from functools import partial
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
from raypfl.engine.events import Evaluated, Progress, RoundFinished, RunFinished, RunStarted, Warned
from raypfl.evaluation import summarise
from raypfl.experiment import Experiment, experiments
from raypfl.experiment.recipes import settings_of
from raypfl.federation.ledger import LEDGER
from raypfl.integrations.tracking.entries import comparison_description, run_params
from raypfl.results.display import outcome
from raypfl.results.display.console import LiveView, LogView, RunLine, View, lines_for, minutes, view
from raypfl.results.drawing import canvas, draw
from raypfl.results.groups import group_runs
from raypfl.results.labels import labels
from raypfl.results.setting_text import setting_text
from raypfl.results.units import over_seeds
from raypfl.storage.columns import Columns
from raypfl.storage.tables import to_arrow

PNG = b"\x89PNG"


@dataclass(frozen=True)
class MadeUp:
    """Has what the picture and the table read of a Result."""

    experiment: Experiment
    run_dir: Path
    rounds: pa.Table
    evaluations: pa.Table
    status: str = "finished"
    weights_hash: str = "3fa2c19d88e0ffff"
    megabytes: tuple[float, float] = (23.1, 23.0)
    best_round: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    privacy: pa.Table | None = None
    ledger: pa.Table = field(default_factory=lambda: to_arrow(Columns(LEDGER)))

    @property
    def last_rounds(self) -> list[int]:
        return [max(self.evaluations["round"].to_pylist())]

    def summary(self, round: int | None = None) -> list[dict]:
        wanted = round or max(self.evaluations["round"].to_pylist())
        return summarise(
            self.experiment.measures,
            self.evaluations.filter(pa.compute.equal(self.evaluations["round"], wanted)).to_pydict(),
        )


def made_up(method, models=("global",), level=0.8, seed=0, clients=20, rounds=(5, 10)) -> MadeUp:
    keys = [(r, c, p, m) for r in rounds for p in ("local", "global") for m in models for c in range(clients)]
    accuracy = np.clip(level + np.random.default_rng(seed).normal(0, 0.05, len(keys)), 0, 1)
    names = ("round", "client", "protocol", "model")
    columns = dict(zip(names, map(list, zip(*keys, strict=True)), strict=True))
    evaluations = pa.table(columns | {"samples": [9] * len(keys), "accuracy": accuracy, "loss": 1 - accuracy})
    experiment = Experiment(name="made-up", method=method, seed=seed, rounds=10)
    rounds = pa.table({"round": range(1, 11), "seconds": [0.5] * 10})
    return MadeUp(experiment, Path(f"runs/{seed}"), rounds, evaluations)


def comparison(seeds: int = 1) -> list[MadeUp]:
    return [
        made_up(method, models, level, seed)
        for method, models, level in (("fedavg", ("global",), 0.8), ("ditto", ("personal", "global"), 0.9))
        for seed in range(seeds)
    ]


def show(console: Console, results: list, pictures: dict, tried: list[str]) -> None:
    outcome.show(console, results, pictures, tried, Path("runs/2026"), "mlflow ui")


def printed(show, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    show(console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "results",
    [
        comparison(),
        comparison(seeds=3),
        [made_up("fedavg", rounds=(10,))],
        [made_up("local", models=("personal",), clients=500)],
        [made_up({"name": "ditto", "lam": lam}, ("personal", "global")) for lam in (0.1, 0.5, 1.0, 2.0, 4.0)],
    ],
    ids=["two methods", "three seeds", "one evaluation", "no global model", "five namesakes"],
)
def test_a_picture_is_drawn_of(results, tmp_path: Path):
    assert draw(results, tmp_path / "picture.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("methods", [1, 3, 6])
def test_no_legend_covers_data(methods: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(canvas, "Figure", lambda **options: drawn.append(Figure(**options)) or drawn[-1])
    runs = [
        made_up({"name": "ditto", "lam": i}, ("personal", "global"), seed=s) for i in range(methods) for s in (0, 1)
    ]
    draw(runs, tmp_path / "picture.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    legends = [found for found in (*figure.legends, *(one.get_legend() for one in figure.axes)) if found]
    told = [text.get_text() for legend in legends for text in legend.get_texts()]
    assert {"personal model", "global model"} < set(told) and len(told) == methods + 2
    boxes = [axes.get_window_extent() for axes in figure.axes]
    assert not any(legend.get_window_extent().overlaps(box) for legend in legends for box in boxes)


def test_a_setting_of_many_words_stays_on_the_picture(tmp_path: Path):
    spiral = made_up("fedavg")
    model = {"name": "mlp", "hidden": [64] * 12, "latent": 2, "head_bias": False}
    long = replace(spiral, experiment=spiral.experiment.replace(model=model))
    pixels = imread(draw([long], tmp_path / "picture.png"))[:, :, :3]
    assert (pixels[:, :4] == 1).all() and (pixels[:, -4:] == 1).all()


def test_clients_without_test_data_are_left_out_of_the_picture(tmp_path: Path):
    one = made_up("fedavg")
    holes = one.evaluations.to_pydict()
    holes["samples"][0], holes["accuracy"][0] = 0, float("nan")
    changed = MadeUp(one.experiment, one.run_dir, one.rounds, pa.table(holes))
    assert draw([changed], tmp_path / "picture.png").exists()


def test_a_setting_names_of_the_partition_what_is_not_by_default_so():
    usual, patient = ({"name": "dirichlet", "alpha": 0.3, **more} for more in ({}, {"tries": 50}))
    assert setting_text(Experiment(partition=usual), {}) == "digits · 20 clients · dirichlet(alpha=0.3) · mlp"
    assert "dirichlet(alpha=0.3, tries=50)" in setting_text(Experiment(partition=patient), {})


def test_a_population_is_announced_with_the_clients_that_it_has_and_no_partition():
    described = Experiment(data="tests.support.federated_data:GeneratedClients")
    text = setting_text(described, {"num_clients": 4})
    assert text == "tests.support.federated_data:GeneratedClients · 4 clients · mlp"
    assert not [key for key in run_params(described) if key.startswith("partition")]


def test_twelve_methods_have_colours_of_their_own():
    runs = [made_up({"name": "ditto", "lam": i}) for i in range(12)]
    assert len({one.colour for one in group_runs(runs)}) == 12


def test_namesakes_are_told_apart_by_the_options_that_differ():
    runs = [Experiment(method=m) for m in ("fedavg", {"name": "ditto", "lam": 0.1}, {"name": "ditto", "lam": 1})]
    assert labels(runs) == ["fedavg", "ditto lam=0.1", "ditto lam=1.0"]


def test_settings_of_a_methods_own_are_told_beside_its_name_and_of_the_first_ones_nothing_is():
    own = {"training": {"lr": 0.05}, "model.hidden": [8]}
    methods = ["fedavg", {"name": "ditto", "settings": own}, {"name": "local", "settings": {"training.lr": 0.2}}]
    told = ["fedavg", "ditto training.lr=0.05 model.hidden=[8]", "local training.lr=0.2"]
    assert labels(experiments({"methods": methods})) == told
    assert labels(experiments({"methods": methods, "seeds": 2})) == [label for label in told for _ in range(2)]
    methods[1] = {"name": "ditto", "settings": {"model": "lenet", "training.optimizer": "adam"}}
    assert labels(experiments({"methods": methods[:2]}))[1] == "ditto model=lenet training.optimizer=adam"
    many = {f"training.{key}": 3 for key in ("epochs", "batch_size", "clip_norm", "weight_decay")}
    methods[1] = {"name": "ditto", "settings": many}
    assert labels(experiments({"methods": methods[:2]})) == [
        "fedavg",
        "ditto training.epochs=3 training.batch_size=3 training.weight_decay=3.0 training.clip_norm=3.0",
    ]
    methods[1] = {"name": "ditto", "settings": {"model.hidden": [8, 8], "training.lr": 0.05, "training.epochs": 3}}
    label = "ditto training.epochs=3 training.lr=0.05 model.hidden=[8, 8]"
    assert labels(experiments({"methods": methods[:2]})) == ["fedavg", label]
    methods[1] = {"name": "ditto", "settings": {"model": "lenet", "training.epochs": 3, "training.weight_decay": 0.001}}
    label = "ditto model=lenet training.epochs=3 training.weight_decay=0.001"
    assert labels(experiments({"methods": methods[:2]})) == ["fedavg", label]
    own = ({"model.hidden": [8, 8]}, {}, {"training": {"lr": 0.2, "epochs": 3}, "model": "lenet"})
    named = zip(("fedavg", "ditto", "local"), own, strict=True)
    assert labels(experiments({"methods": [{"name": name, "settings": one} for name, one in named]})) == [
        "fedavg",
        "ditto model.hidden=default",
        "local model=lenet training.epochs=3 training.lr=0.2",
    ]
    twice = ["fedavg", {"name": "fedavg", "settings": {"training.lr": 0.2}}]
    assert labels(experiments({"methods": twice})) == ["fedavg training.lr=0.1", "fedavg training.lr=0.2"]


def test_runs_of_other_settings_are_told_by_those_that_differ():
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
    many = [one.override([f"training.weight_decay={one.rounds}"]) for one in searched]
    assert labels(many)[27] == "ditto rounds=28 training.lr=28.0 training.weight_decay=28.0"
    assert len(set(labels(many))) == 28


def test_runs_of_one_label_have_the_same_settings():
    networks = [{"name": "mlp", "hidden": [8]}, *({"name": "vit_s_16", "depth": depth} for depth in (1, 2))]
    runs = [Experiment(method="ditto", model=network) for network in networks]
    told = ["ditto model.hidden=[8]", "ditto model=vit_s_16 model.depth=1", "ditto model=vit_s_16 model.depth=2"]
    assert labels([Experiment(), *runs]) == ["fedavg", *told]
    assert labels(runs) == ["ditto model=mlp model.hidden=[8]", *told[1:]]
    private = [Experiment(method="fedavg", privacy={"noise": 1.0}), Experiment(method="ditto")]
    both = [*private, private[1].override(["privacy={noise: 1.0}"])]
    assert labels(both) == ["fedavg privacy.noise=1.0", "ditto privacy.noise=None", "ditto privacy.noise=1.0"]


def test_labels_say_what_differs_and_name_no_file_that_follows_from_it():
    runs = experiments(settings_of("lora-digits"))
    pretrained = [one.override([f"model.weights=/cache/{one.model.lora}.safetensors"]) for one in runs]
    assert labels(pretrained) == ["fedavg", "partial", "fedper", "fedavg model.lora=0 training.lr=0.02"]
    assert "weights" not in setting_text(pretrained[0], {})


def test_runs_that_differ_in_their_seed_alone_are_one_contender():
    assert [len(one.results) for one in group_runs(comparison(seeds=3))] == [3, 3]


def test_several_seeds_give_mean_and_deviation():
    assert [str(over_seeds(values)) for values in ([], [1.25], [1.0, 2.0])] == ["–", "1.2", "1.5±0.7"]


def test_the_spread_over_seeds_is_explained_where_there_is_one():
    for seeds in (1, 2):
        results = comparison(seeds=seeds)
        for text in (
            printed(lambda console, r=results: show(console, r, {}, ["digits"])),
            comparison_description(results),
        ):
            assert ("±" in text.replace("±:", "")) == ("±: standard deviation over seeds." in text) == (seeds == 2)


def test_the_table_has_a_row_for_each_method_and_protocol_and_fits_eighty_columns():
    text = printed(lambda console: console.print(outcome.table(comparison())))
    rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows if len(row) > 5][-2:] == ["fedavg", "ditto"]
    assert sum("local" in row for row in rows) == sum("global" in row for row in rows) - 1 == 2
    assert max(map(len, text.splitlines())) <= 80


def test_runs_whose_best_round_was_chosen_have_a_row_of_it():
    results = [replace(result, best_round=5) for result in comparison(seeds=2)]
    text = printed(lambda console: show(console, results, {}, ["digits"]))
    rows = [line for line in text.partition("Accuracy in %")[0].splitlines() if "local*" in line]
    means = [one.scores("local", best=True) for one in group_runs(results)]
    assert all(str(over_seeds(mean)) in row for row, mean in zip(rows, means, strict=True))
    assert "best on the clients' validation data" in text
    assert max(len(line) for line in text.splitlines() if "mlflow ui" not in line) <= 80  # that names this folder
    assert "local*" not in printed(lambda console: console.print(outcome.table(comparison())))


def test_one_model_on_one_test_set_has_no_spread():
    text = printed(lambda console: console.print(outcome.table([made_up("fedavg")])))
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["global"]]
    assert row[1] == row[3] == row[4] == "–"


def with_columns(results: list[MadeUp], **values: float) -> list[MadeUp]:
    """The same with further metrics, of all rows."""
    changed = []
    for result in results:
        columns = result.evaluations.to_pydict()
        added = {name: [value] * len(columns["round"]) for name, value in values.items()}
        changed.append(replace(result, evaluations=pa.table(columns | added)))
    return changed


def test_samples_of_several_labels_are_told_by_their_auc():
    labelled = [replace(one, experiment=one.experiment.override(["objective=multi-label"])) for one in comparison()]
    results = with_columns(labelled, auc=0.777, left_out=0.0)
    text = printed(lambda console: show(console, results, {}, ["digits"]))
    told = [line.split()[2:7] for line in text.splitlines() if line.split()[1:2] == ["local"]]
    shared, own = (one.scores("local", aggregate="accuracy") for one in group_runs(results))
    assert told == [
        ["–", "77.7", "0.0", "77.7", str(over_seeds(shared))],
        ["77.7", "77.7", "0.0", "77.7", str(over_seeds(own))],
    ]
    assert "Macro AUC in %" in text and "Accuracy in %" not in text and "ECE" not in text


def test_calibration_errors_are_told_where_there_is_room():
    results = with_columns(comparison(), ece=0.0666)
    wide, narrow = (printed(lambda console: show(console, results, {}, ["digits"]), w) for w in (80, 64))
    assert "ECE" in wide and " 6.7 " in wide
    assert "ECE" not in narrow.partition("Accuracy in %")[0] and " 6.7 " not in narrow
    assert "A wider terminal has room for more columns: ECE" in narrow


def test_methods_keep_whole_words_where_the_table_is_narrow_and_columns_make_room_for_them():
    namesakes = [{"name": "ditto", "lam": lam} for lam in (0.1, 1.0)]
    runs = [made_up(method, ("personal", "global"), seed=seed) for method in namesakes for seed in range(3)]
    runs = with_columns(runs, ece=0.0666)
    for width, gone in ((80, ["ECE"]), (71, ["ECE", "std"]), (62, ["ECE", "std", "AUC\nstd", "seconds"])):
        text = printed(lambda console: show(console, runs, {}, ["digits"]), width)
        whole = printed(lambda console, gone=gone: console.print(outcome.table(runs, gone)), 200)
        table = text.partition("Accuracy in %")[0]
        assert set(whole.split()) - {"─" * 200} <= {*table.split(), *[w for w in whole.split() if "─" in w]}, table
        assert not {"…", gone[0], gone[-1]} & set(table.split())
        assert ("(std, worst decile)" in text) == ("std" not in gone)


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
    console = Console(width=50, file=io.StringIO(), force_terminal=True, color_system=None)
    line = RunLine("fedavg", 2000)
    with LiveView(console, [line]) as shown:
        for event in (started(2000), finished(1234), judged(1234)):
            shown.listener(0)(event)
        text = printed(lambda plain: plain.print(shown.render()), 50)
    assert "1234/2000" in text and "– / 12,340.0" in text and "MB" not in text


def test_a_warning_is_told_once_and_stays_above_the_table_that_is_redrawn():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    with LiveView(console, [RunLine("fedavg")]) as shown, catch_warnings():
        showwarning = partial(messages._show_warning, None, set())
        for line in (1, 2):
            showwarning(UserWarning("beware of it"), UserWarning, "method.py", line)
        shown.console.print("and go on")
    text = console.file.getvalue()
    assert text.count("Warning: beware of it\n") == 1 and text.index("beware") < text.index("and go on")


def test_what_is_suggested_keeps_what_was_changed():
    tried = ["mine.yaml", "data.root=/d/my images", "partition.alpha=1", "methods=[fedavg,ditto]", "method.lam=2"]
    text = printed(lambda console: show(console, comparison(), {}, tried))
    same = "raypfl run mine.yaml 'data.root=/d/my images'"
    assert f"{same} 'methods=[fedavg,ditto]' method.lam=2 partition.alpha=0.1 seeds=3\n" in text
    skewed = [replace(one, experiment=one.experiment.override(["partition.alpha=0.1"])) for one in comparison()]
    assert "raypfl run digits seeds=3\n" in printed(lambda console: show(console, skewed, {}, ["digits"]))


def test_the_last_words_tell_where_everything_is_and_what_to_try():
    text = printed(lambda console: show(console, comparison(), {"Picture": Path("runs/p.png")}, ["digits"]))
    for part in ("runs/p.png", "3fa2c19d88e0", "mlflow ui", "raypfl resume runs/2026 rounds=20"):
        assert part in text
    assert "raypfl report runs/2026\n" in text


def test_the_outcome_as_json_is_plain():
    told = json.loads(json.dumps(outcome.as_json(comparison(), {})))
    assert [run["experiment"]["method"]["name"] for run in told["runs"]] == ["fedavg", "ditto"]
    assert {row["protocol"] for row in told["runs"][0]["summary"]} == {"local", "global"}


def events(experiment: Experiment):
    yield Progress("starting Ray")
    metadata = {"num_clients": 20, "parameters": 9610, "executor": "vectorised", "group_size": 10, "actors": 2}
    yield RunStarted("made-up", "runs/made-up", experiment, metadata, first_round=0)
    for r in range(1, experiment.rounds + 1):
        sent = {"bytes_up_total": 1_000_000 * r, "bytes_down_total": 2_000_000 * r}
        yield RoundFinished(r, 1 / r, 0.1, 1_000_000, 2_000_000, clients=20, dropped=0, failed=0, **sent)
    yield Evaluated(experiment.rounds, [{"protocol": "local", "model": "global", "accuracy": 0.5}])
    yield Warned("The cache was damaged.")
    yield RunFinished("finished", experiment.rounds, "3fa2c1")


def test_a_line_follows_its_run():
    experiment = Experiment(rounds=4)
    line = RunLine("fedavg")
    seen = []
    for event in events(experiment):
        line(event)
        seen.append(line.status)
    assert (line.round, line.rounds, line.scores, line.traffic) == (4, 4, "– / 50.0", "4.0 / 8.0")
    assert list(dict.fromkeys(seen)) == ["waiting", "running", "finished"]


def test_a_line_of_a_run_whose_evaluation_found_no_model_has_no_accuracies():
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
        and "fedavg: finished, 1000 rounds in" in text
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


def played(happened, clock=lambda: 0.0) -> list[str]:
    """What is printed of one run without a terminal, line by line."""

    def play(console: Console) -> None:
        with LogView(console, [RunLine("fedavg", colour="#000000")], clock) as shown:
            for event in happened:
                shown.listener(0)(event)

    return printed(play, 200).splitlines()


def started(rounds: int, first_round: int = 0) -> RunStarted:
    return RunStarted("made-up", "runs/made-up", Experiment(rounds=rounds), {}, first_round)


def finished(round: int) -> RoundFinished:
    sent = {"bytes_up_total": 1_000_000 * round, "bytes_down_total": 2_000_000 * round}
    return RoundFinished(round, 1 / round, 0.1, 1_000_000, 2_000_000, clients=20, dropped=0, failed=0, **sent)


def judged(round: int) -> Evaluated:
    return Evaluated(round, [{"protocol": "local", "model": "global", "accuracy": round / 10}])


def test_after_half_a_minute_of_silence_a_round_has_a_line_before_the_next_tenth():
    now = iter(range(0, 10_000, 4))
    lines = played([started(2000), *(finished(r) for r in range(1, 41))], lambda: next(now))
    told = [int(line.split("round ")[1].partition("/")[0]) for line in lines if "fedavg: round" in line]
    assert len(told) >= 3 and max(told) < 200
    assert len(played([started(2000), *(finished(r) for r in range(1, 41))])) == 1


def test_the_accuracy_of_an_earlier_round_is_said_to_be_of_that_round():
    happened = [started(3), finished(1), finished(2), judged(2), finished(3), RunFinished("stopped", 3, "3fa2c1")]
    first, second, third, end = played(happened)[1:]
    assert "global" not in first
    assert "global 20.0 %, " in second
    assert "global 20.0 % (round 2), " in third and end.endswith("global 20.0 % (round 2)")


def test_the_table_on_a_terminal_marks_the_accuracy_of_an_earlier_round_too():
    console = Console(width=100, file=io.StringIO(), force_terminal=True, color_system=None)
    with LiveView(console, [RunLine("fedavg")]) as shown:
        seen = []
        for event in (started(3), finished(1), finished(2), judged(2), finished(3)):
            shown.listener(0)(event)
            seen.append(printed(lambda plain: plain.print(shown.render()), 100))
    assert "– / 20.0 (round 2)" in seen[-1] and "– / 20.0" in seen[-2] and "(round 2)" not in seen[-2]


def test_a_step_of_the_start_up_is_told_once_a_run():
    begin = [Progress("preparing data"), Progress("starting Ray"), Progress("preparing data"), started(1), finished(1)]
    lines = played([*begin, RunFinished("finished", 1, "3fa2c1"), Progress("preparing data")])
    assert lines[:2] == ["preparing data", "starting Ray"] and lines.count("preparing data") == 2
    assert lines[-1] == "preparing data"


def test_where_the_dashboard_is_stays_on_the_screen():
    where = Progress("Ray's dashboard: http://127.0.0.1:8265.", stays=True)
    assert played([Progress("starting Ray"), where, started(1)])[:2] == ["starting Ray", where.text]
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    with LiveView(console, [RunLine("fedavg")]) as shown:
        shown.listener(0)(where)
    assert console.file.getvalue().count(where.text) == 1


def test_the_end_tells_how_many_rounds_were_run_in_that_time():
    whole = played([started(2), finished(1), finished(2), RunFinished("finished", 2, "3fa2c1")])
    assert whole[-1] == "fedavg: finished, 2 rounds in 0:00"
    resumed = played([started(3, 2), finished(3), RunFinished("finished", 3, "3fa2c1")])
    assert resumed[-1] == "fedavg: finished after round 3, 1 round in 0:00"


def test_on_a_terminal_the_table_shows_every_run():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    planned = [Experiment(method=method, rounds=2) for method in ("fedavg", "ditto")]
    with view(console, lines_for(planned)) as shown:
        assert isinstance(shown, LiveView)
        for event in events(planned[0]):
            shown.listener(0)(event)
        text = printed(lambda plain: plain.print(shown.render()))
    assert "✓  fedavg" in text and "2/2" in text and "·  ditto" in text and "0/2" in text
    assert max(map(len, text.splitlines())) <= 80


def test_of_more_runs_than_a_terminal_shows_it_has_those_that_are_running():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    planned = [Experiment(seed=seed, rounds=2) for seed in range(30)]
    with view(console, lines_for(planned)) as shown:
        assert isinstance(shown, LiveView)
        for event in events(planned[0]):
            shown.listener(0)(event)
        shown.listener(7)(next(event for event in events(planned[7]) if isinstance(event, RunStarted)))
        text = printed(lambda plain: plain.print(shown.render()))
    assert "1 of 30 runs have ended, 1 are running" in text and text.count("fedavg · seed") == 1
    assert "fedavg · seed 7" in text


def test_lines_of_runs_at_the_same_time_are_not_told_twice():
    planned = [Experiment(seed=seed, rounds=1) for seed in range(2)]

    def play(console: Console) -> None:
        with view(console, lines_for(planned)) as shown:
            for both in zip(*(events(one) for one in planned), strict=True):
                for i, event in enumerate(both):
                    shown.listener(i)(event)

    assert printed(play).count("round 1/1") == 2


def test_quietly_only_warnings_are_shown():
    def play(console: Console) -> None:
        with view(console, [RunLine("fedavg")], quiet=True) as shown:
            assert type(shown) is View
            for event in events(Experiment()):
                shown.listener(0)(event)

    assert printed(play) == "Warning: The cache was damaged.\n"


def test_durations_read_as_on_a_clock():
    assert [minutes(s) for s in (0, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]
