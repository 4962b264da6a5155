"""Slices that move through the network, so that all of its weights are trained although no client has all of them."""

from __future__ import annotations

from raypfl.federation.method import METHODS
from raypfl.methods.sub_networks.heterofl import HeteroFL


@METHODS.register("fedrolex")
class FedRolex(HeteroFL):
    """FedRolex (Alam et al. 2022): HeteroFL, but a slice begins one unit further in each round.

    In round j, from 0, a client of rate r has the units ``(j + i) mod width`` for ``i < ceil(r width)`` of each hidden
    layer. Its personal model is its slice of the last round. Round 0 is HeteroFL's. The authors' code moves slices
    backwards, which is the same with other numbers for the units. It also weighs biases and the output layer by how
    often they were changed, so that the order of clients matters, and it has HeteroFL's masked cross-entropy.
    """

    def shift(self, rounds: int) -> int:
        return rounds
