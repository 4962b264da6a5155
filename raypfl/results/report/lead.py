"""The first sentence of the report: which method's models are best, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from raypfl.results.pairing.differences import Difference, difference
from raypfl.results.report.parts import Part
from raypfl.results.report.tables import protocol_name
from raypfl.results.run_groups import RunGroup
from raypfl.results.units import Unit, capitalised, deviation


def lead_of(part: Part, protocol: str) -> str:
    """The main result in sentences: what searches chose, and which candidate's models are best, and by how much.

    Global models that are partly untrained are left out.
    """
    sentences = list(part.choices)
    if part.candidates:
        sentences.append(_result(part.candidates, protocol))
    return " ".join(sentences)


def _result(groups: Sequence[RunGroup], protocol: str) -> str:
    """The result of groups that all may be called the best."""
    unit = groups[0].unit
    test_data = protocol_name(protocol)
    ranked = _best_first(groups, protocol)
    if not ranked and any(group.leaves_untrained and group.scores(protocol) for group in groups):
        return f"No model with all its parts trained was tested on {test_data}."
    if not ranked:
        return f"{capitalised(unit.phrase)} is undefined for all clients on {test_data}."

    (best, best_scores), *rivals = ranked
    models, reach, are = _models(best, protocol)
    score = unit.in_words(*best_scores)
    global_models = _global_models(groups, protocol, best, fmean(best_scores))
    if not rivals:
        return f"{capitalised(models)} {reach} {score} on {test_data}.{global_models}"

    best_text = unit.text(fmean(best_scores))
    equals = [group for group, seeds in rivals if unit.text(fmean(seeds)) == best_text]
    if equals:
        equal_models = f"{len(equals)} others"
        if len(equals) == 1:
            equal_models, _, _ = _models(equals[0], protocol)
        return f"{capitalised(models)} and {equal_models} are best on {test_data}: {score}.{global_models}"

    second, second_scores = rivals[0]
    rival_models, _, _ = _models(second, protocol)
    lead = _lead_text(unit, fmean(best_scores), fmean(second_scores))
    certainty = _certainty(difference(best, second, protocol), best_scores, second_scores)
    return f"{capitalised(models)} {are} best on {test_data}: {score}, {lead} {rival_models}{certainty}.{global_models}"


def _best_first(groups: Sequence[RunGroup], protocol: str, model: str = "") -> list[tuple[RunGroup, list[float]]]:
    """The groups that have such a model, with its scores; by default the one that clients use.

    Partly untrained global models are left out.
    """
    scored = []
    for group in groups:
        is_global = (model or group.deployed(protocol)) == "global"
        if is_global and group.leaves_untrained:
            continue
        scores = group.scores(protocol, model)
        if scores:
            scored.append((group, scores))
    return sorted(scored, key=lambda pair: groups[0].unit.order(fmean(pair[1])))


def _global_models(groups: Sequence[RunGroup], protocol: str, best: RunGroup, best_mean: float) -> str:
    """Sentences on the global model beside the best personal ones, and on one that is better than all models in use."""
    unit = groups[0].unit
    beside = ""
    own_scores = best.scores(protocol, "global")
    if best.deployed(protocol) == "personal" and own_scores and not best.leaves_untrained:
        beside = f" The global model of {best.label} has {unit.in_words(*own_scores)}."

    for group, scores in _best_first(groups, protocol, "global")[:1]:
        mean = fmean(scores)
        if mean > best_mean if unit.metric.higher_is_better else mean < best_mean:
            if group.label == best.label:
                beside = ""
            better = f"the global model of {group.label} has {unit.in_words(*scores)}"
            return f"{beside} These are the models that clients would use; {better}."
    return beside


def _lead_text(unit: Unit, best: float, second: float) -> str:
    """``3.1 points above``."""
    lead = unit.text(abs(best - second))
    if unit.metric.percent:
        lead += " points"
    if unit.metric.higher_is_better:
        return f"{lead} above"
    return f"{lead} below"


def _certainty(row: Difference, best_scores: Sequence[float], second_scores: Sequence[float]) -> str:
    """The end of the sentence on a lead: its interval or, if nothing is paired, whether it is within the spread.

    The interval is that of the seeds that both have. If they are not all, neither is the lead that of the interval.
    """
    num_paired = len(row.by_seed)
    if row.mean is not None and num_paired < max(len(best_scores), len(second_scores)):
        seeds = "seed" if num_paired == 1 else f"{num_paired} seeds"
        interval = "" if row.low is None else f" (95% interval {row.cells[1]})"
        return f"; in the {seeds} that both have, the difference is {row.text(row.mean)}{interval}"

    if row.low is not None and row.high is not None:
        interval = f"{row.text(row.low)} to {row.text(row.high)}"
        if row.low <= 0 <= row.high:
            return f", but the 95% interval of the difference includes 0 ({interval})"
        if len(row.by_seed) == 1:
            return f" (95% interval {interval})"
        return f", ahead in {row.seeds_ahead} of {len(row.by_seed)} seeds (95% interval {interval})"

    spread = 0.0
    for scores in (best_scores, second_scores):
        if len(scores) > 1:
            spread = max(spread, deviation(scores))
    if abs(fmean(best_scores) - fmean(second_scores)) > spread:
        return ""
    return f", which is within the spread over seeds (± {row.unit.text(spread)})"


def _models(group: RunGroup, protocol: str) -> tuple[str, str, str]:
    """The models that clients use, with their verbs: ``the personal models of ditto``, ``reach``, ``are``."""
    if group.deployed(protocol) == "personal":
        return f"the personal models of {group.label}", "reach", "are"
    return f"the global model of {group.label}", "reaches", "is"
