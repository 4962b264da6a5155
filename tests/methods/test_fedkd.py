"""FedKD follows its paper, and equals simpler methods in limiting cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from raypfl.methods import FedAvg, FedKD, Local
from raypfl.methods.personal_models.fedkd import compressed
from tests.support.by_hand import MLP, assert_parts_close, descend, leaves
from tests.support.federation import (
    FP64,
    Federation,
    NormalisedConv,
    assert_close,
    both_executors,
    client_states,
    run_method,
    sent_per_client,
)


@both_executors
def test_fedkd_without_distillation_and_compression_is_fedavg_and_training_alone(executor):
    options = {"factory": NormalisedConv, "executor": executor, "training": replace(FP64, epochs=2)}
    methods = (FedAvg(weighting="uniform"), Local(), FedKD(lam=0.0, energy_start=1.0, energy_end=1.0))
    fedavg, alone, kd = (run_method(method, **options) for method in methods)
    shared = kd.method.shared_part(kd.model)
    # Not to the bit: the network has a further matrix, and the server adds the mean move to the student.
    assert_close(kd.server["theta"][shared], fedavg.server["theta"], 1e-12)
    assert_close(client_states(kd, "teacher")[:, shared], client_states(alone), 1e-12)
    assert set(sent_per_client(kd.ledger, 0).values()) == {fedavg.model.size}


def truncated(tensor, energy):
    """The sum of the fewest rank-one terms that hold more than a share of the squares, and the numbers they take."""
    if tensor.dim() == 1:
        return tensor, tensor.numel()
    u, s, v = torch.linalg.svd(tensor)
    total = float((s**2).sum())
    result = torch.zeros_like(tensor)
    for rank, value in enumerate(s, start=1):
        result = result + value * torch.outer(u[:, rank - 1], v[rank - 1])
        if float((s[:rank] ** 2).sum()) > energy * total:
            break
    size = rank * (sum(tensor.shape) + 1)
    return (result, size) if size < tensor.numel() else (tensor, tensor.numel())


@both_executors
def test_rounds_of_fedkd_by_hand(executor):
    lam = 0.6
    cohorts = ([0, 1, 2, 3], [1, 2], [0, 2], [0, 1])
    method = FedKD(lam=lam, energy_start=0.3, energy_end=1.0)
    fed = Federation(method=method, executor=executor, training=FP64, group_size=2)
    # The last four of ten rounds.
    fed.round = first = 7
    fed.run_rounds(*cohorts)
    start = fed.model.unflatten(fed.model.init(fed.seed))
    student = [start[name] for name in MLP]
    teachers = [[*student, torch.eye(5, dtype=torch.float64)]] * 4
    uploads = []
    downloads = []

    def outputs(tensors, x):
        z = (x.flatten(1) @ tensors[0].T + tensors[1]).tanh()
        return z, z @ tensors[2].T + tensors[3]

    def divergence(a, b):
        return (a.softmax(1) * (a.log_softmax(1) - b.log_softmax(1))).sum(1).mean()

    for round, ids in enumerate(cohorts, start=first):
        energy = 0.3 + 0.7 * round / 10
        moves = []
        sizes = []
        for client in ids:
            t = leaves(teachers[client])
            s = leaves(student)
            for x, y in fed.visits(client, round):
                z_t, out_t = outputs(t, x)
                z_s, out_s = outputs(s, x)
                ce_t = F.cross_entropy(out_t, y)
                ce_s = F.cross_entropy(out_s, y)
                # Each network's loss, with the other one fixed.
                apart = ((z_t - z_s.detach() @ t[4].T) ** 2).mean()
                loss_t = ce_t + lam * (divergence(out_s.detach(), out_t) + apart) / (ce_t + ce_s.detach())
                apart = ((z_t.detach() - z_s @ t[4].detach().T) ** 2).mean()
                loss_s = ce_s + lam * (divergence(out_t.detach(), out_s) + apart) / (ce_t.detach() + ce_s)
                descend(loss_t + loss_s, [*t, *s])
            teachers[client] = [p.detach() for p in t]
            pairs = [truncated(a.detach() - b, energy) for a, b in zip(s, student, strict=True)]
            moves.append([move for move, _ in pairs])
            sizes.append(sum(size for _, size in pairs))
        pairs = [truncated(sum(tensors) / len(ids), energy) for tensors in zip(*moves, strict=True)]
        student = [p + move for p, (move, _) in zip(student, pairs, strict=True)]
        uploads.append(sum(sizes) / len(sizes))
        downloads.append(sum(size for _, size in pairs))

    assert_parts_close(fed, fed.server["theta"], dict(zip(MLP, student, strict=True)))
    for client, row in enumerate(client_states(fed, "teacher")):
        assert_parts_close(fed, row, dict(zip([*MLP, "3.match"], teachers[client], strict=True)))
    assert not fed.warnings

    # 183 numbers are the student itself, and its whole move. Client 0 missed the second round, client 1 the third.
    for round, upload in enumerate(uploads, start=first):
        assert sent_per_client(fed.ledger, round)["up", "move"] == pytest.approx(upload)
    assert max(uploads[:3]) < 183 > max(downloads[:3]) and uploads[3] == downloads[3] == 183
    down = [sent_per_client(fed.ledger, round)["down", "student"] for round in range(first, 11)]
    missed = min(183, downloads[0] + downloads[1])
    assert down == [183, downloads[0], (missed + downloads[1]) / 2, (downloads[2] + min(183, sum(downloads[1:3]))) / 2]


def test_what_compression_leaves_out_is_less_than_its_share():
    fed = run_method(FedKD(), factory=NormalisedConv, training=FP64)
    moves = torch.randn(3, fed.model.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for energy in (0.3, 0.7, 0.99):
        left, numbers = compressed(fed.model, moves, energy)
        for name in fed.model.segments:
            whole = fed.model.segment(moves, name).flatten(1)
            apart = whole - fed.model.segment(left, name).flatten(1)
            assert (apart.square().sum(1) <= (1 - energy) * whole.square().sum(1) + 1e-12).all()
        assert (numbers <= int(fed.method.shared_part(fed.model).sum())).all()
