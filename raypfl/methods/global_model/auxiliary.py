"""Small sets of images that are matched to the moves of the global model, on the server or on clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.errors import ConfigError
from raypfl.common.limits import COUNT, FROM_ZERO, POSITIVE
from raypfl.common.messages import Mean, Sum, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import ServerState
from raypfl.federation.task import Task
from raypfl.learning.objectives import Classification, Objective
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.global_model.trajectory import Matched, Path, Step, match
from raypfl.models.flat import FlatModel


class Auxiliary(FedAvg):
    """What methods with auxiliary images share: their options, and matching.

    Attributes
    ----------
    window : how many moves of the global model the images repeat (m). No images are used in rounds before.
    per_class : images of each class.
    outer_steps : steps of the images in each matching (H).
    inner_steps : gradient steps on the images that repeat the window (R).
    step_size : of the inner steps, before it is learned (beta).
    image_lr, step_lr : learning rates of the images and of the step size.
    every : every how many rounds images are matched; 0: once.
    checkpointing : whether inner steps are computed twice, in place of being stored: less memory, the same bits.
    pictures : every how many rounds images are logged, from the first one, and in the last; 0: never.
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)

    window: Annotated[int, COUNT] = 3
    per_class: Annotated[int, COUNT] = 10
    outer_steps: Annotated[int, COUNT] = 20
    inner_steps: Annotated[int, COUNT] = 10
    step_size: Annotated[float, POSITIVE] = 0.01
    image_lr: Annotated[float, FROM_ZERO] = 1000.0
    step_lr: Annotated[float, FROM_ZERO] = 1e-5
    every: Annotated[int, FROM_ZERO] = 1
    checkpointing: bool = False
    pictures: Annotated[int, FROM_ZERO] = 0

    def check(self, model: FlatModel) -> None:
        if model.num_buffers:
            raise ConfigError(
                "Auxiliary images are matched to gradient steps, but the statistics of batch norm move without a "
                "gradient. Choose a network without them, such as convnet, or model.norm=group."
            )

    def start(self, task: Task) -> ServerState:
        return {**super().start(task), "past": []}

    def labels(self, classes: int, device: torch.device) -> Tensor:
        """``int64[n]``, of the images."""
        return torch.arange(classes, device=device).repeat_interleave(self.per_class)

    def matched(
        self,
        model: FlatModel,
        labels: Tensor,
        shown: Callable[[Sequence[Step]], Any],
        images: Tensor,
        step_size: Tensor,
        begun: Tensor,
        theta: Tensor,
    ) -> Matched:
        """The images and step sizes of K sets, matched to the ways from `begun` to `theta`, ``[K, P]``.

        ``shown(steps)`` gives the steps one by one.
        """
        path = Path(model, labels, self.inner_steps, self.checkpointing)
        steps = shown([Step(self.image_lr, self.step_lr)] * self.outer_steps)
        return match(path, images, step_size, begun, theta, steps)

    def is_due(self, turn: Any) -> Any:
        """Whether images are matched in a round, of which `turn` counts those before with a full window."""
        return (turn >= 0) & (turn % self.every == 0) if self.every else turn == 0

    def moved_on(self, server: ServerState) -> None:
        """Remember the server's new model. A window is full with ``window + 1`` of them, without the initial one."""
        server["past"] = [*server["past"], server["theta"]][-self.window - 1 :]

    def begun(self, server: ServerState) -> Tensor | None:
        """Where the window of the server's models begins; None: it is not full."""
        return server["past"][0] if len(server["past"]) > self.window else None

    def log_images(self, cohort: Cohort, images: Tensor) -> None:
        """Log ``images[n, C, H, W]`` as a picture."""
        cohort.log_image("auxiliary", mosaic(images, self.per_class))

    def shows(self, cohort: Cohort) -> bool:
        """Whether images are logged in this round."""
        drawable = len(cohort.task.input_shape) == 3 and cohort.task.input_shape[0] in (1, 3)
        if not self.pictures or not drawable:
            return False
        return (cohort.round - 1) % self.pictures == 0 or cohort.round == cohort.task.rounds


class Sets(NamedTuple):
    """The auxiliary images of a group.

    Attributes
    ----------
    images, step_size : ``[K, n, ...]`` and ``[K]``.
    begun : ``[K, P]``, where the clients' windows begin.
    ready : ``bool[K]``, whether their windows are full.
    reply : the images of the client that shows its own, under ``pictures``; empty if none does in this round.
    """

    images: Tensor
    step_size: Tensor
    begun: Tensor
    ready: Tensor
    reply: dict[str, Sum]


class OwnImages(Auxiliary):
    """Auxiliary images of clients, which stay there; for `pictures`, the first client of a cohort sends its own.

    Attributes
    ----------
    initial : the first images: samples of the client (``own``) of the classes that it has, and noise of the others; or
        ``noise``.
    history : a window is of the models that a client ``observed``, which it keeps; or of the ``global`` ones of all
        rounds, of which it is sent one more.
    """

    initial: Literal["own", "noise"] = "own"
    history: Literal["observed", "global"] = "observed"

    def round(self, server: ServerState, cohort: Cohort) -> None:
        shown = min(cohort.ids, default=-1) if self.shows(cohort) else -1
        sent: dict[str, Any] = {"theta": server["theta"], "shown": shown}
        if self.history == "global" and (begun := self.begun(server)) is not None:
            sent["begun"] = begun
        reply = cohort.run(self.learn, **sent)
        self.step(server, reply["theta"], cohort.task.model)
        if self.history == "global":
            self.moved_on(server)
        if "pictures" in reply:
            self.log_images(cohort, reply["pictures"])

    def learn(self, clients: Clients, theta: Tensor, shown: int, begun: Tensor | None = None) -> dict[str, Mean | Sum]:
        """The client function: local training with the help of :meth:`sets`, whose reply goes with its own."""
        raise NotImplementedError

    def sets(self, clients: Clients, theta: Tensor, begun: Tensor | None, shown: int) -> Sets:
        """The clients' images, matched if it is time; `shown` is the client whose images are logged."""
        start, turn = self._windows(clients, theta, begun)
        images = unmarked(clients.state.get("images", default=partial(self.first_images, clients)))
        step_size = unmarked(clients.state.get("step_size", default=theta.new_tensor(self.step_size)))
        due = self.is_due(turn)
        if bool(due.any()):
            work = partial(self.matched, clients.model, self.labels(clients.num_classes, theta.device), iter)
            rows = theta.expand(len(clients), -1)
            found = Matched(*clients.compute(work, *(part[due] for part in (images, step_size, start, rows))))
            images[due], step_size[due] = unmarked(found.images), unmarked(found.step_size)
            nothing = theta.new_full((len(clients),), torch.nan)
            clients.log(**{name: nothing.masked_scatter(due, values) for name, values in traced(found).items()})
        clients.state["images"], clients.state["step_size"] = images, step_size
        return Sets(images, step_size, start, turn >= 0, _shown(clients, images, shown))

    def first_images(self, clients: Clients, new: Tensor) -> Tensor:
        """The images ``[len(new), n, ...]`` that clients at these positions of the group begin with."""
        shape, labels = clients.input_shape, self.labels(clients.num_classes, torch.device("cpu"))
        batches = clients.batches(2**62, "auxiliary images") if self.initial == "own" else []
        generators, rows = clients.generators("auxiliary images"), []
        for k in new.tolist():
            row = torch.randn(len(labels), *shape, generator=generators[k], dtype=clients.model.dtype)
            row = row.to(clients.device)
            for c in range(clients.num_classes if batches else 0):
                held = (batches[k].y == c).nonzero()[:, 0]
                drawn = torch.rand(self.per_class, generator=generators[k], dtype=torch.float64)
                if len(held):
                    row[labels == c] = batches[k].x[held[(drawn * len(held)).long().to(held.device)]]
            rows.append(row)
        return torch.stack(rows)

    def _windows(self, clients: Clients, theta: Tensor, begun: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where each client's window begins, ``[K, P]``, and how many full ones it had before, ``int64[K]``.

        The number is negative while a window is not full.
        """
        seen, rows = unmarked(clients.state.get("seen", default=torch.tensor(0))), theta.expand(len(clients), -1)
        if self.history == "global":
            clients.state["seen"] = seen if begun is None else seen + 1
            return (rows, seen.new_full(seen.shape, -1)) if begun is None else (begun.expand_as(rows), seen)
        past = unmarked(clients.state.get("past", default=theta.new_zeros(self.window, len(theta))))
        clients.state["seen"] = seen + 1
        clients.state["past"] = torch.cat([past[:, 1:], rows[:, None]], dim=1)
        return past[:, 0], seen - self.window - 1


def traced(found: Matched) -> dict[str, Tensor]:
    """What is logged of K matchings, ``[K]`` by name: whether they failed and, NaN if so, the losses and step size."""
    ok = unmarked(found.ok)
    numbers = {
        "matching_loss_before": found.first,
        "matching_loss": found.last,
        "matching_step_size": found.step_size,
    }
    rows = {name: torch.where(ok, unmarked(values), torch.nan) for name, values in numbers.items()}
    return rows | {"matching_failed": (~ok).to(found.first.dtype)}


def _shown(clients: Clients, images: Tensor, shown: int) -> dict[str, Sum]:
    """The client `shown` contributes its own of ``images[K, n, ...]``, all others zeros; -1: nothing is sent."""
    if shown < 0:
        return {}
    rows = torch.zeros_like(images)
    numbers = torch.zeros(len(clients), dtype=torch.int64)
    if shown in clients.ids:
        k = clients.ids.index(shown)
        rows[k] = images[k]
        numbers[k] = images[k].numel()
    return {"pictures": Sum(per_client(rows), charged=numbers)}


def mosaic(images: Tensor, per_class: int) -> Tensor:
    """``[1, C, H, W]``: a column for each class; grey is 0, and 2 % of the numbers are beyond black and white."""
    images = unmarked(images)
    shades = images / (2 * images.abs().flatten().sort().values[int(0.98 * (images.numel() - 1))]).clamp_min(1e-8) + 0.5
    tiles = F.pad(shades, (0, 1, 0, 1), value=1.0).unflatten(0, (-1, per_class))
    classes, _, channels, height, width = tiles.shape
    return tiles.permute(2, 1, 3, 0, 4).reshape(1, channels, per_class * height, classes * width)[..., :-1, :-1]
