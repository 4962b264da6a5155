"""Words for the parts of any network: which of its segments are the output layer, the batch norm."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def roles(module: nn.Module, segments: Iterable[str]) -> dict[str, list[str]]:
    """The segments that each word selects; none where a network lacks such a part.

    - ``input layer``, ``output layer``: the first and the last layer, in the order in which the network registers them,
      with parameters that learn.
    - ``feature extractor``: all but the output layer.
    - ``batch norm``: scales, shifts and statistics of all batch-norm layers.
    - ``adapters``: modules called ``adapter...``.

    Parameters
    ----------
    segments : names of everything that is in the network's vectors.
    """
    names = list(segments)
    layers = [path for path, child in module.named_modules() if _learns(child)]
    norms = [path for path, child in module.named_modules() if isinstance(child, nn.modules.batchnorm._BatchNorm)]
    adapters = [path for path, _ in module.named_modules() if path.rpartition(".")[2].startswith("adapter")]
    output = _below(layers[-1:], names)
    return {
        "input layer": _below(layers[:1], names),
        "output layer": output,
        "feature extractor": [name for name in names if name not in output],
        "batch norm": _below(norms, names),
        "adapters": _below(adapters, names),
    }


def _learns(layer: nn.Module) -> bool:
    return any(p.requires_grad for p in layer.parameters(recurse=False))


def _below(paths: list[str], names: list[str]) -> list[str]:
    return [name for name in names if any(not path or name.startswith(path + ".") for path in paths)]
