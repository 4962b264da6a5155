"""The commands that train: run, resume, pretrain, study, tune and ntk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypfl.cli.arguments import (
    AsJson,
    Baseline,
    Changes,
    Methods,
    Only,
    Quiet,
    RecipeAndChanges,
    StudyAndChanges,
    StudyRounds,
    StudySeeds,
    StudyTrials,
    count,
    labels,
    other_data,
    recipe_and_changes,
    refuse_options,
    study_and_changes,
)
from raypfl.cli.messages import print_message
from raypfl.common.counting import counted, series
from raypfl.common.errors import ConfigError

if TYPE_CHECKING:
    from raypfl.experiment import Experiment

# Each command imports what it needs when it is called, so that `raypfl --help` waits for neither torch nor Ray.


def run(
    words: RecipeAndChanges = None,
    method: Methods = "",
    seeds: Annotated[
        int | None, typer.Option(metavar="N", parser=count, help="Number of seeds for each method.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of the run. If it has this run already, the run continues."),
    ] = None,
    baseline: Baseline = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment or a comparison: a recipe by name (default: digits) or your own YAML file.

    KEY=VALUE changes a setting, such as training.lr=0.05 or method.lam=1.
    A method, model, data set, partition or objective of your own is named as module:Class.
    `raypfl list settings` lists all settings, and `raypfl list recipes` the recipes.
    """
    from raypfl.cli.actions.run import run_experiments
    from raypfl.experiment import experiments
    from raypfl.experiment.recipes import settings_of

    recipe, changes = recipe_and_changes(words or [], method, seeds)
    source = settings_of(recipe)
    planned = experiments(source, changes)
    if not quiet and other_data(words or [], changes):
        print_message(_settings_from_digits(planned, changes), "yellow")
    for sentence in [] if quiet else [*shared_options(planned, changes), *replaced_rounds(source, planned)]:
        print_message(sentence, "yellow")
    run_experiments(planned, [recipe, *changes], run_dir, quiet, as_json, baseline=baseline)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run or comparison.", show_default=False)],
    changes: Changes = None,
    from_round: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=count, help="Continue as a new run from the checkpoint after this round; needs --as."
        ),
    ] = None,
    new_run: Annotated[Path | None, typer.Option("--as", metavar="FOLDER", help="Folder of the new run.")] = None,
    baseline: Baseline = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its newest checkpoint, to the same result as without the interruption.

    In a comparison, the interrupted run continues and the remaining runs start. rounds=60 extends finished runs.
    Other settings that decide the result cannot change, except in a new run: --from-round 4 --as FOLDER.
    """
    from raypfl.cli.actions.run import continue_as_new, resume_folder

    refuse_options(changes or [])
    if from_round is None and new_run is None:
        for sentence in [] if quiet else extended_to_equal_rounds(folder, changes or []):
            print_message(sentence, "yellow")
        resume_folder(folder, changes or [], quiet, as_json, baseline)
    elif from_round is None:
        raise ConfigError("--as needs --from-round: after which round the new run continues, as in --from-round 4.")
    elif new_run is None:
        raise ConfigError("--from-round needs --as: the folder of the new run, as in --as runs/lower-rate.")
    elif baseline is not None:
        raise ConfigError("--baseline is for comparisons, but --from-round continues a single run; leave one out.")
    else:
        continue_as_new(folder, from_round, new_run, changes or [], quiet, as_json)


def pretrain(words: RecipeAndChanges = None, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Train a network on a pool of samples (model.pretrain), as a run does before its first round.

    The weights are kept in data.cache, where runs with the same pretraining find them.
    """
    from raypfl.cli.actions.pretrain import carry_out
    from raypfl.experiment import experiments
    from raypfl.experiment.recipes import settings_of

    recipe, changes = recipe_and_changes(words or [], "", None)
    carry_out(experiments(settings_of(recipe), changes)[0], quiet, as_json)


def study(
    words: StudyAndChanges = None,
    only: Only = None,
    rounds: StudyRounds = None,
    seeds: StudySeeds = None,
    trials: StudyTrials = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep a record of what was measured, with all seeds, hashes and CPU time."),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Reproduce a published table and show both: a study by name (default: digits-personal) or your own YAML file.

    Finished runs are not repeated; interrupted ones continue. KEY=VALUE changes a setting of all runs.
    `raypfl study new` writes such a file.
    """
    from raypfl.cli.actions.study import run_study

    if words and words[0] == "new":
        raise ConfigError("Write 'new' right after 'study', and options at the end: raypfl study new FILE --seeds 2")
    source, changes = study_and_changes(words or [], rounds, seeds, trials)
    run_study(source, labels(only), changes, quiet, as_json, record)


def new_study(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE.yaml KEY=VALUE", help="The file to write, and the study's settings.", show_default=False
        ),
    ] = None,
    rounds: StudyRounds = None,
    seeds: StudySeeds = None,
    trials: StudyTrials = None,
) -> None:
    """Write the YAML file of a study of your own, which compares methods; nothing is run.

    methods=\\[fedavg,ditto] names the methods, and the other KEY=VALUE are settings of all runs, such as data=digits.
    `raypfl study FILE.yaml` runs the study.
    """
    from raypfl.cli.actions.study import new_study as write_study

    _, changes = study_and_changes(words or [], rounds, seeds, trials)
    write_study((words or [])[:1], changes)


def ntk(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|RECIPE", help="Folder of a run or comparison, or a recipe to run.", show_default=False
        ),
    ],
    changes: Changes = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Explain by the neural tangent kernel why training converges or not, for a finished run or a recipe to run.

    KEY=VALUE changes a setting of the recipe.
    """
    from raypfl.cli.actions.ntk import ntk as explain

    refuse_options(changes or [])
    explain(source, changes or [], quiet, as_json)


def tune(
    source: Annotated[str, typer.Argument(metavar="FILE", help="YAML file of a sweep.", show_default=False)],
    changes: Changes = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Search for the best settings of an experiment with Ray Tune, as described by a sweep's YAML file.

    An interrupted sweep continues. KEY=VALUE changes the sweep (trials=20) or its experiment (rounds=10).
    """
    from raypfl.cli.actions.tune import carry_out

    refuse_options([source, *(changes or [])], is_sweep=True)
    carry_out(source, changes or [], quiet, as_json)


def shared_options(planned: Sequence[Experiment], changes: Sequence[str]) -> list[str]:
    """Return a sentence for each option of a method that a command sets in several methods."""
    options_of = {}
    for experiment in planned:
        method = experiment.to_dict()["method"]
        options_of[method["name"]] = method.keys()

    sentences = []
    for change in changes:
        setting = change.partition("=")[0]
        section, _, option = setting.partition(".")
        methods = [name for name, options in options_of.items() if section == "method" and option in options]
        if len(methods) > 1:
            sentences.append(
                f"{change} applies to {series(methods)}. To set it in one of them: "
                f"'methods=[{{name: {methods[0]}, {option}: ...}}, {methods[1]}]'."
            )
    return sentences


def replaced_rounds(source: Mapping[str, Any], planned: Sequence[Experiment]) -> list[str]:
    """Return a sentence if all runs have one number of rounds, but their methods have their own in the source."""
    names = {experiment.to_dict()["method"]["name"] for experiment in planned}
    own_rounds = {}
    for method in source.get("methods", []):
        settings = method.get("settings", {}) if isinstance(method, Mapping) else {}
        if "rounds" in settings and method["name"] in names:
            own_rounds[method["name"]] = settings["rounds"]

    mend = "To keep it, give each method its own: 'methods=[{name: METHOD, settings: {rounds: N}}, ...]'."
    return _no_longer_fair(own_rounds, {experiment.rounds for experiment in planned}, mend)


def extended_to_equal_rounds(folder: Path, changes: Sequence[str]) -> list[str]:
    """Return a sentence if changes give the runs of a comparison one number of rounds, which differed before."""
    from raypfl.runs.folders import ComparisonFolder

    comparison = ComparisonFolder.load(folder)
    if comparison is None or not changes:
        return []
    rounds = {run: experiment.rounds for run, experiment in zip(comparison.runs, comparison.experiments(), strict=True)}
    if len(set(rounds.values())) == 1:
        return []
    extended = {experiment.rounds for experiment in comparison.experiments(changes)}
    mend = f"To keep it, extend each run by itself: raypfl resume {folder}/RUN rounds=N."
    return _no_longer_fair(rounds, extended, mend)


def _no_longer_fair(own_rounds: Mapping[str, int], rounds: set[int], mend: str) -> list[str]:
    """Return a sentence if one number of rounds replaces those of methods or runs."""
    if len(rounds) > 1 or rounds >= set(own_rounds.values()):
        return []
    replaced = series([f"{name} ({count})" for name, count in own_rounds.items()])
    return [
        f"All methods get {counted(max(rounds), 'round')}, also those with rounds of their own: {replaced}. If these "
        f"give methods equal replies or time, this ends it. {mend}"
    ]


def _settings_from_digits(planned: Sequence[Experiment], changes: Sequence[str]) -> str:
    """Say what runs of other data take from the recipe `digits`, which their command does not name."""
    from raypfl.data.datasets.population import is_described
    from raypfl.experiment.checks.hints import components_with

    descriptions = [experiment.to_dict() for experiment in planned]
    first = descriptions[0]
    data = planned[0].data
    methods = " and ".join(dict.fromkeys(values["method"]["name"] for values in descriptions))

    parts = {
        "methods": f"method {methods}",
        "partition": f"partition {first['partition']['name']}",
        "model": f"model {first['model']['name']}",
        "rounds": counted(first["rounds"], "round"),
    }
    changed = {change.partition("=")[0].removesuffix(".name") for change in changes}
    if "method" in changed:
        changed.add("methods")
    if is_described(data):
        changed.add("partition")
    examples = [text for setting, text in parts.items() if setting not in changed]
    clients = ""
    # With a group, the run itself warns that its clients are not the groups.
    if "partition" not in changed and data.name in components_with("data", "group") and not data.options.get("group"):
        clients = " A client for each value of a column: data.group=COLUMN partition=by_column."
    return (
        "No recipe is named, so all other settings come from the recipe digits"
        f"{': ' if examples else ''}{', '.join(examples)}. "
        f"Set them as KEY=VALUE, or start with a YAML file or another recipe: raypfl list recipes.{clients}"
    )
