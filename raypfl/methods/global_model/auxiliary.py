"""Small sets of images that are matched to moves of the global model, on the server or on clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from raypfl.methods.global_model.trajectory import Matched, StudentTrajectory, match
from raypfl.models.flat import FlatModel


class AuxiliaryImages(FedAvg):
    """Base class of methods with auxiliary images: their options, and matching.

    Attributes
    ----------
    window : number of moves of the global model that the images repeat (m). Earlier rounds use no images.
    per_class : number of images of each class.
    outer_steps : number of steps of the images in each matching (H).
    inner_steps : number of gradient steps on the images that repeat the window (R).
    step_size : size of the inner steps before it is learned (beta).
    image_lr, step_lr : learning rates of the images and of the step size.
    every : rounds between two matchings; 0: images are matched once.
    checkpointing : compute inner steps twice instead of storing them: less memory, the same bits.
    pictures : rounds between two pictures of the images, which are also logged in the first and the last round; 0:
        never.
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
        if task.discrete:
            raise ConfigError("Auxiliary images are real numbers, but samples here are tokens; choose another method.")
        return {**super().start(task), "past": []}

    def labels(self, num_classes: int, device: torch.device) -> Tensor:
        """Return the classes of the images, ``int64[n]``."""
        return torch.arange(num_classes, device=device).repeat_interleave(self.per_class)

    def match_images(
        self,
        model: FlatModel,
        labels: Tensor,
        progress: Callable[[range], Iterable[int]],
        images: Tensor,
        step_size: Tensor,
        window_start: Tensor,
        theta: Tensor,
    ) -> Matched:
        """Match the images and step sizes of K sets to the moves from `window_start` to `theta`, ``[K, P]``.

        ``progress(steps)`` iterates over the steps, and may report the progress.
        """
        trajectory = StudentTrajectory(model, labels, self.inner_steps, self.checkpointing)
        steps = progress(range(self.outer_steps))
        return match(trajectory, images, step_size, window_start, theta, self.image_lr, self.step_lr, steps)

    def is_due(self, earlier: Any) -> Any:
        """Return whether images are matched in a round, given the number of earlier rounds with a full window."""
        return (earlier >= 0) & (earlier % self.every == 0) if self.every else earlier == 0

    def remember_model(self, server: ServerState) -> None:
        """Remember the server's new model. A window is full with ``window + 1`` of them, without the initial one."""
        server["past"] = [*server["past"], server["theta"]][-self.window - 1 :]

    def window_start(self, server: ServerState) -> Tensor | None:
        """Return the first model ``[P]`` of the server's window; None: the window is not full."""
        return server["past"][0] if len(server["past"]) > self.window else None

    def log_images(self, cohort: Cohort, images: Tensor) -> None:
        """Log ``images[n, C, H, W]`` as a picture."""
        cohort.log_image("auxiliary", mosaic(images, self.per_class))

    def logs_images(self, cohort: Cohort) -> bool:
        """Return whether images are logged in this round."""
        drawable = len(cohort.task.input_shape) == 3 and cohort.task.input_shape[0] in (1, 3)
        if not self.pictures or not drawable:
            return False
        return (cohort.round - 1) % self.pictures == 0 or cohort.round == cohort.task.rounds


class GroupImages(NamedTuple):
    """The auxiliary images of a group of clients.

    Attributes
    ----------
    images, step_size : ``[K, n, ...]`` and ``[K]``.
    window_start : ``[K, P]``, the first model of each client's window.
    ready : ``bool[K]``, whether the clients' windows are full.
    reply : the images of the client that shows its own, under ``pictures``; empty if none does in this round.
    """

    images: Tensor
    step_size: Tensor
    window_start: Tensor
    ready: Tensor
    reply: dict[str, Sum]


class ClientImages(AuxiliaryImages):
    """Auxiliary images of clients, which stay there; for `pictures`, the first client of a cohort sends its own.

    Attributes
    ----------
    initial : the images at the start: samples of the client for classes that it has and noise for the others (``own``),
        or only ``noise``.
    history : models of a window: those that the client received and keeps (``observed``), or the ``global`` models of
        all rounds, of which it receives one more.
    """

    initial: Literal["own", "noise"] = "own"
    history: Literal["observed", "global"] = "observed"

    def round(self, server: ServerState, cohort: Cohort) -> None:
        shown = min(cohort.ids, default=-1) if self.logs_images(cohort) else -1
        message: dict[str, Any] = {"theta": server["theta"], "shown": shown}
        if self.history == "global":
            window_start = self.window_start(server)
            if window_start is not None:
                message["begun"] = window_start

        reply = cohort.run(self.learn, **message)
        self.step(server, reply["theta"], cohort.task.model)

        if self.history == "global":
            self.remember_model(server)
        if "pictures" in reply:
            self.log_images(cohort, reply["pictures"])

    def learn(self, clients: Clients, theta: Tensor, shown: int, begun: Tensor | None = None) -> dict[str, Mean | Sum]:
        """Train on the clients with the help of :meth:`update_images`, whose reply goes with the method's own.

        `begun` is the first model ``[P]`` of a full global window, and `shown` the client whose images are logged.
        """
        raise NotImplementedError

    def update_images(self, clients: Clients, theta: Tensor, begun: Tensor | None, shown: int) -> GroupImages:
        """Return the clients' images, matched if it is time; the arguments are as in :meth:`learn`."""
        window_start, earlier = self._windows(clients, theta, begun)
        images = unmarked(clients.state.get("images", default=partial(self.initial_images, clients)))
        step_size = unmarked(clients.state.get("step_size", default=theta.new_tensor(self.step_size)))

        due = self.is_due(earlier)
        if bool(due.any()):
            labels = self.labels(clients.num_classes, theta.device)
            match_group = partial(self.match_images, clients.model, labels, iter)
            rows = theta.expand(len(clients), -1)
            arguments = [tensor[due] for tensor in (images, step_size, window_start, rows)]
            matched = Matched(*clients.compute(match_group, *arguments))

            images[due] = unmarked(matched.images)
            step_size[due] = unmarked(matched.step_size)
            missing = theta.new_full((len(clients),), torch.nan)
            numbers = matching_numbers(matched)
            clients.log(**{name: missing.masked_scatter(due, values) for name, values in numbers.items()})

        clients.state["images"] = images
        clients.state["step_size"] = step_size
        return GroupImages(images, step_size, window_start, earlier >= 0, _shown_images(clients, images, shown))

    def initial_images(self, clients: Clients, new: Tensor) -> Tensor:
        """Return the first images ``[len(new), n, ...]`` of the clients at these positions of the group."""
        shape = clients.input_shape
        labels = self.labels(clients.num_classes, torch.device("cpu"))
        generators = clients.generators("auxiliary images")
        # All samples of each client: no client has as many as this.
        samples = clients.batches(2**62, "auxiliary images") if self.initial == "own" else None

        rows = []
        for k in new.tolist():
            row = torch.randn(len(labels), *shape, generator=generators[k], dtype=clients.model.dtype)
            row = row.to(clients.device)
            if samples is not None:
                for c in range(clients.num_classes):
                    in_class = (samples[k].y == c).nonzero()[:, 0]
                    # Drawn even for a class that the client lacks: a class's images do not depend on other classes.
                    draws = torch.rand(self.per_class, generator=generators[k], dtype=torch.float64)
                    if len(in_class):
                        positions = (draws * len(in_class)).long().to(in_class.device)
                        row[labels == c] = samples[k].x[in_class[positions]]
            rows.append(row)
        return torch.stack(rows)

    def _windows(self, clients: Clients, theta: Tensor, begun: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the first model ``[K, P]`` of each client's window, and the number of its earlier full windows.

        The number, ``int64[K]``, is negative while a window is not full.
        """
        rows = theta.expand(len(clients), -1)
        seen = unmarked(clients.state.get("seen", default=torch.tensor(0)))

        if self.history == "global":
            if begun is None:
                clients.state["seen"] = seen
                return rows, seen.new_full(seen.shape, -1)
            clients.state["seen"] = seen + 1
            return begun.expand_as(rows), seen

        past = unmarked(clients.state.get("past", default=theta.new_zeros(self.window, len(theta))))
        clients.state["seen"] = seen + 1
        clients.state["past"] = torch.cat([past[:, 1:], rows[:, None]], dim=1)
        return past[:, 0], seen - self.window - 1


def matching_numbers(matched: Matched) -> dict[str, Tensor]:
    """Return what is logged of K matchings, ``[K]`` by name: failures, and losses and step sizes (NaN if failed)."""
    ok = unmarked(matched.ok)
    numbers = {
        "matching_loss_before": matched.first,
        "matching_loss": matched.last,
        "matching_step_size": matched.step_size,
    }
    rows = {name: torch.where(ok, unmarked(values), torch.nan) for name, values in numbers.items()}
    return rows | {"matching_failed": (~ok).to(matched.first.dtype)}


def _shown_images(clients: Clients, images: Tensor, shown: int) -> dict[str, Sum]:
    """Return a reply to which the client `shown` adds its ``images[K, n, ...]``, all others zeros; -1: no reply."""
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
    """Return a picture ``[1, C, H, W]`` with a column for each class.

    0 is grey, and 2 % of the numbers are beyond black and white.
    """
    images = unmarked(images)
    magnitudes = images.abs().flatten().sort().values
    limit = magnitudes[int(0.98 * (images.numel() - 1))]
    shades = images / (2 * limit).clamp_min(1e-8) + 0.5

    # A white line to the right of each image and below it; the last ones are cut off.
    tiles = F.pad(shades, (0, 1, 0, 1), value=1.0).unflatten(0, (-1, per_class))
    classes, _, channels, height, width = tiles.shape
    grid = tiles.permute(2, 1, 3, 0, 4).reshape(1, channels, per_class * height, classes * width)
    return grid[..., :-1, :-1]
