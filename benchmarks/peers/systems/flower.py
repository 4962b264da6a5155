"""Flower's simulation engine, through its message API and its own FedAvg; a core an actor, two actors.

What is loaded once, network and samples, stays in the actors: Flower's documentation leaves that to the user.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from benchmarks.peers.order import Order, Shards, Stamps, fit, network

ENDLESS = 1_000_000


def run(order: Order) -> None:
    stamps = Stamps(order.report)
    server = ServerApp()

    def finished(server_round: int, arrays: ArrayRecord) -> None:
        if server_round:
            stamps.add()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        net = network(order, Shards(order.files))
        # Half the share, and the cohort as the minimum: the share is of the nodes that are up when a round begins.
        strategy = FedAvg(
            fraction_train=order.cohort / order.clients / 2,
            fraction_evaluate=0.0,
            min_train_nodes=order.cohort,
            min_available_nodes=order.clients,
        )
        strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=ENDLESS, evaluate_fn=finished)

    run_simulation(
        server,
        client_app(json.dumps(asdict(order))),
        num_supernodes=order.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": order.options["actors"]},
        },
    )


def client_app(text: str) -> ClientApp:
    """The clients' side; `text` is the order, so that actors can tell whether they have seen it."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        order, shards, net = loaded(text)
        x, y = shards.client(int(context.node_config["partition-id"]))
        received = message.content["arrays"].to_torch_state_dict()
        if order.method == "ditto":
            personal = context.state.get("personal")
            net.load_state_dict(first(text) if personal is None else personal.to_torch_state_dict())
            fit(net, x, y, order, [received[name] for name, _ in net.named_parameters()])
            context.state["personal"] = ArrayRecord(net.state_dict())
        net.load_state_dict(received)
        fit(net, x, y, order)
        metrics = MetricRecord({"num-examples": len(y)})
        reply = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(content=reply, reply_to=message)

    return app


@functools.cache
def loaded(text: str) -> tuple[Order, Shards, nn.Module]:
    """Once an actor: the order, the samples, the network."""
    torch.set_num_threads(1)
    order = Order(**json.loads(text))
    shards = Shards(order.files)
    return order, shards, network(order, shards)


@functools.cache
def first(text: str) -> dict[str, torch.Tensor]:
    """The initial model, where personal models begin."""
    order, shards, _ = loaded(text)
    return network(order, shards).state_dict()
