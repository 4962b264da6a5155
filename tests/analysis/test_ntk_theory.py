"""FL-NTK's theorems as a report: preconditions, rate, rounds, generalization (sections 4 and 8.3, 8.4)."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from raypfl.analysis.theory.flntk import (
    TheoremSetting,
    generalization,
    literal_rate,
    posterior_bound,
    quadratic_form,
    theory_report,
)
from raypfl.analysis.theory.kernels import Spectrum, infinite_width, positive
from raypfl.common.errors import ConfigError
from tests.support.ntk import Problem, fl_round, problem, simulate, sphere, split


def report_of(p: Problem, setting: TheoremSetting):
    return theory_report(setting, p.x, p.h0, infinite_width(p.x), p.network.outputs(p.u, p.x) - p.y)


def setting(p: Problem, steps: int, c: float, clients: int = 4, server_rate: float = 1.0) -> TheoremSetting:
    rate = c / Spectrum.of(p.h0).largest
    return TheoremSetting(
        parts=split(len(p.x), clients), width=len(p.u), steps=steps, rate=rate, server_rate=server_rate
    )


@pytest.mark.parametrize(("clients", "steps"), [(4, 1), (4, 5), (1, 5)])
def test_the_error_falls_as_the_theorem_says(clients: int, steps: int):
    p = problem(m=2048)
    s = setting(p, steps, 1 / steps, clients)
    q = report_of(p, s).rate
    errors = simulate(p, s.parts, steps, s.rate, 60)[0].square().sum(1)
    assert all(float(e) <= q**t * float(errors[0]) * (1 + 1e-9) for t, e in enumerate(errors))


def test_the_report_says_where_the_theorem_does_not_apply():
    p = problem(m=2048)
    assert report_of(p, setting(p, 1, 1.0)).applies == report_of(p, setting(p, 5, 0.2)).applies == "yes"

    many = setting(p, 50, 1.0)
    observed = simulate(p, many.parts, 50, many.rate, 20)[0].square().sum(1)
    assert report_of(p, many).applies == "no" and "local steps no longer add up" in report_of(p, many).verdict
    assert float(observed[-1] / observed[0]) > 10 * report_of(p, many).rate ** 20
    assert report_of(p, setting(p, 200, 1.0, 2)).rate < 0 and "below 1" in report_of(p, setting(p, 200, 1.0, 2)).verdict
    assert "diverges" in report_of(p, setting(p, 5, 0.1, server_rate=40)).verdict


def test_no_condition_of_the_theorem_on_rates_and_width_holds_in_practice_and_the_report_says_so():
    p = problem(m=2048)
    report = report_of(p, setting(p, 5, 0.2))
    met = {c.name: c.met for c in report.conditions}

    assert met.pop("lambda") and met.pop("length of inputs")
    assert met.pop("all clients in every round") and met.pop("all samples in every local step")
    assert met and not any(met.values())
    assert 1e15 < report.required_width < 1e20 and report.rounds > report.predicted_rounds
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["applies"] == "yes"


def test_with_steps_as_small_as_the_theorem_asks_no_neuron_switches_and_the_prediction_is_exact():
    p = problem(m=2048)
    s = replace(setting(p, 5, 1.0), rate=literal_rate(Spectrum.of(p.h0), 20, 5))
    simulated, _ = fl_round(p, p.u, s.parts, 5, s.rate)
    errors = simulate(p, s.parts, 5, s.rate, 10)[0]
    assert torch.equal(positive(simulated.before, p.x), positive(simulated.after, p.x))
    assert torch.allclose(s.map(p.h0).errors(errors[0], 10), errors.square().sum(1), rtol=1e-12)
    assert {c.name for c in report_of(p, s).conditions if not c.met} == {"width", "radius of weights"}


def test_an_input_that_occurs_twice_with_two_targets_is_not_learned_and_the_report_says_so():
    p = problem(m=1024)
    x = torch.cat([p.x, p.x[:1]])
    y = torch.cat([p.y, -p.y[:1].sign()])
    y[0] = p.y[0].sign()
    twice = replace(p, x=x, y=y)
    report = report_of(twice, setting(twice, 1, 1.0))

    assert report.least == 0 and "lambda = 0: no guarantee" in report.verdict and report.rounds is None
    assert float(simulate(twice, split(21, 3), 1, 1.0, 200)[0][-1].square().sum()) >= 2
    with pytest.raises(ConfigError, match="occur twice"):
        generalization(infinite_width(x), y)


def test_easy_targets_have_small_quadratic_forms():
    x = sphere(400, 10)
    h = infinite_width(x)
    beta = torch.eye(10, dtype=torch.float64)[0]
    random = torch.randint(0, 2, (400,), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    assert quadratic_form(h, x @ beta) <= 4 and quadratic_form(h, (x @ beta).square()) <= 2 * math.pi
    assert quadratic_form(h, random) > 10 * quadratic_form(h, x @ beta)


def test_the_generalization_bound_falls_with_samples_and_is_above_what_is_measured():
    def bound(n: int):
        return generalization(infinite_width(sphere(n, 10)), sphere(n, 10)[:, 0])

    assert bound(100).bound > bound(400).bound > bound(800).bound
    assert bound(800).leading < 0.11 and not bound(800).vacuous and bound(100).vacuous
    x = sphere(800, 10)
    new = sphere(200, 10, seed=1)
    predictions = infinite_width(new, x) @ torch.linalg.solve(infinite_width(x), x[:, 0])
    assert float((predictions - new[:, 0]).abs().clamp_max(1).mean()) < bound(800).bound
    constants = {"samples": 800, "width": 10**6, "least": 0.04, "sigma": 0.1, "delta": 0.1}
    assert posterior_bound(0.01, 2.0, 1e-3, **constants) < posterior_bound(0.01, 4.0, 1e-3, **constants)
