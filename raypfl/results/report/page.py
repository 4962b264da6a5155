"""The report's page: what goes where, and its sentences."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from raypfl.common import files
from raypfl.common.counting import counted, series
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.common.version import __version__
from raypfl.evaluation.masking import unmasked_name
from raypfl.evaluation.tables import MODELS
from raypfl.results import client_data
from raypfl.results.colours import COLOURS, mark
from raypfl.results.display.epsilons import epsilons, privacy_sentence
from raypfl.results.display.notices import run_notices
from raypfl.results.drawing import draw
from raypfl.results.numbers import prediction_traffic
from raypfl.results.pairing.differences import HEADINGS, differences
from raypfl.results.pairing.remarks import remarks
from raypfl.results.report import budgets, clients, export, figures, tables
from raypfl.results.report.lead import lead_of
from raypfl.results.report.parts import Part, parts_of, without_part
from raypfl.results.report.runs import run_folders
from raypfl.results.report.searches.page import read as read_search
from raypfl.results.report.tables import protocol_name
from raypfl.results.run_groups import (
    RunGroup,
    labelled,
    methods_without_result,
    refuse_no_results,
    refuse_untested,
    seeds_together,
    sentences_without_result,
    without_repetitions,
)
from raypfl.results.setting_text import data_text, setting_text
from raypfl.results.table import (
    attack_sentences,
    protocols_of,
    shared_seconds,
    unequal_lengths,
    unequal_seeds,
    untrained_parts,
)
from raypfl.results.units import capitalised, megabyte_digits
from raypfl.runs.records import WITHOUT_RESULT, recorded_end
from raypfl.runs.result import RunResult

_FIGURE_ID = re.compile(r"((?:id=\"|href=\"#|url\(#)\w?[0-9a-f]{10})")
_EXPORTS = {".tex": export.as_latex, ".csv": export.as_csv}
_CLIENT_EXPORTS = {".tex": clients.as_latex, ".csv": clients.as_csv}
_PICTURES = (".pdf", ".svg", ".png")
_MOST_CURVES = 6  # protocols with a figure of their own

# Some colours are a little darker on white, or lighter on the dark page, so that their contrast is 3:1 (WCAG 2.2).
_ON_LIGHT = {"#D9A125": "#bb8a20", "#56B4D3": "#4c9eba", "#E58FB2": "#ca7e9d"}
_ON_DARK = {"#4F55B5": "#565cb8"}


def write(
    results: Sequence[RunResult],
    path: str | Path,
    notes: Sequence[str] = (),
    searches: Sequence[str | Path] = (),
    baseline: str | None = None,
    named_clients: bool = False,
) -> Path:
    """Write a report on runs that were evaluated at least once, one of its tables, or their picture; return its path.

    Parameters
    ----------
    results : at least one; those that differ in their seed alone are one method's repetitions. Of several runs of one
        experiment and seed, the one that ended last counts; a warning names the others.
    path : the HTML file or, if it ends in ``.tex`` or ``.csv``, the table, or in ``.pdf``, ``.svg`` or ``.png``, the
        picture of their learning curves and clients; its folder must exist.
    notes : sentences for the reader, such as on what is left out.
    searches : folders of sweeps, and of studies with a search, that the results are from.
    baseline : the method, by its label, that the others are compared with; None: the best one or, of a sweep, the one
        that the search chose.
    named_clients : whether the table is that of the clients by name, instead of that of results.

    Raises
    ------
    ConfigError : if there is no such folder, baseline or table, a run was never evaluated, or the runs do not fit in
        one picture.
    """
    refuse_no_results(results, "raypfl.report.write")
    for result in results:
        refuse_untested(result)
    path = Path(path)
    refuse_file(path, named_clients)

    results, repetitions = without_repetitions(results)
    for sentence in repetitions:
        warnings.warn(sentence, stacklevel=2)
    parts = parts_of(results, baseline)
    if path.suffix in _PICTURES:
        if len(parts) > 1:
            raise ConfigError(
                f"{path} holds one picture, but the runs are on {len(parts)} different data sets, partitions or "
                "metrics; name runs that can be compared."
            )
        return draw([result for group in parts[0].groups for result in group.results], path)

    export_table = (_CLIENT_EXPORTS if named_clients else _EXPORTS).get(path.suffix)
    files.write(path, export_table(parts) if export_table else _page(results, parts, [*notes, *repetitions], searches))
    return path


def refuse_file(path: Path, named_clients: bool = False) -> None:
    """Raise a ConfigError if no report can be written to this file; parameters as in :func:`write`."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}.")

    if path.suffix not in ("", ".html", ".htm", *_EXPORTS, *_PICTURES):
        endings = ", ".join([".html", *_EXPORTS, *_PICTURES[:-1]])
        raise ConfigError(f"A report is a page, a table or a picture: {path} must end in {endings} or {_PICTURES[-1]}.")

    if named_clients and path.suffix not in _EXPORTS:
        raise ConfigError(
            f"{path} must end in .tex or .csv to hold only the table of named clients, which every page has too."
        )


def _page(
    results: Sequence[RunResult],
    parts: Sequence[Part],
    notes: Sequence[str],
    search_folders: Sequence[str | Path],
) -> str:
    """The page as HTML."""
    most_groups = max(len(part.groups) for part in parts)
    contents = []
    for number, part in enumerate(parts, start=1):
        suffix = f"-{number}" if len(parts) > 1 else ""
        content = _part(part, suffix)
        body = _template("part.html.jinja").render(**content, marks=[mark(i) for i in range(most_groups)])
        # Figures of two parts may be the same, and would have the same ids.
        content["body"] = Markup(_FIGURE_ID.sub(rf"\1{suffix}", body))
        contents.append(content)

    all_notes = [_from_here(note) for note in (*notes, *without_part(results))]
    if len(contents) == 1:  # several parts show their notes themselves
        all_notes += contents[0]["notes"]
    shown_searches = []
    for number, folder in enumerate(map(Path, search_folders), start=1):
        own = {run.resolve() for run in run_folders(folder)[0]}
        searched = [result for result in results if result.run_dir.resolve() in own] or results
        shown_searches.append(read_search(folder, searched[0].experiment.measures, number))
    most_colours = max([most_groups, *(len(search.places) for search in shown_searches), 1])
    return _template("page.html.jinja").render(
        title=series(dict.fromkeys(result.experiment.name for result in results)),
        style=Markup(_file("page.css")),
        shades=[shades(i) for i in range(most_colours)],
        searches=shown_searches,
        marks=[mark(i) for i in range(most_colours)],
        parts=contents,
        notes=all_notes,
        version=__version__,
        today=date.today().isoformat(),
    )


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(name)


def _file(name: str) -> str:
    return (resources.files("raypfl.results.report") / name).read_text("utf-8")


def shades(index: int) -> tuple[str, str]:
    """Return the colour of the group at `index` on the page's light and on its dark background."""
    colour = COLOURS[index % len(COLOURS)]
    return _ON_LIGHT.get(colour, colour.lower()), _ON_DARK.get(colour, colour.lower())


def _part(part: Part, suffix: str) -> dict[str, Any]:
    """What the page shows of a part; `suffix` makes ids unique on the page."""
    groups = part.groups
    protocols = protocols_of(groups)
    tests = _tests(protocols)
    runs = [(i, group.label, result) for i, group in enumerate(groups) for result in group.results]
    holdings = _holdings(groups[0].results[0])
    return {
        "suffix": suffix,
        "setting": setting_text([result for _, _, result in runs]),
        "lead": lead_of(part, tests[0]),
        "size": _size(groups),
        "notes": [*sentences_without_result(part.results), *_ends(part.results), *_cautions(groups)],
        "without_result": methods_without_result(part.results),
        "groups": groups,
        "several_seeds": any(len(group.results) > 1 for group in groups),
        "unit": groups[0].unit,
        "capitalised": capitalised,
        "holdings": holdings,
        "runs": runs,
        **_results(part, tests[0]),
        **_curves(groups, tests),
        **_clients(part, holdings["sizes"]),
        **_spending(groups, tests[0]),
        **_settings(groups),
    }


def _results(part: Part, main: str) -> dict[str, Any]:
    """The tables of results and of paired differences."""
    groups = part.groups
    headings, results = tables.result_tables(part)
    paired = differences(groups, part.reference)
    return {
        "part": part,
        "headings": headings,
        "models": [model for model in MODELS if any(group.scores(main, model) for group in groups)],
        "columns_note": tables.columns_note(groups[0].measures, headings),
        "results": results,
        "differences": tables.difference_tables(groups, paired),
        "difference_headings": [heading.replace("\n", " ") for heading in HEADINGS],
        "difference_remarks": remarks(paired, groups),
    }


def _curves(groups: list[RunGroup], tests: Sequence[str]) -> dict[str, Any]:
    """What changed over the rounds: on the main test first, then on others; losses, and what methods logged."""
    logged_tables, logged_images = tables.logged(groups)
    return {
        "tested": protocol_name(tests[0]),
        "first_curves": figures.metric_figure(groups, tests[0], "round", wide=True),
        "curve_values": tables.curve_values(groups, tests[0]),
        "more_curves": [figures.metric_figure(groups, name, "round") for name in tests[1:_MOST_CURVES]],
        "undrawn": tests[_MOST_CURVES:],
        "losses": figures.loss_figure(groups),
        "logged_curves": figures.logged_figures(groups),
        "logged_tables": logged_tables,
        "logged_images": logged_images,
    }


def _clients(part: Part, sizes: Sequence[int]) -> dict[str, Any]:
    """The clients one by one, if a protocol tests them so."""
    per_client = clients.per_client_protocol(part)
    if per_client is None:
        return {"tested_alone": "", "sorted": None, "planes": [], "by_name": None}
    by_name = clients.table_of(part, sizes)
    return {
        "tested_alone": protocol_name(per_client),
        "sorted": figures.clients_figure(part.groups, per_client),
        "planes": figures.personal_against_global(part.groups, per_client),
        "by_name": by_name,
        "by_name_caption": clients.caption(part, by_name) if by_name else "",
    }


def _spending(groups: list[RunGroup], main: str) -> dict[str, Any]:
    """What runs cost, in messages, time, energy and privacy, and how good methods are for it."""
    axes = budgets.axes_of(groups)
    ledger = tables.ledger(groups)
    return {
        "costs": tables.costs(groups),
        "shared_seconds": shared_seconds(groups),
        "efforts": [figures.metric_figure(groups, main, against) for against in axes],
        "target": budgets.for_target(groups, main, axes),
        "within": budgets.within_budgets(groups, main, axes),
        "ledger": ledger,
        "ledger_digits": megabyte_digits(message.megabytes for _, _, line in ledger for message, _ in line),
        "privacy": [(privacy_sentence(group), epsilons(group)) for group in groups if epsilons(group)],
        "predicted": any(prediction_traffic(group) for group in groups),
    }


def _settings(groups: list[RunGroup]) -> dict[str, Any]:
    """In what runs differ, and what they share."""
    differing, shared, at_default = tables.compare_settings(groups)
    environment_differing, environment = tables.compare_environments(groups)
    return {
        "differing": differing,
        "shared": shared,
        "at_default": at_default,
        "environment_differing": environment_differing,
        "environment": environment,
    }


def _tests(protocols: Sequence[str]) -> list[str]:
    """The protocols on test data, or all if there are none; clients' own test data come first."""
    tests = [name for name in protocols if unmasked_name(name) != "val"]
    return sorted(tests or protocols, key=lambda name: name != "local")


def _size(groups: Sequence[RunGroup]) -> str:
    """``3 methods · 2 to 3 seeds · 20 rounds``."""
    methods = {type(group.results[0].experiment.method) for group in groups}
    kind = "configuration"
    if len(methods) == len(groups):
        kind = "method"
    seeds = {len(group.results) for group in groups}
    rounds = {result.round for group in groups for result in group.results}

    parts = []
    for noun, numbers in ((kind, {len(groups)}), ("seed", seeds), ("round", rounds)):
        least = min(numbers)
        text = counted(max(numbers), noun)
        if len(numbers) > 1:
            text = f"{least:,} to {text}"
        parts.append(text)
    return " · ".join(parts)


def _ends(results: Sequence[RunResult]) -> list[str]:
    """How runs ended that are not finished."""
    ends = []
    for label, result in labelled(results):
        if result.status != "finished":
            error = recorded_end(result.run_dir)["error"] if result.status in WITHOUT_RESULT else ""
            end = f"{result.status} after round {result.round} of {result.experiment.rounds}"
            ends.append((label, result, f"{end}: {error}" if error else f"{end}."))
    return [_from_here(f"{runs}, {end}") for runs, end in seeds_together(ends)]


def _from_here(text: str) -> str:
    """Return the text with the paths in it that are within the current folder relative to it."""
    return text.replace(f"{Path.cwd()}{os.sep}", "")


def _cautions(groups: Sequence[RunGroup]) -> list[str]:
    """What a reader must know before comparing."""
    cautions = []
    for group in groups:
        notices = [(group.label, result, notice) for result in group.results for notice in run_notices(result)]
        cautions += [f"{runs}: {notice}" for runs, notice in seeds_together(notices)]

        rounds = {result.round for result in group.results}
        if len(rounds) > 1:
            cautions.append(
                f"The seeds of {group.label} ended after {series(map(str, sorted(rounds)))} rounds. "
                "Tables show each at its own end, curves the rounds that all of them reached."
            )

    cautions += attack_sentences(groups)
    cautions += untrained_parts(groups)
    cautions += unequal_lengths(groups)
    cautions += unequal_seeds(groups)
    return cautions


def _holdings(first: RunResult) -> dict[str, Any]:
    """Who holds what: `title`, a `figure`, `rows` of min, median, mean and max, and clients' training `sizes`; or
    `why_not`."""
    title = f"{data_text(first)}, seed {first.experiment.seed}"
    try:
        summary = clients.held_in(first)
    except RaypflError as error:
        return {"title": title, "figure": None, "sizes": [], "why_not": str(error)}

    spreads = {}
    for name, spread in client_data.sizes_of(summary).items():
        if spread["max"]:  # some client holds samples of this split
            spreads[f"{name} samples"] = spread
    spreads |= client_data.labels_of(summary)

    rows = {}
    for name, spread in spreads.items():
        rows[name] = [client_data.number(value) for value in spread.values()]
    sizes = summary.sizes["train"].tolist()
    return {"title": title, "figure": figures.partition_figure(summary), "rows": rows, "sizes": sizes}
