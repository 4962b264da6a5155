"""All that a run's models are made of, in one safetensors file that needs neither the run's folder nor its data.

Its tensors ::

    server/NAME                                the server's state
    state/NAME/clients, state/NAME/rows        what clients kept by that name: int64[n], ascending, and [n, ...]
    data/mean, data/std, data/unseen, data/train, data/test
                                               normalisation, clients never trained, sizes of the clients' splits

and, as JSON in its metadata under ``raypfl``, the experiment and the rest. Rows are written where they belong, one
file of the checkpoint after the other, and read one client at a time: there may be more of them than memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from raypfl.common.errors import CheckpointError
from raypfl.config import Experiment
from raypfl.data import load_federated
from raypfl.server.outline import DataOutline
from raypfl.storage.checkpoint import Snapshot
from raypfl.storage.states import StateShard
from raypfl.storage.tree import decoded, encoded

FORMAT = 1
_KINDS = {
    "float64": "F64", "int64": "I64", "uint64": "U64", "float32": "F32", "int32": "I32", "uint32": "U32",
    "float16": "F16", "bfloat16": "BF16", "int16": "I16", "uint16": "U16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Names of types in the file. Wide ones come first, so that every tensor begins where its type wants it to."""


def write(path: str | Path, experiment: Experiment, snapshot: Snapshot, outline: DataOutline) -> None:
    """Write a run's models to a local file.

    Parameters
    ----------
    snapshot : the run's newest checkpoint; its states are read twice, one file at a time.
    outline : of the run's data.

    Raises
    ------
    CheckpointError : if clients kept things of one name that differ in shape or type, which make no rows.
    """
    tensors: dict[str, torch.Tensor] = {}
    about = {
        "format": FORMAT,
        "experiment": experiment.to_yaml(),
        "round": snapshot.round,
        "server": encoded(snapshot.server, tensors),
        "input_shape": outline.input_shape,
        "num_classes": outline.num_classes,
        "kind": outline.kind,
        "discrete": outline.discrete,
        "scale": outline.scale,
    }
    tensors = {f"server/{name}": tensor for name, tensor in tensors.items()}
    tensors |= {f"data/{name}": torch.from_numpy(np.array(values)) for name, values in _metadata(outline).items()}
    rows = _rows(snapshot.states)
    tensors |= {f"state/{name}/clients": torch.from_numpy(mine.clients) for name, mine in rows.items()}
    layout = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape), t.nbytes) for name, t in tensors.items()}
    layout |= {
        f"state/{name}/rows": (mine.kind, (len(mine.clients), *mine.shape), mine.nbytes) for name, mine in rows.items()
    }
    places = _laid_out(path, layout, {"raypfl": json.dumps(about)})
    for name, tensor in tensors.items():
        if tensor.numel():
            places[name][:] = tensor.reshape(-1).view(torch.uint8).numpy()
    for number, shard in enumerate(snapshot.states):
        for name, values in shard.tensors.items():
            mine = rows[name]
            here = np.flatnonzero([mine.shard_of.get(client) == number for client in shard.clients.tolist()])
            place = places[f"state/{name}/rows"].view(values.dtype).reshape(len(mine.clients), *mine.shape)
            place[np.searchsorted(mine.clients, shard.clients[here])] = values[here]


class ModelsFile:
    """A file that :func:`write` made.

    Attributes
    ----------
    experiment, round, server, outline : of the run; `outline` opens its data if somebody asks for samples.

    Raises
    ------
    CheckpointError : if it is no such file, or one of a newer version.
    """

    def __init__(self, path: str | Path):
        try:
            self._file: Any = safetensors.safe_open(path, framework="pt")
            about = json.loads((self._file.metadata() or {})["raypfl"])
        except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path} is no file of a run's models, or is damaged: {error}.") from None
        if about["format"] > FORMAT:
            raise CheckpointError(f"{path} was written by a newer version of raypfl, which is needed to read it.")
        self._names = sorted(self._file.keys())
        self.experiment = Experiment.from_yaml(about["experiment"])
        self.round: int = about["round"]
        self.server = decoded(about["server"], self._all("server/"))
        metadata = {name: tensor.numpy() for name, tensor in self._all("data/").items()}
        self.outline = DataOutline(
            input_shape=tuple(about["input_shape"]),
            num_classes=about["num_classes"],
            kind=about.get("kind", "classes"),
            discrete=about.get("discrete", False),
            scale=about["scale"],
            mean=metadata["mean"],
            std=metadata["std"],
            unseen=metadata["unseen"],
            sizes={split: metadata[split] for split in ("train", "test")},
            data=partial(load_federated, self.experiment.data, self.experiment.partition, seed=self.experiment.seed),
        )

    def state_of(self, client: int) -> dict[str, np.ndarray]:
        """What a client kept, by name; read from the file alone are its own rows."""
        state = {}
        for name, clients in self._clients.items():
            row = int(np.searchsorted(clients, client))
            if row < len(clients) and clients[row] == client:
                state[name] = self._file.get_slice(f"state/{name}/rows")[row : row + 1][0].numpy()
        return state

    @cached_property
    def _clients(self) -> dict[str, np.ndarray]:
        held = [name for name in self._names if name.startswith("state/") and name.endswith("/clients")]
        return {name[len("state/") : -len("/clients")]: self._file.get_tensor(name).numpy() for name in held}

    def _all(self, prefix: str) -> dict[str, torch.Tensor]:
        names = [name for name in self._names if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._file.get_tensor(name) for name in names}


@dataclass
class _Rows:
    """What clients kept by one name.

    Attributes
    ----------
    kind, shape : of one client's. shard_of : client -> number of the shard that has it.
    """

    kind: str
    shape: tuple[int, ...]
    width: int
    shard_of: dict[int, int]

    @cached_property
    def clients(self) -> np.ndarray:
        """``int64[n]``, ascending."""
        return np.array(sorted(self.shard_of), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return self.width * len(self.shard_of)


def _rows(shards: Iterable[StateShard]) -> dict[str, _Rows]:
    """By name; which shards count of a client in several, their numbers say."""
    rows: dict[str, _Rows] = {}
    seen = []
    for i, shard in enumerate(shards):
        for name, values in shard.tensors.items():
            one = values[0]
            mine = rows.setdefault(name, _Rows(str(one.dtype), one.shape, one.nbytes, {}))
            if (mine.kind, mine.shape) != (str(one.dtype), one.shape):
                raise CheckpointError(
                    f"What clients keep as {name!r} is {mine.kind}{list(mine.shape)} for some and "
                    f"{one.dtype}{list(one.shape)} for others, so it cannot be put into one file."
                )
        seen.append((shard.number, i, shard.whole, shard.clients.tolist(), list(shard.tensors)))
    for _, i, whole, clients, names in sorted(seen):
        for mine in rows.values() if whole else ():
            for client in clients:
                mine.shard_of.pop(client, None)
        for name in names:
            rows[name].shard_of |= dict.fromkeys(clients, i)
    return rows


def _metadata(outline: DataOutline) -> dict[str, np.ndarray]:
    splits = {split: outline.sizes(split) for split in ("train", "test")}
    return {"mean": outline.mean, "std": outline.std, "unseen": outline.unseen, **splits}


def _laid_out(
    path: str | Path, layout: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: dict[str, str]
) -> dict[str, np.ndarray]:
    """Make a safetensors file with room for tensors of these kinds, shapes and bytes; returns each one's bytes there.

    The library writes a file from memory only, which is too small for the rows of all clients.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in sorted(layout, key=lambda name: list(_KINDS).index(layout[name][0])):
        kind, shape, size = layout[name]
        header[name] = {"dtype": _KINDS[kind], "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        file.truncate(begin + end)
        if end and hasattr(os, "posix_fallocate"):  # on a full disk, writing to a hole would end the process
            os.posix_fallocate(file.fileno(), 0, begin + end)
    whole = np.memmap(path, np.uint8, "r+") if end else np.zeros(begin, np.uint8)
    return {
        name: whole[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]]
        for name, entry in header.items()
        if name != "__metadata__"
    }
