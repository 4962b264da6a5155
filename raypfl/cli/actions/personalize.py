"""`raypfl personalize` and `raypfl serve`: models for new clients."""

from __future__ import annotations

import os
import secrets
import sys
import time
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from raypfl.cli.actions.json_text import json_text
from raypfl.common.counting import counted
from raypfl.common.errors import ConfigError
from raypfl.common.optional_packages import not_installed
from raypfl.common.stopping import signals_interrupt
from raypfl.methods import METHODS
from raypfl.results.units import Unit
from raypfl.trained.models import TrainedModels
from raypfl.trained.new_clients import require_new_client_models
from raypfl.trained.samples import samples_in

TOKEN = "RAYPFL_TOKEN"
SHORTEST_TOKEN = 16  # characters


def personalize(run: Path, data: Path, out: Path, held_out: float, as_json: bool) -> None:
    """Make a model for a new client, save it, and print its quality and the time that it took."""
    start = time.perf_counter()
    models = TrainedModels.of_run(run, whole=False)
    require_new_client_models(models.experiment)
    x, y = samples_in(data, models)
    model = models.personalize(x, y, held_out)
    file = model.save(out)
    total = time.perf_counter() - start

    if as_json:
        print(json_text({**model.facts, "total_seconds": total, "file": str(file)}))
        return
    name = METHODS.name_of(type(models.experiment.method))
    lines = [
        f"{name} made a model from {counted(model.samples, 'sample')} in {model.seconds * 1e3:,.1f} ms "
        f"({total:.1f} s with reading the run and writing the file)."
    ]
    if model.held_out:
        metrics = models.measures.metrics
        units = {name: Unit(metrics[name]) for name in model.metrics}
        values = {name: unit.of([model.metrics[name]])[0] for name, unit in units.items()}
        reached = ", ".join(f"{unit.phrase} {unit.text(values[name])}{unit.sign}" for name, unit in units.items())
        lines.append(f"On {counted(model.held_out, 'held-out sample')}: {reached}.")
    else:
        lines.append("No samples were held out, so it was not tested.")

    if model.epsilon is not None:
        privacy = models.experiment.privacy
        lines.append(f"Privacy of one of the client's samples: epsilon {model.epsilon:.2f} at delta {privacy.delta:g}.")
    lines.append(f'Model: {file} ({file.stat().st_size / 1e3:,.0f} kB); in Python: raypfl.load_model("{file}")')
    Console().print(Text("\n".join(lines)), soft_wrap=True)


def serve(run: Path, host: str, port: int, replicas: int, megabytes: float, samples: int) -> None:
    """Make models for new clients over HTTP until interrupted, which raises KeyboardInterrupt."""
    try:
        from raypfl.trained.serving import service
    except ImportError as error:
        raise not_installed(f"raypfl serve needs Ray Serve ({error})", "ray[serve]", "serve") from error

    token_from_user = os.environ.get(TOKEN)
    if token_from_user is not None and len(token_from_user) < SHORTEST_TOKEN:
        raise ConfigError(
            f"${TOKEN} has {len(token_from_user)} characters; set one of at least {SHORTEST_TOKEN}, or leave it unset."
        )
    token = token_from_user or secrets.token_urlsafe(32)
    say = partial(Console().print, soft_wrap=True, highlight=False)
    if host not in ("127.0.0.1", "localhost", "::1"):
        say(Text(f"Anyone who can reach {host} can try tokens, and traffic is not encrypted.", "yellow"))
    limits = service.RequestLimits(megabytes, samples)
    with signals_interrupt(), service.served(run, token, host, port, replicas, limits) as address:
        say(f"Serving {run} at {address}")
        say(f"Token: the value of ${TOKEN}" if token_from_user else f"Token: {token}")
        say(f'In Python: raypfl.RemoteRun("{address}", TOKEN).personalize(x, y)')
        say("Press Ctrl-C to stop.")
        sys.stdout.flush()
        try:
            while True:
                time.sleep(1)
        except KeyboardInterrupt:
            say("Stopping.")
            raise
