"""``python -m benchmarks.peers.contender SYSTEM ORDER``: run an order, in the system's own environment."""

from __future__ import annotations

import importlib
import sys

import torch

from benchmarks.peers.order import Order

if __name__ == "__main__":
    torch.set_num_threads(1)
    importlib.import_module(f"benchmarks.peers.systems.{sys.argv[1]}").run(Order.read(sys.argv[2]))
