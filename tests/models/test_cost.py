"""How many multiplications a forward pass takes."""

from __future__ import annotations

import torch
from torch import nn

from raypfl.models.cost import measured_cost
from raypfl.models.lora import with_lora


def multiplications(network: nn.Module, x: torch.Tensor) -> int:
    with measured_cost(network, len(x)) as cost:
        network(x)
    return cost.multiplications


def test_convolutions_multiply_each_number_of_their_output_and_transposed_ones_of_their_input():
    x = torch.zeros(3, 4, 8, 8)
    assert multiplications(nn.Conv2d(4, 6, 3, stride=2, groups=2), x) == 6 * 3 * 3 * (2 * 9)
    assert multiplications(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), x) == 4 * 8 * 8 * (3 * 9)


def test_layers_with_an_adapter_multiply_by_themselves_too():
    network = with_lora(lambda: nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)), rank=2)
    assert multiplications(network, torch.zeros(7, 20)) == 20 * 30 + 30 * 5 + 2 * (20 + 30)
