"""The page: what stands where, and what it says where there is nothing to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from raypfl.data import Summary, load_federated, summarised
from raypfl.evaluation.measures import Measures
from raypfl.report import figures, logged, tables
from raypfl.report.figures import Drawing
from raypfl.report.labels import listed, protocol_in_words
from raypfl.report.shades import on_dark, on_light
from raypfl.results import data_table
from raypfl.results.contenders import Contender, contenders, setting
from raypfl.results.numbers import prediction
from raypfl.results.units import Unit, capital
from raypfl.runs import Result

_CURVES = 6  # protocols that have a figure of their own
_PER_CLIENT = ("local", "unseen", "pm_l", "pm_v", "val", "train")


@dataclass(frozen=True)
class Holdings:
    """Who holds what, or why that cannot be shown."""

    title: str
    why_not: str = ""
    drawing: Drawing | None = None
    rows: dict[str, dict[str, float]] | None = None


def write(results: Sequence[Result], path: str | Path, notes: Sequence[str] = ()) -> Path:
    """Write a report on runs that were evaluated at least once.

    Parameters
    ----------
    results : at least one; those that differ in their seed alone are one method's repetitions.
    path : of the HTML file; its folder must exist.
    notes : sentences for the reader, such as on what is left out.

    Returns
    -------
    The path.
    """
    if not Path(path).parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {Path(path).parent}.")
    compared = contenders(results)
    folder = resources.files("raypfl.report")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = environment.from_string((folder / "page.html.jinja").read_text("utf-8"))
    style = Markup((folder / "page.css").read_text("utf-8"))
    text = page.render(style=style, shades=_shades(compared), marks=_marks(compared), **_content(compared, notes))
    files.write(Path(path), text)
    return Path(path)


def _content(compared: list[Contender], notes: Sequence[str]) -> dict[str, Any]:
    protocols = list(dict.fromkeys(name for one in compared for name in one.protocols))
    tests = sorted((name for name in protocols if name != "val"), key=lambda name: name != "local") or protocols
    main, drawn = tests[0], tests[:_CURVES]
    own = next((name for name in _PER_CLIENT if name in protocols), None)
    headings, blocks = tables.results(compared)
    differing, shared = tables.differences(compared)
    metadata_differing, metadata = tables.environment(compared)
    runs = [(i, one.label, result) for i, one in enumerate(compared) for result in one.results]
    return {
        "title": listed(list(dict.fromkeys(result.experiment.name for *_, result in runs))),
        "settings": list(dict.fromkeys(setting(result.experiment, result.metadata) for *_, result in runs)),
        "lead": _lead(compared, main),
        "size": _size(compared),
        "notes": [*notes, *_cautions(compared)],
        "compared": compared,
        "several_seeds": any(len(one.results) > 1 for one in compared),
        "headings": headings,
        "unit": compared[0].unit,
        "capital": capital,
        "metrics": _metrics_in_words(compared[0].measures, headings),
        "blocks": blocks,
        "costs": tables.costs(compared),
        "tested": protocol_in_words(main),
        "first_curves": figures.curves(compared, main, "round", wide=True),
        "course": tables.course(compared, main),
        "more_curves": [figures.curves(compared, name, "round") for name in drawn[1:]],
        "undrawn": tests[_CURVES:],
        "losses": figures.losses(compared),
        "logged_curves": logged.curves(compared),
        "logged_tables": logged.excerpts(compared),
        "logged_images": logged.images(compared),
        "tested_alone": protocol_in_words(own) if own else "",
        "sorted": figures.sorted_clients(compared, own) if own else None,
        "planes": figures.personal_against_global(compared, own) if own else [],
        "efforts": [figures.curves(compared, main, against) for against in ("megabytes", "seconds")],
        "holdings": _holdings(compared),
        "ledger": tables.ledger(compared),
        "predicted": any(prediction(one) for one in compared),
        "differing": differing,
        "shared": shared,
        "metadata_differing": metadata_differing,
        "metadata": metadata,
        "runs": runs,
        "version": __version__,
        "today": date.today().isoformat(),
    }


def _shades(compared: Sequence[Contender]) -> list[tuple[str, str]]:
    return [(on_light(i), on_dark(i)) for i in range(len(compared))]


def _marks(compared: Sequence[Contender]) -> list[str]:
    """For each contender what tells it from one of the same colour, if it is not the first of that."""
    return [figures.mark(i) for i in range(len(compared))]


def _lead(compared: Sequence[Contender], protocol: str) -> str:
    """The result in a sentence: of the models that clients would use, and whose they are."""
    unit = compared[0].unit
    sign = -1 if unit.metric.higher_is_better else 1
    scored = [(one, one.scores(protocol, one.deployed(protocol), unit.metric.name)) for one in compared]
    ranked = sorted(((one, values) for one, values in scored if values), key=lambda pair: sign * fmean(pair[1]))
    (best, reached), *others = ranked
    whose, tested, so = _whose(best, protocol), protocol_in_words(protocol), _printed(unit, reached)
    if not others:
        return f"{capital(whose)} {_number(best, protocol, 'reaches', 'reach')} {so} on {tested}."
    equals = [
        _whose(one, protocol) for one, values in others if unit.printed(fmean(values)) == unit.printed(fmean(reached))
    ]
    if equals:
        others_too = equals[0] if len(equals) == 1 else f"{len(equals)} others"
        return f"{capital(whose)} and {others_too} are best on {tested}: {so}."
    second, theirs = others[0]
    ahead = abs(fmean(reached) - fmean(theirs))
    points, way = (" points", "above") if unit.metric.percent else ("", "above" if sign < 0 else "below")
    lead = f"{unit.printed(ahead)}{points} {way} {_whose(second, protocol)}"
    spread = max((stdev(values) for values in (reached, theirs) if len(values) > 1), default=0.0)
    within = f", which is within the spread over seeds (± {unit.printed(spread)})" if ahead <= spread else ""
    own = best.scores(protocol, "global", unit.metric.name) if best.deployed(protocol) == "personal" else []
    beside = f" The global model of {best.label} has {_printed(unit, own)}." if own else ""
    verb = _number(best, protocol, "is", "are")
    return f"{capital(whose)} {verb} best on {tested}: {so}, {lead}{within}.{beside}"


def _printed(unit: Unit, values: Sequence[float]) -> str:
    """``94.2 ± 0.3 %``, or ``a mean squared error of 2900``."""
    text = unit.over_seeds(values).replace("±", " ± ")
    return f"{text}{unit.sign}" if unit.sign else f"a {unit.words} of {text}"


def _whose(one: Contender, protocol: str) -> str:
    """``the personal models of ditto``, ``the global model of fedavg``."""
    return f"the {_number(one, protocol, 'global model', 'personal models')} of {one.label}"


def _number(one: Contender, protocol: str, single: str, several: str) -> str:
    return several if one.deployed(protocol) == "personal" else single


def _metrics_in_words(measures: Measures, headings: Sequence[str]) -> str:
    """``", the expected calibration error (ECE)"`` and so on, of the metrics beside the primary one that are shown."""
    units = [Unit(metric) for metric in measures.others if metric.words]
    return "".join(
        f", the {unit.words.removeprefix('the ')} ({unit.heading})" for unit in units if unit.heading in headings
    )


def _size(compared: Sequence[Contender]) -> str:
    seeds = sorted({len(one.results) for one in compared})
    rounds = sorted({result.round for one in compared for result in one.results})
    counts = {"method": [len(compared)], "seed": seeds, "round": rounds}
    return " · ".join(_counted(numbers, what) for what, numbers in counts.items())


def _counted(numbers: Sequence[int], what: str) -> str:
    """``3 seeds``, or ``2 to 3 seeds``."""
    spread = f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"
    return f"{spread} {what}{'s' * (numbers[-1] != 1)}"


def _cautions(compared: Sequence[Contender]) -> list[str]:
    """What a reader must know before comparing."""
    cautions = []
    for one in compared:
        cut = [result for result in one.results if result.status != "finished"]
        cautions += [f"{one.label}, seed {run.experiment.seed}, {run.status} after round {run.round}." for run in cut]
        rounds = {result.round for result in one.results}
        if len(rounds) > 1:
            cautions.append(
                f"The seeds of {one.label} ended after {listed([str(number) for number in sorted(rounds)])} rounds: "
                "the tables have each at its own end, the curves the rounds that all of them reached."
            )
    if len({tuple(sorted(result.experiment.seed for result in one.results)) for one in compared}) > 1:
        cautions.append("Methods were run from different seeds, so that they did not all have the same partitions.")
    return cautions


def _holdings(compared: Sequence[Contender]) -> list[Holdings]:
    """One for each data set and partition, as the first seed deals it."""
    firsts: dict[str, Result] = {}
    for one in compared:
        first = one.results[0]
        firsts.setdefault(setting(first.experiment, first.metadata).rpartition(" · ")[0], first)
    titled = {f"{title}, seed {first.experiment.seed}": first for title, first in firsts.items()}
    return [_held(title, first, i) for i, (title, first) in enumerate(titled.items())]


def _held(title: str, first: Result, i: int) -> Holdings:
    experiment = first.experiment
    try:
        data = load_federated(experiment.data, experiment.partition, seed=experiment.seed)
        if first.metadata["data"] != data.fingerprint:
            return Holdings(title, "The data is not what it was when the run was made, so it is not shown.")
        summary = summarised(data)
    except RaypflError as error:
        return Holdings(title, str(error))
    return Holdings(title, drawing=figures.partition(summary, f"partition-{i}"), rows=_spreads(summary))


def _spreads(summary: Summary) -> dict[str, dict[str, float]]:
    told = data_table.as_json(summary)
    samples = {f"{name} samples": spread for name, spread in told["samples"].items() if spread["total"]}
    rows = samples | {
        f"{summary.several} held": told["classes_held"],
        "label entropy (bits)": told["label_entropy_bits"],
        "earth mover's distance": told["earth_movers_distance"],
    }
    return {name: {what: spread[what] for what in ("min", "median", "mean", "max")} for name, spread in rows.items()}
