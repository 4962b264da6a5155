"""What must be known of a run or a plan before its numbers are believed, in sentences."""

from __future__ import annotations

from raypfl.common.user_code import where_defined
from raypfl.methods import Method
from raypfl.runs.checks.hooks import MODEL_HOOKS
from raypfl.runs.planning.plan import Plan
from raypfl.runs.result import RunResult

_MEND_DEADLINE = "raise it, or set cohort.quorum."


def run_notices(result: RunResult) -> list[str]:
    """Return what the results of a run do not show: that nothing was trained, or that nothing could be tested."""
    notices = []
    counts = result.rounds["clients"].to_pylist()
    if counts and not any(counts):
        notice = "Nothing was trained, since no client counted in any round."
        if "late" in result.rounds.column_names and any(result.rounds["late"].to_pylist()):
            notice += f" None met cohort.deadline: {_MEND_DEADLINE}"
        notices.append(notice)
    if result.status == "finished" and not result.evaluations.num_rows:
        notices.append(_why_nothing_was_tested(result.experiment.method))
    return notices


def _why_nothing_was_tested(method: Method) -> str:
    if type(method).__module__.startswith("raypfl."):
        return "There are no results, since no client has samples for evaluation.protocols; raise data.test_fraction."
    makers = [where_defined(getattr(method, name)) for name in MODEL_HOOKS if method.has(name)]
    return (
        "There are no results: either no client has samples for evaluation.protocols (raise data.test_fraction), or "
        f"{' and '.join(makers)} returned nothing."
    )


def plan_notices(plan: Plan) -> list[str]:
    """Return what the numbers of a plan do not show: that nothing will be trained."""
    if plan.clients.any():
        return []

    notice = "Nothing will be trained, since no client counts in any round."
    if plan.late.any():
        notice += f" None meets cohort.deadline: {_MEND_DEADLINE}"
    return [notice]
