"""What a method asks of a client in one round: gradient steps, and bytes in both directions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Training:
    """One local training of a turn.

    Attributes
    ----------
    batch_size, epochs, steps : its length; `epochs` has no meaning if `steps` is not None.
    smallest : the smallest last batch of an epoch; one of fewer samples is left out, unless it is the only one.
    models : the number of gradient steps on each mini-batch.
    """

    batch_size: int
    epochs: int = 1
    steps: int | None = None
    smallest: int = 1
    models: int = 1

    def samples(self, sizes: np.ndarray) -> np.ndarray:
        """Return the samples that clients with ``int64[n]`` samples visit, each as often as a step sees it."""
        rest = sizes % self.batch_size
        is_left_out = (rest > 0) & (rest < self.smallest) & (sizes > self.batch_size)
        per_epoch = np.where(is_left_out, sizes - rest, sizes)
        if self.steps is None:
            return self.models * self.epochs * per_epoch

        batches_per_epoch = np.maximum(-(-per_epoch // self.batch_size), 1)
        epochs, batches = np.divmod(self.steps, batches_per_epoch)
        in_last_epoch = np.minimum(batches * self.batch_size, per_epoch)
        return self.models * (epochs * per_epoch + in_last_epoch)


@dataclass
class RequestedTraining:
    """A local training that a method asked of a group, with None for the experiment's settings.

    Attributes
    ----------
    epochs, steps, batch_size : what the method asked for.
    models : the number of gradient steps on each mini-batch.
    """

    ids: tuple[int, ...]
    exchange: str
    epochs: int | None
    steps: int | None
    batch_size: int | None
    models: int = 1


@dataclass(frozen=True)
class Exchange:
    """What one exchange of a round asks of a client: it receives, trains, and sends.

    Attributes
    ----------
    trainings : the client's local trainings, one after the other.
    down_bytes, up_bytes : what a client receives and sends, the mean over clients.
    """

    trainings: tuple[Training, ...] = ()
    down_bytes: float = 0.0
    up_bytes: float = 0.0

    def samples(self, sizes: np.ndarray) -> np.ndarray:
        """Return the samples of all gradient steps, ``int64[n]``, of clients that hold ``int64[n]`` samples."""
        return sum((training.samples(sizes) for training in self.trainings), np.zeros(len(sizes), np.int64))


@dataclass(frozen=True)
class Loads:
    """Message sizes and work of each client, relative to others, for methods in which these differ.

    Attributes
    ----------
    messages : the size of a client's messages, relative to those of other clients, ``float64[num_clients]``.
    work : how long a gradient step takes a client on a sample, relative to the whole network, ``float64[num_clients]``.
    """

    messages: np.ndarray
    work: np.ndarray


@dataclass(frozen=True)
class Turn:
    """What a method asks of a client in one round, exchange by exchange.

    Attributes
    ----------
    exchanges : the exchanges, with messages of the mean size over clients.
    loads : what is asked of each client, with `messages` of mean 1; None: the same of all.
    """

    exchanges: tuple[Exchange, ...]
    loads: Loads | None = None

    def message_sizes(self, clients: np.ndarray) -> float | np.ndarray:
        """Return the sizes of these clients' messages, relative to the mean over clients."""
        return 1.0 if self.loads is None else _of(self.loads.messages, clients)

    def work(self, clients: np.ndarray) -> float | np.ndarray:
        """Return how long a step takes these clients on a sample, relative to the whole network."""
        return 1.0 if self.loads is None else _of(self.loads.work, clients)

    @property
    def down_bytes(self) -> float:
        """What a client receives, the mean over clients."""
        return sum(exchange.down_bytes for exchange in self.exchanges)

    @property
    def up_bytes(self) -> float:
        """What a client sends, the mean over clients."""
        return sum(exchange.up_bytes for exchange in self.exchanges)

    def samples(self, sizes: np.ndarray) -> np.ndarray:
        """Return the samples of all gradient steps, ``int64[n]``, of clients that hold ``int64[n]`` samples."""
        return sum((exchange.samples(sizes) for exchange in self.exchanges), np.zeros(len(sizes), np.int64))


def _of(column: np.ndarray, clients: np.ndarray) -> np.ndarray:
    """Return clients' numbers; a plan with more clients than the data repeats those of the data."""
    return column[clients % len(column)]
