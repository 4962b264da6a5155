"""A personal model in a file of its own: safetensors, with an outline of the module whose tensors they are."""

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
from raypfl.common.files import write
from raypfl.common.messages import per_client
from raypfl.engine.outline import DataOutline
from raypfl.engine.prepared import Prepared
from raypfl.experiment import Experiment
from raypfl.federation.method import Method
from raypfl.methods import METHODS
from raypfl.models.extras import Other
from raypfl.models.flat import FlatModel
from raypfl.models.predictor import Predictor
from raypfl.models.trained_model import TrainedModel

FORMAT = "raypfl personal model 1"
PREDICTOR = "predictor"
_KNOWN = ("input_shape", "num_classes", "kind", "discrete", "scale", "mean", "std")


def inputs_of(outline: DataOutline) -> str:
    """Shape and values of a run's inputs: ``"[n, 3, 32, 32] with values from 0 to 255"``."""
    shape = ", ".join(map(str, ("n", *outline.input_shape)))
    images = f" with values from 0 to {outline.scale:g}" if outline.scale > 1 else ""
    return f"[{shape}]" + (" of integer tokens" if outline.discrete else images)


@dataclass(frozen=True)
class Origin:
    """The run that a model is from: its description, and the outline of its data."""

    experiment: Experiment
    outline: DataOutline

    @cached_property
    def metadata(self) -> dict[str, str]:
        """What a model's file says about the run."""
        known = {name: getattr(self.outline, name) for name in _KNOWN}
        return {
            "inputs": inputs_of(self.outline),
            "experiment": self.experiment.override(["model.weights=null"]).to_yaml(),  # the state dict has them
            "data": json.dumps(known, default=lambda array: np.asarray(array).tolist()),
        }


def save(model: TrainedModel, origin: Origin, file: str | Path, facts: Mapping[str, Any]) -> Path:
    """Write the model's file; :func:`encoded` says what is in it."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, encoded(model, origin, facts))
    return path


def encoded(model: TrainedModel, origin: Origin, facts: Mapping[str, Any]) -> bytes:
    """The network's state dict as safetensors. The metadata have, as text or JSON:

    ``outline``, the network as torch prints it; ``gain`` and ``offset``, by which inputs become the network's:
    ``network(x * gain + offset)``; ``inputs``, their shape and values; `facts`; and the run's ``experiment`` and
    ``data``, from which raypfl builds the network again. Of a model that is more than a network, the tensors are those
    that its method's function predicts with, and ``predictor`` names the function.
    """
    about = {
        "format": FORMAT,
        "outline": repr(model.network),
        "gain": json.dumps(model.gain.tolist()),
        "offset": json.dumps(model.offset.tolist()),
        "facts": json.dumps(dict(facts)),
    } | _function_of(model.network, origin.experiment.method)
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.network.state_dict().items()}
    return safetensors.torch.save(tensors, about | origin.metadata)


def load_model(file: str | Path) -> TrainedModel:
    """The personal model in a file, in evaluation mode: it takes inputs as the run's data set has them.

    It needs neither the run nor its data. Without raypfl: ``safetensors.torch.load_file`` gives the state dict of the
    module that the metadata outline (:func:`encoded`).

    Raises
    ------
    CheckpointError : if there is no such file, it is damaged, or it is not one of these.
    """
    about, tensors = tensors_in(file, "a personal model")
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} is not a personal model: its metadata do not say {FORMAT!r}. `raypfl personalize` writes them."
        )
    experiment = Experiment.from_record(about["experiment"])
    outline = outline_in(about["data"])
    model = Prepared(experiment, outline).model
    network = _network(model, tensors) if PREDICTOR not in about else _predictor(about, experiment, model, tensors)
    if network is None:
        name = METHODS.name_of(type(experiment.method))
        raise CheckpointError(f"The tensors in {file} are not those of a model of {name}; they are for your own code.")
    gain, offset = (torch.tensor(json.loads(about[name]), dtype=model.dtype) for name in ("gain", "offset"))
    return TrainedModel(network, gain, offset, outline.discrete)


def tensors_in(file: str | Path, what: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors in a file of safetensors.

    `what` : should be in it, for messages.

    Raises
    ------
    CheckpointError : if there is no such file, or it is damaged.
    """
    try:
        with safetensors.safe_open(str(file), "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
            return opened.metadata() or {}, tensors
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read as {what}: {error}") from error


def outline_in(text: str) -> DataOutline:
    """The outline of a run's data from what :class:`Origin` says of them, without samples."""
    known = json.loads(text)
    known |= {name: np.array(known[name], dtype=np.float32) for name in ("mean", "std")}
    known["input_shape"] = tuple(known["input_shape"])
    return DataOutline(known=known, counts={"train": np.zeros(0, np.int64)}, load=_refuse)


def _function_of(network: nn.Module, method: Method) -> dict[str, str]:
    """The function of the method that predicts, if the model is more than a network and has such a function."""
    predictor = getattr(network, "predictor", None)
    if predictor is None or getattr(predictor.function, "__self__", None) != method:
        return {}
    models = [name for name, extra in predictor.extras.items() if isinstance(extra, Other)]
    return {PREDICTOR: json.dumps({"function": predictor.function.__name__, "models": models})}


def _network(model: FlatModel, tensors: Mapping[str, Tensor]) -> nn.Module | None:
    """The network with this state dict; None: it is that of another."""
    network = model.as_module(model.init(0))
    try:
        network.load_state_dict(tensors)
    except RuntimeError:
        return None
    return network


def _predictor(
    about: Mapping[str, str], experiment: Experiment, model: FlatModel, tensors: Mapping[str, Tensor]
) -> nn.Module | None:
    """The function of the method with these tensors; None: the method has no such function."""
    told = json.loads(about[PREDICTOR])
    function = getattr(experiment.method, told["function"], None)
    rows = {name: per_client(tensor[None]) for name, tensor in tensors.items()}
    if function is None or not rows.keys() >= set(told["models"]):
        return None
    extras = {name: Other(model, row) if name in told["models"] else row for name, row in rows.items()}
    return Predictor(function, **extras).as_module(0, lambda: model.mode(train=False))


def _refuse() -> Any:
    raise CheckpointError("A personal model's file has no data.")
