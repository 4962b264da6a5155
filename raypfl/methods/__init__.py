"""Federated methods, one a file."""

from raypfl.methods.base import METHODS, Method, Server, Task
from raypfl.methods.ditto import Ditto
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.fedprox import FedProx
from raypfl.methods.local import Local

__all__ = ["METHODS", "Ditto", "FedAvg", "FedProx", "Local", "Method", "Server", "Task"]
