"""A personal model in a file: the tensors as safetensors, with an outline of their module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from raypfl.common.errors import CheckpointError
from raypfl.common.files import make_folder, write
from raypfl.common.messages import per_client
from raypfl.engine.building.data_outline import DataOutline
from raypfl.engine.prepared import Prepared
from raypfl.evaluation.run_metrics import Measures
from raypfl.experiment import Experiment
from raypfl.federation.method import Method
from raypfl.methods import METHODS
from raypfl.models.extras import Other
from raypfl.models.flat import FlatModel
from raypfl.models.predictor import Predictor
from raypfl.trained.trained_model import TrainedModel

FORMAT = "raypfl personal model 1"
PREDICTOR = "predictor"
NAMES = ("feature_names", "class_names", "vocabulary")
"""Attributes of a run's data that models keep, where the data have them."""

_OUTLINE = ("input_shape", "num_classes", "kind", "discrete", "scale", "mean", "std")


def inputs_of(outline: DataOutline) -> str:
    """Return shape and values of a run's inputs as text: ``"[n, 3, 32, 32] with values from 0 to 255"``."""
    shape = ", ".join(map(str, ("n", *outline.input_shape)))
    if outline.discrete:
        return f"[{shape}] of integer tokens"
    if outline.scale > 1:
        return f"[{shape}] with values from 0 to {outline.scale:g}"
    return f"[{shape}]"


def names_of(outline: DataOutline) -> dict[str, list[str] | None]:
    """Return ``feature_names``, ``class_names`` and ``vocabulary`` of a run's data; a population has none."""
    return {name: getattr(outline, name, None) for name in NAMES}


@dataclass(frozen=True)
class Origin:
    """The run that a model is from: its description, and the outline of its data."""

    experiment: Experiment
    outline: DataOutline

    @cached_property
    def measures(self) -> Measures:
        """The objective and the metrics."""
        return Prepared(self.experiment, self.outline).measures

    @cached_property
    def metadata(self) -> dict[str, str]:
        """The part of a model file's metadata that is about the run."""
        outline = {name: getattr(self.outline, name) for name in _OUTLINE} | names_of(self.outline)
        return {
            "inputs": inputs_of(self.outline),
            "experiment": self.experiment.override(["model.weights=null"]).to_yaml(),  # the state dict has them
            "data": json.dumps(outline, default=lambda array: np.asarray(array).tolist()),
        }


def save(model: TrainedModel, origin: Origin, file: str | Path, facts: Mapping[str, Any]) -> Path:
    """Write the model's file, and return its path; :func:`encoded` says what is in it."""
    path = Path(file)
    make_folder(path.parent)
    write(path, encoded(model, origin, facts))
    return path


def encoded(model: TrainedModel, origin: Origin, facts: Mapping[str, Any]) -> bytes:
    """Return the network's state dict as safetensors, with metadata.

    The metadata have, as text or JSON: ``outline``, the network as torch prints it; ``gain`` and ``offset``, by which
    inputs become the network's: ``network(x * gain + offset)``, whose outputs are in the units of the objective;
    ``inputs``, their shape and values; `facts`; and the run's ``experiment`` and ``data``, from which raypfl builds the
    network again; ``data`` has the names of inputs and outputs in order, ``feature_names``, ``class_names`` and, of
    texts, ``vocabulary``. If a model is more than a network, the tensors are those that its method's function predicts
    with, and ``predictor`` names the function.
    """
    metadata = {
        "format": FORMAT,
        "outline": repr(model.network),
        "gain": json.dumps(model.gain.tolist()),
        "offset": json.dumps(model.offset.tolist()),
        "facts": json.dumps(dict(facts)),
    } | _function_of(model.network, origin.experiment.method)
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.network.state_dict().items()}
    return safetensors.torch.save(tensors, metadata | origin.metadata)


def load_model(file: str | Path) -> TrainedModel:
    """Return the personal model in a file, in evaluation mode: it takes inputs as the run's data set has them.

    It needs neither the run nor its data. Without raypfl: ``safetensors.torch.load_file`` gives the state dict of the
    module that the metadata outline (:func:`encoded`).

    Raises
    ------
    CheckpointError : if there is no such file, it is damaged, or it is not one of these.
    """
    return load_with_origin(file)[0]


def load_with_origin(file: str | Path) -> tuple[TrainedModel, Origin]:
    """Do :func:`load_model`, and return the run that the model is from, too; its outline has no data."""
    metadata, tensors = tensors_in(file, "a personal model")
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} is not a personal model: its metadata do not say {FORMAT!r}. `raypfl personalize` writes them."
        )

    experiment = Experiment.from_record(metadata["experiment"])
    outline = outline_in(metadata["data"])
    prepared = Prepared(experiment, outline)
    model = prepared.model
    network = _predictor(metadata, experiment, model, tensors) if PREDICTOR in metadata else _network(model, tensors)
    if network is None:
        name = METHODS.name_of(type(experiment.method))
        raise CheckpointError(f"The tensors in {file} are not those of a model of {name}; they are for your own code.")

    gain = torch.tensor(json.loads(metadata["gain"]), dtype=model.dtype)
    offset = torch.tensor(json.loads(metadata["offset"]), dtype=model.dtype)
    names = names_of(outline)
    trained = TrainedModel(network, gain, offset, outline.input_shape, outline.discrete, prepared.objective, **names)
    return trained, Origin(experiment, outline)


def tensors_in(file: str | Path, what: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors in a file of safetensors.

    Parameters
    ----------
    what : the expected content, for messages.

    Raises
    ------
    CheckpointError : if there is no such file, or it is damaged.
    """
    try:
        with safetensors.safe_open(str(file), "pt") as open_file:
            tensors = {name: open_file.get_tensor(name) for name in open_file.keys()}  # noqa: SIM118 - not a dict
            return open_file.metadata() or {}, tensors
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read as {what}: {error}") from error


def outline_in(text: str) -> DataOutline:
    """Return the outline of a run's data, without samples, from the ``data`` of :attr:`Origin.metadata`."""
    values = json.loads(text)
    for name in ("mean", "std"):
        values[name] = np.array(values[name], dtype=np.float32)
    values["input_shape"] = tuple(values["input_shape"])
    values = dict.fromkeys(NAMES) | values
    return DataOutline(attributes=values, counts={"train": np.zeros(0, np.int64)}, load=_refuse)


def _function_of(network: nn.Module, method: Method) -> dict[str, str]:
    """Return metadata that name the method's function that predicts, if the model is more than a network."""
    predictor = getattr(network, "predictor", None)
    if predictor is None or getattr(predictor.function, "__self__", None) != method:
        return {}
    models = [name for name, extra in predictor.extras.items() if isinstance(extra, Other)]
    return {PREDICTOR: json.dumps({"function": predictor.function.__name__, "models": models})}


def _network(model: FlatModel, tensors: Mapping[str, Tensor]) -> nn.Module | None:
    """Return the network with this state dict; None if it is that of another network."""
    network = model.as_module(model.init(0))
    if network.state_dict().keys() != tensors.keys():
        return None
    try:
        # Not strict: torch adds a count of batches for each batch norm, which raypfl's networks do not keep.
        network.load_state_dict(tensors, strict=False)
    except RuntimeError:
        return None
    return network


def _predictor(
    metadata: Mapping[str, str], experiment: Experiment, model: FlatModel, tensors: Mapping[str, Tensor]
) -> nn.Module | None:
    """Return the method's function with these tensors; None if the method has no such function."""
    description = json.loads(metadata[PREDICTOR])
    function = getattr(experiment.method, description["function"], None)
    rows = {name: per_client(tensor[None]) for name, tensor in tensors.items()}
    if function is None or not rows.keys() >= set(description["models"]):
        return None

    extras = {name: Other(model, row) if name in description["models"] else row for name, row in rows.items()}
    return Predictor(function, **extras).as_module(0, lambda: model.mode(train=False))


def _refuse() -> Any:
    raise CheckpointError("A personal model's file has no data.")
