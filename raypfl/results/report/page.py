"""The page: what goes where, and the sentences where there is nothing to show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from importlib import resources
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import jinja2
from markupsafe import Markup

from raypfl.common import files
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.common.version import __version__
from raypfl.data import load_federated, summarised
from raypfl.evaluation.masking import unmasked_name
from raypfl.evaluation.measures import Measures
from raypfl.results import client_data
from raypfl.results.compared import COLOURS, RunGroup, data_setting, group_runs, mark, shared_setting
from raypfl.results.epsilons import epsilons, sentence
from raypfl.results.numbers import prediction_traffic
from raypfl.results.paired import HEADINGS, Difference, difference, differences, named, remarks
from raypfl.results.report import export, figures, tables
from raypfl.results.report import sweeps as searches
from raypfl.results.report.tables import listed, protocol_name
from raypfl.results.table import MODELS
from raypfl.results.units import Unit, capital
from raypfl.runs.result import RunResult

_FIGURE_ID = re.compile(r"((?:id=\"|href=\"#|url\(#)\w?[0-9a-f]{10})")
_EXPORTS = {".tex": export.as_latex, ".csv": export.as_csv}
_CURVES = 6  # protocols that have a figure of their own
_PER_CLIENT = ("local", "unseen", "pm_l", "pm_v", "val", "train")
# Some colours are a little darker on white, or lighter on the dark page, so that their contrast is 3:1 (WCAG 2.2).
_ON_LIGHT = {"#D9A125": "#bb8a20", "#56B4D3": "#4c9eba", "#E58FB2": "#ca7e9d"}
_ON_DARK = {"#4F55B5": "#565cb8"}


def write(
    results: Sequence[RunResult],
    path: str | Path,
    notes: Sequence[str] = (),
    sweeps: Sequence[str | Path] = (),
    baseline: str | None = None,
) -> Path:
    """Write a report on runs that were evaluated at least once, or its table of results, and return its path.

    Parameters
    ----------
    results : at least one; those that differ in their seed alone are one method's repetitions.
    path : of the HTML file or, if it ends in ``.tex`` or ``.csv``, of the table; its folder must exist.
    notes : sentences for the reader, such as on what is left out.
    sweeps : folders of hyperparameter searches that the results are from.
    baseline : the method, by its label, that the others are compared with; None: the best one.

    Raises
    ------
    ConfigError : if there is no such folder or baseline.
    """
    if not Path(path).parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {Path(path).parent}.")
    settings: dict[tuple[str, str], list[RunResult]] = {}
    for result in results:
        key = (data_setting(result.experiment, result.metadata), result.experiment.measures.primary.name)
        settings.setdefault(key, []).append(result)
    groups = [group_runs(some) for some in settings.values()]
    baselines = _baselines(groups, baseline)
    ending = Path(path).suffix
    if ending not in ("", ".html", ".htm", *_EXPORTS):
        raise ConfigError(f"A report is a page or a table: let {path} end in .html, {' or '.join(_EXPORTS)}.")
    if export := _EXPORTS.get(ending):
        files.write(Path(path), export(list(zip(groups, baselines, strict=True))))
        return Path(path)
    parts = [
        _part(compared, f"-{i}" if len(groups) > 1 else "", label)
        for i, (compared, label) in enumerate(zip(groups, baselines, strict=True), 1)
    ]
    count = max(map(len, groups))
    for part in parts:
        body = _template("part.html.jinja").render(**part, marks=[mark(i) for i in range(count)])
        part["body"] = Markup(_FIGURE_ID.sub(rf"\1{part['suffix']}", body))
    page = _template("page.html.jinja").render(
        title=listed(list(dict.fromkeys(result.experiment.name for result in results))),
        style=Markup(_file("page.css")),
        shades=[shades(i) for i in range(count)],
        searches=[searches.read(Path(folder), results[0].experiment.measures) for folder in sweeps],
        parts=parts,
        notes=[*notes, *(parts[0]["notes"] if len(parts) == 1 else [])],
        version=__version__,
        today=date.today().isoformat(),
    )
    files.write(Path(path), page)
    return Path(path)


def _baselines(groups: Sequence[Sequence[RunGroup]], baseline: str | None) -> list[str | None]:
    """The baseline of each part; None where it is not: differences there are to the best method."""
    if baseline is None:
        return [None] * len(groups)
    found: list[str | None] = []
    errors = []
    for compared in groups:
        try:
            found.append(named([group.label for group in compared], baseline))
        except ConfigError as error:
            found.append(None)
            errors.append(error)
    if len(errors) == len(groups):
        raise errors[0]
    return found


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_file(name))


def _file(name: str) -> str:
    return (resources.files("raypfl.results.report") / name).read_text("utf-8")


def shades(index: int) -> tuple[str, str]:
    """The colour of the group at `index` on the page's light and on its dark background."""
    colour = COLOURS[index % len(COLOURS)]
    return _ON_LIGHT.get(colour, colour.lower()), _ON_DARK.get(colour, colour.lower())


def _part(compared: list[RunGroup], suffix: str, baseline: str | None) -> dict[str, Any]:
    """What the page shows of runs on one data set, partition and model; `suffix` makes ids unique on the page."""
    protocols = list(dict.fromkeys(name for one in compared for name in one.protocols))
    tests = [name for name in protocols if unmasked_name(name) != "val"] or protocols
    tests.sort(key=lambda name: name != "local")
    main = tests[0]
    own = next((name for name in _PER_CLIENT if name in protocols), None)
    headings, blocks = tables.results(compared)
    differing, shared = tables.differences(compared)
    environment_differing, environment = tables.environment(compared)
    logged_tables, logged_images = tables.logged(compared)
    paired = differences(compared, baseline)
    runs = [(i, one.label, result) for i, one in enumerate(compared) for result in one.results]
    return {
        "suffix": suffix,
        "setting": shared_setting([result for _, _, result in runs]),
        "lead": _lead(compared, main),
        "size": _size(compared),
        "notes": _cautions(compared),
        "compared": compared,
        "several_seeds": any(len(one.results) > 1 for one in compared),
        "headings": headings,
        "models": [model for model in MODELS if any(one.scores(main, model) for one in compared)],
        "unit": compared[0].unit,
        "capital": capital,
        "metrics": _other_metrics(compared[0].measures, headings),
        "blocks": blocks,
        "paired": tables.paired(compared, paired),
        "paired_headings": [heading.replace("\n", " ") for heading in HEADINGS],
        "paired_remarks": remarks(paired, compared),
        "costs": tables.costs(compared),
        "tested": protocol_name(main),
        "first_curves": figures.curves(compared, main, "round", wide=True),
        "curve_values": tables.curve_values(compared, main),
        "more_curves": [figures.curves(compared, name, "round") for name in tests[1:_CURVES]],
        "undrawn": tests[_CURVES:],
        "losses": figures.losses(compared),
        "logged_curves": figures.logged(compared),
        "logged_tables": logged_tables,
        "logged_images": logged_images,
        "tested_alone": protocol_name(own) if own else "",
        "sorted": figures.sorted_clients(compared, own) if own else None,
        "planes": figures.personal_against_global(compared, own) if own else [],
        "efforts": [figures.curves(compared, main, against) for against in ("megabytes", "seconds")],
        "holdings": _holdings(compared[0].results[0]),
        "ledger": tables.ledger(compared),
        "privacy": [(sentence(one), epsilons(one)) for one in compared if epsilons(one)],
        "predicted": any(prediction_traffic(one) for one in compared),
        "differing": differing,
        "shared": shared,
        "environment_differing": environment_differing,
        "environment": environment,
        "runs": runs,
    }


def _lead(compared: Sequence[RunGroup], protocol: str) -> str:
    """The result in a sentence: of the models that clients use, and whose they are."""
    unit, tested = compared[0].unit, protocol_name(protocol)
    scored = [(one, values) for one in compared if (values := one.scores(protocol))]
    ranked = sorted(scored, key=lambda pair: fmean(pair[1]), reverse=unit.metric.higher_is_better)
    (best, reached), *others = ranked
    models, reach, are = _models(best, protocol)
    if not others:
        return f"{capital(models)} {reach} {_printed(unit, reached)} on {tested}."
    equals = [one for one, values in others if unit.text(fmean(values)) == unit.text(fmean(reached))]
    if equals:
        others_too = _models(equals[0], protocol)[0] if len(equals) == 1 else f"{len(equals)} others"
        return f"{capital(models)} and {others_too} are best on {tested}: {_printed(unit, reached)}."
    second, theirs = others[0]
    ahead = abs(fmean(reached) - fmean(theirs))
    way = f"{' points' if unit.metric.percent else ''} {'above' if unit.metric.higher_is_better else 'below'}"
    own = best.scores(protocol, "global") if best.deployed(protocol) == "personal" else []
    also = f" The global model of {best.label} has {_printed(unit, own)}." if own else ""
    lead = f"{unit.text(ahead)}{way} {_models(second, protocol)[0]}"
    sure = _certainty(difference(best, second, protocol), (reached, theirs))
    return f"{capital(models)} {are} best on {tested}: {_printed(unit, reached)}, {lead}{sure}.{also}"


def _certainty(row: Difference, scores: Sequence[Sequence[float]]) -> str:
    """What follows the best method's lead: how often it is ahead, or the spread over seeds if they are not paired."""
    if row.low is not None and row.high is not None:
        interval = f"{row.text(row.low)} to {row.text(row.high)}"
        if row.low <= 0 <= row.high:
            return f", but the 95% interval of the difference includes 0 ({interval})"
        ahead = f", ahead in {row.seeds_ahead} of {len(row.by_seed)} seeds" if len(row.by_seed) > 1 else ""
        return f"{ahead} (95% interval {interval})"
    lead = abs(fmean(scores[0]) - fmean(scores[1]))
    spread = max((stdev(values) for values in scores if len(values) > 1), default=0.0)
    return f", which is within the spread over seeds (± {row.unit.text(spread)})" if lead <= spread else ""


def _printed(unit: Unit, values: Sequence[float]) -> str:
    """``94.2 ± 0.3 %``, or ``a mean squared error of 2,900``."""
    text = unit.text(*values).replace("±", " ± ")
    return f"{text}{unit.sign}" if unit.sign else f"a {unit.phrase} of {text}"


def _models(one: RunGroup, protocol: str) -> tuple[str, str, str]:
    """``the personal models of ditto``, ``the global model of fedavg``; and their verbs."""
    if one.deployed(protocol) == "personal":
        return f"the personal models of {one.label}", "reach", "are"
    return f"the global model of {one.label}", "reaches", "is"


def _other_metrics(measures: Measures, headings: Sequence[str]) -> str:
    """``", the expected calibration error (ECE)"`` and so on, of the other metrics that are shown."""
    units = [Unit(metric) for metric in measures.others if metric.phrase]
    return "".join(
        f", the {unit.phrase.removeprefix('the ')} ({unit.heading})" for unit in units if unit.heading in headings
    )


def _size(compared: Sequence[RunGroup]) -> str:
    """``3 methods · 2 to 3 seeds · 20 rounds``."""
    seeds = sorted({len(one.results) for one in compared})
    rounds = sorted({result.round for one in compared for result in one.results})
    methods = {type(one.results[0].experiment.method) for one in compared}
    kind = "method" if len(methods) == len(compared) else "configuration"
    parts = []
    for what, numbers in ((kind, [len(compared)]), ("seed", seeds), ("round", rounds)):
        span = f"{numbers[0]:,} to {numbers[-1]:,}" if len(numbers) > 1 else f"{numbers[0]:,}"
        parts.append(f"{span} {what}{'s' * (numbers[-1] != 1)}")
    return " · ".join(parts)


def _cautions(compared: Sequence[RunGroup]) -> list[str]:
    """What a reader must know before comparing."""
    cautions = []
    for one in compared:
        cut = [result for result in one.results if result.status != "finished"]
        cautions += [f"{one.label}, seed {run.experiment.seed}, {run.status} after round {run.round}." for run in cut]
        rounds = {result.round for result in one.results}
        if len(rounds) > 1:
            cautions.append(
                f"The seeds of {one.label} ended after {listed([str(number) for number in sorted(rounds)])} rounds. "
                "Tables show each at its own end, curves the rounds that all of them reached."
            )
    if len({tuple(sorted(result.experiment.seed for result in one.results)) for one in compared}) > 1:
        cautions.append("Methods were run from different seeds, so their partitions are not all the same.")
    return cautions


def _holdings(first: RunResult) -> dict[str, Any]:
    """Who holds what: `title`, a `drawing` and `rows` of min, median, mean and max; or `why_not`."""
    experiment = first.experiment
    title = f"{data_setting(experiment, first.metadata)}, seed {experiment.seed}"
    try:
        data = load_federated(experiment.data, experiment.partition, seed=experiment.seed)
        if first.metadata["data"] != data.fingerprint:
            return {"title": title, "drawing": None, "why_not": "The data has changed since the run."}
        summary = summarised(data)
    except RaypflError as error:
        return {"title": title, "drawing": None, "why_not": str(error)}
    samples = {f"{name} samples": row for name, row in client_data.sizes_of(summary).items() if row["max"]}
    rows = {
        name: [client_data.number(value) for value in row.values()]
        for name, row in (samples | client_data.labels_of(summary)).items()
    }
    return {"title": title, "drawing": figures.partition(summary), "rows": rows}
