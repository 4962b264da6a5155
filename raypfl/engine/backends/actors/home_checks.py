"""Checks of the place where a client actor runs, once it is ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raypfl.common.errors import RaypflError
from raypfl.engine.backends.client_actor import Home


class HomeChecks:
    """Checks the devices of a run's client actors.

    `mixed_devices` : whether actors may compute on devices of several types.
    """

    def __init__(self, mixed_devices: bool, warn: Callable[[str], None]):
        self._mixed_devices = mixed_devices
        self._warn = warn
        self._device: str | None = None
        self._has_warned_of_slices = False

    def takes_part(self, home: Home, has_begun: bool) -> bool:
        """Refuse an actor on another type of device than the others; once the run has begun, leave it out."""
        self._device = self._device or home.device
        if home.device == self._device or self._mixed_devices:
            return True
        if not has_begun:
            raise RaypflError(
                f"The cluster's client actors compute on {self._device} and on {home.device}, on which rounding "
                "differs. Name one type of GPU (ray.accelerator), or let results depend on which group ran on "
                "which device: ray.mixed_devices=true."
            )
        self._warn(f"A client actor that came up later is left out: it computes on {home.device}, not {self._device}.")
        return False

    def check_gpu(self, home: Home, share: float, in_pool: Sequence[Home], homes: Sequence[Home]) -> None:
        """Warn if Ray has put more actors on a GPU than their shares allow, and once if actors take turns on one.

        Parameters
        ----------
        share : the share of a GPU, or the number of GPUs, that each actor of the pool reserves.
        in_pool, homes : the homes of the pool's actors and of all, this one included.
        """
        # This happens, although Ray should respect the shares.
        if 0 < share < 1 and _num_sharing(home, in_pool) * share > 1:
            num_sharing = _num_sharing(home, in_pool)
            self._warn(f"Ray has put {num_sharing} client actors on a GPU, each with {share:g} of it; it may be full.")

        if home.is_time_sliced and not self._has_warned_of_slices and _num_sharing(home, homes) > 1:
            self._has_warned_of_slices = True
            self._warn(
                "Several client actors share a GPU, on which they take turns, because NVIDIA's multi-process service "
                "does not run there. Start it with `nvidia-cuda-mps-control -d`, so that they compute at the same time."
            )


def _num_sharing(home: Home, homes: Sequence[Home]) -> int:
    """Return how many actors are on this one's GPU."""
    return sum((other.node, other.gpus) == (home.node, home.gpus) for other in homes)
