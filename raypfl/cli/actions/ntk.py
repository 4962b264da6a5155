"""`raypfl ntk`: show what the analyses of the neural tangent kernel find in runs, after running them if necessary."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from raypfl.analysis.base import ANALYSES, analysis_folder
from raypfl.analysis.flntk import DIAGNOSIS, FLNTK, REPORT, observed_errors
from raypfl.analysis.ntk import NTK
from raypfl.cli.actions.json_text import json_text
from raypfl.cli.actions.run import run_experiments
from raypfl.common.errors import ConfigError
from raypfl.experiment import Experiment, experiments
from raypfl.experiment.recipes import settings_of
from raypfl.results.display import outcome
from raypfl.runs.folders import ComparisonFolder, new_folder
from raypfl.runs.records import DESCRIPTION
from raypfl.runs.result import RunResult
from raypfl.trained.kernels import checkpoint_kernels


def ntk(source: str, changes: Sequence[str], quiet: bool, as_json: bool) -> None:
    """Show what the analyses `flntk` and `ntk` find in a run, a comparison, or a recipe, which is run first.

    For a run without these analyses, kernels are computed from its checkpoints.

    Raises
    ------
    ConfigError : if a folder has no run, or no kernel can be computed from it.
    """
    folder = Path(source)
    if folder.is_dir():
        _show(source, changes, as_json)
        return

    if len(folder.parts) > 1 and not folder.suffix:
        raise ConfigError(f"There is no folder {source}; name a run's folder, a recipe or a file that ends in .yaml.")
    planned = experiments(settings_of(source), changes)
    if not any(_has_kernel_analysis(experiment) for experiment in planned):
        planned = [experiment.replace(analyses=[*experiment.analyses, "ntk"]) for experiment in planned]

    folder = new_folder(planned[0])
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        run_experiments(planned, [source, *changes], folder, quiet, as_json=False, command="ntk")
    if as_json:
        _show(str(folder), [], as_json)


def _show(source: str, changes: Sequence[str], as_json: bool) -> None:
    if not all(change.startswith("analyses=") for change in changes):
        raise ConfigError(
            f"{source} is the folder of a run, whose settings cannot change, except analyses=[{{name: ntk, ...}}] for "
            "kernels of its checkpoints. Name a recipe instead."
        )
    folder = Path(source)
    comparison = ComparisonFolder.load(folder)
    if not comparison and not (folder / DESCRIPTION).exists():
        raise ConfigError(f"{source} is neither the folder of a run or comparison nor a recipe.")

    run_folders = comparison.folders if comparison else [folder]
    results = [RunResult.load(run_folder) for run_folder in run_folders]
    findings = {}
    lines_by_run = []
    for result in results:
        run = str(outcome.nearby(result.run_dir))
        if not changes and _has_kernel_analysis(result.experiment):
            findings[run] = _findings(result)
            lines_by_run.append(outcome.findings(result))
        else:
            analyses = result.experiment.override(changes).analyses
            analysis = next((analysis for analysis in analyses if isinstance(analysis, NTK)), NTK())
            rows = checkpoint_kernels(result, analysis)
            findings[run] = {"checkpoints": rows}
            lines_by_run.append(_checkpoint_lines(rows))

    if as_json:
        print(json_text(findings))
    else:
        outcome.show_findings(Console(), results, lines_by_run)


def _checkpoint_lines(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a line for each checkpoint's kernel, and what to do if there is one alone."""
    lines = [_line(row) for row in rows]
    if len(lines) < 2:
        lines.append(
            "Two checkpoints or more show how the kernel moves and why: run with checkpoint.every=5 "
            "checkpoint.keep=100, or `raypfl ntk RECIPE`."
        )
    return lines


def _has_kernel_analysis(experiment: Experiment) -> bool:
    return any(isinstance(analysis, FLNTK | NTK) for analysis in experiment.analyses)


def _findings(result: RunResult) -> dict[str, Any]:
    """Return what the kernel's analyses of a run have written, by analysis."""
    findings: dict[str, Any] = {}
    for analysis in result.experiment.analyses:
        if not isinstance(analysis, FLNTK | NTK):
            continue
        folder = analysis_folder(result.run_dir, analysis)
        contents: dict[str, Any] = {}
        for file in (folder / REPORT, folder / DIAGNOSIS):
            if file.exists():
                contents[file.stem] = json.loads(file.read_text())
        if isinstance(analysis, FLNTK):
            contents["observed"] = observed_errors(folder, result.round)
        findings[ANALYSES.name_of(type(analysis))] = contents
    return findings


def _line(row: Mapping[str, float]) -> str:
    """Describe the kernel of a checkpoint in a line."""
    numbers = [f"largest eigenvalue {row['largest']:.3g} ({row['largest_share']:.0%} of the sum of all)"]
    if "least" in row:
        numbers.append(f"least {row['least']:.3g}")
    if "between" in row:
        numbers.append(f"entries between clients {row['between']:.2f} times those within one")
    line = f"after round {row['round']}: {', '.join(numbers)}"
    if "drift" not in row:
        return line
    return (
        f"{line}; since the checkpoint before, the kernel has changed by {row['drift']:.0%}, and "
        f"the outputs' change differs from the linear one by {row['nonlinear']:.0%} of its size"
    )
