"""What `raypfl ntk` does: say what the kernel's analyses have found of runs, after running them if need be."""

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
from raypfl.cli.run import run_experiments
from raypfl.common.errors import ConfigError
from raypfl.experiment import experiments
from raypfl.experiment.recipes import settings_of
from raypfl.results.display import outcome
from raypfl.runs.folders import ComparisonFolder, new_folder
from raypfl.runs.result import RECIPE, RunResult
from raypfl.trained.kernels import of_checkpoints


def ntk(source: str, changes: Sequence[str], quiet: bool, as_json: bool) -> None:
    """Say what the analyses `flntk` and `ntk` have found of a run, a comparison, or a recipe, which is run first.

    For a run without them, kernels are computed from its checkpoints.

    Raises
    ------
    ConfigError : if a folder has no run, or no kernel can be computed of it.
    """
    folder = Path(source)
    if folder.is_dir():
        _show(source, changes, as_json)
        return
    if len(folder.parts) > 1 and not folder.suffix:
        raise ConfigError(f"There is no folder {source}; name a run's folder, a recipe or a file that ends in .yaml.")
    planned = experiments(settings_of(source), changes)
    if not any(isinstance(one, FLNTK | NTK) for run in planned for one in run.analyses):
        planned = [run.replace(analyses=[*run.analyses, "ntk"]) for run in planned]
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
    if not comparison and not (folder / RECIPE).exists():
        raise ConfigError(f"{source} is neither the folder of a run or comparison nor a recipe.")
    results = [RunResult.load(one) for one in (comparison.folders if comparison else [folder])]
    told, lines = {}, []
    for result in results:
        run = str(outcome.nearby(result.run_dir))
        if not changes and any(isinstance(one, FLNTK | NTK) for one in result.experiment.analyses):
            told[run] = _found(result)
            lines.append(outcome.findings(result))
        else:
            analyses = result.experiment.override(changes).analyses
            own = next((one for one in analyses if isinstance(one, NTK)), NTK())
            told[run] = {"checkpoints": of_checkpoints(result, own)}
            lines.append([_line(row) for row in told[run]["checkpoints"]])
            if len(lines[-1]) < 2:
                lines[-1].append(
                    "Two checkpoints or more show how the kernel moves and why: run with checkpoint.every=5 "
                    "checkpoint.keep=100, or `raypfl ntk RECIPE`."
                )
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        outcome.show_findings(Console(), results, lines)


def _found(result: RunResult) -> dict[str, Any]:
    """What the analyses of a run have written, by analysis."""
    found: dict[str, Any] = {}
    for one in result.experiment.analyses:
        if isinstance(one, FLNTK | NTK):
            name, folder = ANALYSES.name_of(type(one)), analysis_folder(result.run_dir, one)
            files = [file for name in (REPORT, DIAGNOSIS) if (file := folder / name).exists()]
            found[name] = {file.stem: json.loads(file.read_text()) for file in files}
            if isinstance(one, FLNTK):
                found[name]["observed"] = observed_errors(folder, result.round)
    return found


def _line(row: Mapping[str, float]) -> str:
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
