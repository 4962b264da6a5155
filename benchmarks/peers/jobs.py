"""The jobs, and the contenders that are measured at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.noise import SETS, Noise
from benchmarks.peers.order import Order


@dataclass(frozen=True)
class Contender:
    """A system with settings.

    Attributes
    ----------
    system : a module of ``benchmarks.peers.systems``.
    processes : the processes that work at a time; ``torchrun`` starts them where the system does not.
    options : the system's settings.
    needs : CPU flags, of which one is needed.
    """

    name: str
    system: str
    processes: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    @property
    def by_torchrun(self) -> bool:
        return self.system == "pfl" and self.processes > 1


BARE = Contender("bare loop", "bare")
INLINE = Contender("raypfl", "raypfl")
CHANNELS_LAST = Contender("raypfl, channels last", "raypfl", options={"channels_last": True})
BF16 = Contender(
    "raypfl, channels last, bf16",
    "raypfl",
    options={"channels_last": True, "precision": "bf16"},
    needs=("avx512_bf16", "amx_bf16", "bf16"),
)
ACTORS = Contender("raypfl, 2 actors", "raypfl", processes=2, options={"actors": 2})
PFL = Contender("pfl-research", "pfl")
PFL_TWO = Contender("pfl-research, 2 processes", "pfl", processes=2)
FLOWER = Contender("Flower, 2 actors", "flower", processes=2, options={"actors": 2})
FLUKE = Contender("fluke", "fluke")
CONTENDERS = (BARE, INLINE, CHANNELS_LAST, BF16, ACTORS, PFL, PFL_TWO, FLOWER, FLUKE)

NO_DITTO = "has no Ditto and no other method that would do the same work; one would have to be written for it"
NO_EVALUATION = "evaluates personal models as part of its rounds, where that cannot be timed apart"


@dataclass(frozen=True)
class Job:
    """The same work for everybody.

    Attributes
    ----------
    rounds : the least number of rounds that are counted in a run.
    left_out : contender -> the reason why it is not measured.
    """

    name: str
    about: str
    noise: Noise
    network: str = "cnn"
    method: str = "fedavg"
    contenders: tuple[Contender, ...] = CONTENDERS
    cohort: int = 50
    batch: int = 10
    lr: float = 0.1
    momentum: float = 0.0
    epochs: int = 1
    rounds: int = 3
    left_out: Mapping[str, str] = field(default_factory=dict)

    def order(self, contender: Contender, source: dict[str, Any], files: Path, report: Path, cohort: int) -> Order:
        """This job for one contender, with another cohort than its own where a rough number is enough."""
        return Order(
            method=self.method,
            network=self.network,
            source=source,
            files=str(files),
            report=str(report),
            clients=self.noise.clients,
            cohort=cohort,
            batch=self.batch,
            lr=self.lr,
            momentum=self.momentum,
            epochs=self.epochs,
            options=dict(contender.options),
        )


_FP32 = (BARE, INLINE, ACTORS, PFL, PFL_TWO, FLOWER, FLUKE)
_IMAGES, _MLP = SETS["images"], {"network": "mlp", "contenders": _FP32}
JOBS = {
    job.name: job
    for job in (
        Job("cnn", "1000 clients of 50 images, cohort 50, CNN of 1,626,442", _IMAGES),
        Job("mlp", "1000 clients of 50 samples, cohort 50, MLP of 9,610", SETS["pixels"], rounds=10, **_MLP),
        Job(
            "lenet",
            "100 clients, cohort 5, 50 steps of batch 32 with momentum, LeNet of 121,182",
            SETS["pictures"],
            "lenet",
            cohort=5,
            batch=32,
            lr=0.01,
            momentum=0.9,
            epochs=5,
            rounds=5,
        ),
        *(
            Job(name, f"{clients} clients of 10 to 100 samples, cohort 1000, MLP", SETS[noise], cohort=1000, **_MLP)
            for name, clients, noise in (("small-population", "1000", "village"), ("population", "100,000", "country"))
        ),
        Job(
            "ditto",
            "the cnn job with a personal model a client",
            _IMAGES,
            method="ditto",
            contenders=(BARE, INLINE, BF16, ACTORS, FLOWER, FLUKE),
            rounds=2,
            left_out={PFL.name: NO_DITTO},
        ),
        Job(
            "evaluation",
            "1000 personal CNNs, each on its own 10 test images",
            _IMAGES,
            method="evaluation",
            contenders=(BARE, INLINE, ACTORS),
            cohort=1000,
            left_out=dict.fromkeys((PFL.name, FLOWER.name, FLUKE.name), NO_EVALUATION),
        ),
    )
}
