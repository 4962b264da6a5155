"""Arguments and options that several commands have, and the descriptions that their words stand for."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypfl.common.errors import ConfigError

if TYPE_CHECKING:
    from raypfl.common.packaged_yaml import Packaged

ACCEPT_UNKNOWN_OPTIONS = {"ignore_unknown_options": True}
"""Leave an unknown option among the words, where `refuse_options` names the setting that is meant."""

RecipeAndChanges = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|FILE.yaml KEY=VALUE", help="The experiment, and settings to change.", show_default=False
    ),
]
StudyAndChanges = Annotated[
    list[str] | None,
    typer.Argument(metavar="STUDY|FILE.yaml KEY=VALUE", help="The study, and settings to change.", show_default=False),
]
Changes = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change.", show_default=False)
]
Methods = Annotated[
    str, typer.Option(help="Methods to compare, as in: --method fedavg,ditto or, of your own, my_module:MyMethod")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show only the result, without progress.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")]


def count(text: str) -> int:
    """Read an option that counts something: a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise typer.BadParameter(f"{text!r} is not a whole number of at least 1.")
    return number


StudyRounds = Annotated[
    int | None, typer.Option("--rounds", metavar="N", parser=count, help="Number of rounds of each run.")
]
StudySeeds = Annotated[
    int | None,
    typer.Option("--seeds", metavar="N", parser=count, help="Number of seeds for each method and setting."),
]
Only = Annotated[str | None, typer.Option(help="Methods and settings to run, by label, as in: --only fednh,cifar10")]
StudyTrials = Annotated[
    int | None, typer.Option("--trials", metavar="N", parser=count, help="Number of trials of each method's search.")
]
Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD", help="Method to compare the others with; by default the best one.", show_default=False
    ),
]


def recipe_and_changes(
    words: Sequence[str], method: str, seeds: int | None, takes_seeds: bool = True
) -> tuple[str, list[str]]:
    """Return a recipe or file, and the assignments that words, ``--method`` and ``--seeds`` stand for.

    Raises
    ------
    ConfigError : if an option and an assignment set the same thing.
    """
    from raypfl.experiment.recipes import RECIPES

    recipe, changes = source_and_changes(words, "digits", RECIPES, takes_seeds)
    _refuse_both("--method", method, ("method", "methods"), changes)
    _refuse_both("--seeds", seeds, ("seeds",), changes)

    if method:
        changes.append(f"methods=[{','.join(comma_separated(method))}]")
    if seeds:
        changes.append(f"seeds={seeds}")

    # The recipe's name is that of its data, and would be false for other data.
    data = other_data(words, changes)
    if data and not any(_key(change) == "name" for change in changes):
        changes.append(_name_after(data))
    return recipe, changes


def as_typed(words: Sequence[str]) -> list[str]:
    """Remove what `recipe_and_changes` added to a command that names other data than the recipe's."""
    recipe, *changes = words
    data = other_data(changes, changes)
    if recipe == "digits" and data and _name_after(data) in changes:
        return [change for change in changes if change != _name_after(data)]
    return list(words)


def _name_after(data: str) -> str:
    """Return the assignment of a run's name after its data set."""
    return f"name={re.sub(r'[^A-Za-z0-9_.-]+', '-', data)[:100]}"


def study_and_changes(
    words: Sequence[str], rounds: int | None, seeds: int | None, trials: int | None
) -> tuple[str, list[str]]:
    """Return a study or file, and the assignments that words, ``--rounds``, ``--seeds`` and ``--trials`` stand for."""
    from raypfl.studies import STUDIES

    source, changes = source_and_changes(words, "digits-personal", STUDIES, takes_seeds=True)
    numbers = {"rounds": rounds, "seeds": seeds, "search.trials": trials}
    return source, changes + [f"{setting}={number}" for setting, number in numbers.items() if number]


def source_and_changes(
    words: Sequence[str], default: str, packaged: Packaged, takes_seeds: bool = False
) -> tuple[str, list[str]]:
    """Split words into a name or file, `default` if they begin with an assignment, and the assignments.

    `takes_seeds` : whether the command has the option ``--seeds``.

    Raises
    ------
    ConfigError : if a setting has no ``=VALUE``, or a `packaged` name or a file is not the first word.
    """
    refuse_options(words, takes_seeds=takes_seeds)
    _refuse_misplaced(words, packaged)
    first, *rest = words or [default]
    if "=" in first:
        return default, _last_of_each(words)
    return first, _last_of_each(rest)


def _last_of_each(assignments: Sequence[str]) -> list[str]:
    """Keep the last assignment to each key, and warn of the others."""
    # YAML and the parsing of settings are not needed for --help.
    from raypfl.experiment.assignments import last_of_each

    last_assignments = last_of_each(assignments)
    last_by_key = {_key(assignment): assignment for assignment in last_assignments}
    for assignment in assignments:
        last = last_by_key[_key(assignment)]
        if assignment != last:
            warnings.warn(f"{last} counts, and not {assignment}, which comes before it.", stacklevel=2)
    return last_assignments


def _refuse_misplaced(words: Sequence[str], packaged: Packaged) -> None:
    from raypfl.common.errors import did_you_mean
    from raypfl.common.packaged_yaml import is_file_name

    for i, word in enumerate(words):
        is_source = word in packaged or is_file_name(word)
        if is_source and i > 0 and "=" not in word and "=" in words[0]:
            settings = " ".join(other for other in words if other != word)
            raise ConfigError(f"{word!r} comes first, before the settings that change it: {word} {settings}")
        if not is_source and "=" not in word:
            _refuse_bare_setting(word, words[i + 1 :])
            if "=" in words[0]:
                raise ConfigError(
                    f"{word!r} is not a setting, KEY=VALUE. A recipe or file comes first, before the settings that "
                    f"change it, but none is called {word!r}; {did_you_mean(word, packaged)}"
                )


def _refuse_bare_setting(word: str, next_words: Sequence[str]) -> None:
    """Raise a ConfigError for a setting without ``=``, such as ``training.lr 0.1``, that says how to write it."""
    from raypfl.experiment.reference import SETTINGS
    from raypfl.experiment.sections import COMPONENTS

    section, dot, _ = word.rpartition(".")
    if word in SETTINGS or (dot and tuple(section.split(".")) in COMPONENTS):
        values = [text.removeprefix("=") for text in next_words[:2] if text != "=" and "=" not in text[1:]]
        value = values[0] if values else "VALUE"
        raise ConfigError(f"{word!r} is a setting and needs its value, without spaces around '=': {word}={value}")


def other_data(words: Sequence[str], changes: Sequence[str]) -> str:
    """Return the data set that a command without a recipe names, unless it is the default; else an empty text."""
    from raypfl.experiment.assignments import parse_assignments

    if not words or "=" not in words[0]:
        return ""
    assigned = {".".join(path): value for path, value in parse_assignments(changes)}
    data = assigned.get("data.name", assigned.get("data"))
    name = data.get("name") if isinstance(data, dict) else data
    if isinstance(name, str) and name != "digits":
        return name
    return ""


def refuse_options(words: Sequence[str], *, is_sweep: bool = False, takes_seeds: bool = False) -> None:
    """Raise a ConfigError for an option among the words, with the setting that is probably meant.

    is_sweep : whether settings of a sweep may be meant, too.
    takes_seeds : whether the command has the option ``--seeds``.
    """
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not options:
        return
    from raypfl.experiment.reference import SETTINGS

    option = options[0]
    key = option.strip("-").replace("-", "_")
    assignments = [f"{name}=VALUE" for name in SETTINGS if key in (name, name.rpartition(".")[2])]
    if key == "methods":
        assignments = ["--method A,B"]
    if key == "seed" and takes_seeds:
        assignments += ["--seeds N for several"]
    if is_sweep:
        from raypfl.integrations.tuning.sweep import Sweep

        if key in Sweep.model_fields:
            assignments = [f"{key}=VALUE"]
    hint = "settings are given as KEY=VALUE, such as rounds=5."
    if assignments:
        hint = f"write {' or '.join(assignments)}."
    raise ConfigError(f"There is no option {option}; {hint}")


def labels(only: str | None) -> list[str]:
    """Split the labels of ``--only``; none if it is not given.

    Raises
    ------
    ConfigError : if it is given without a label, which would run all of a study.
    """
    words = comma_separated(only or "")
    if only is not None and not words:
        raise ConfigError(f"--only is {only!r}, which names nothing; leave it out to run all of the study.")
    return words


def comma_separated(text: str) -> list[str]:
    """Split a text at its commas, without empty parts."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _refuse_both(option: str, value: object, keys: Sequence[str], changes: Sequence[str]) -> None:
    for change in changes:
        if value and _key(change) in keys:
            raise ConfigError(f"Both {option} and {change} are given; keep one of them.")


def _key(assignment: str) -> str:
    return assignment.partition("=")[0].strip()
