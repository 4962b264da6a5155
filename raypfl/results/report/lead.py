"""The first sentence of the report: which method's models are best, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from raypfl.results.differences import Difference, difference
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
    if not rivals:
        return f"{capitalised(models)} {reach} {_score_text(unit, best_scores)} on {test_data}."

    best_text = unit.text(fmean(best_scores))
    equals = [group for group, seeds in rivals if unit.text(fmean(seeds)) == best_text]
    if equals:
        equal_models = f"{len(equals)} others"
        if len(equals) == 1:
            equal_models, _, _ = _models(equals[0], protocol)
        return f"{capitalised(models)} and {equal_models} are best on {test_data}: {_score_text(unit, best_scores)}."

    second, second_scores = rivals[0]
    rival_models, _, _ = _models(second, protocol)
    lead = _lead_text(unit, fmean(best_scores), fmean(second_scores))
    certainty = _certainty(difference(best, second, protocol), best_scores, second_scores)
    sentence = (
        f"{capitalised(models)} {are} best on {test_data}: {_score_text(unit, best_scores)}, "
        f"{lead} {rival_models}{certainty}."
    )

    unused = _unused_global_model(groups, protocol, fmean(best_scores))
    if best.deployed(protocol) == "personal":
        global_scores = best.scores(protocol, "global")
        own_global_model = f"global model of {best.label} has"
        if global_scores and not best.leaves_untrained and own_global_model not in unused:
            sentence += f" The {own_global_model} {_score_text(unit, global_scores)}."
    return sentence + unused


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


def _unused_global_model(groups: Sequence[RunGroup], protocol: str, best: float) -> str:
    """A sentence on a global model that is better than the best models that clients would use; empty if none is."""
    unit = groups[0].unit
    for group, scores in _best_first(groups, protocol, "global")[:1]:
        mean = fmean(scores)
        if mean > best if unit.metric.higher_is_better else mean < best:
            text = f"the global model of {group.label} has {_score_text(unit, scores)}"
            return f" These are the models that clients would use; {text}."
    return ""


def _lead_text(unit: Unit, best: float, second: float) -> str:
    """``3.1 points above``."""
    lead = unit.text(abs(best - second))
    if unit.metric.percent:
        lead += " points"
    if unit.metric.higher_is_better:
        return f"{lead} above"
    return f"{lead} below"


def _certainty(row: Difference, best_scores: Sequence[float], second_scores: Sequence[float]) -> str:
    """The end of the sentence on a lead: its interval or, if nothing is paired, whether it is within the spread."""
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


def _score_text(unit: Unit, scores: Sequence[float]) -> str:
    """``94.2 ± 0.3 %``, or ``a mean squared error of 2,900``."""
    text = unit.text(*scores).replace("±", " ± ")
    if unit.sign:
        return f"{text}{unit.sign}"
    return f"a {unit.phrase} of {text}"


def _models(group: RunGroup, protocol: str) -> tuple[str, str, str]:
    """The models that clients use, with their verbs: ``the personal models of ditto``, ``reach``, ``are``."""
    if group.deployed(protocol) == "personal":
        return f"the personal models of {group.label}", "reach", "are"
    return f"the global model of {group.label}", "reaches", "is"
