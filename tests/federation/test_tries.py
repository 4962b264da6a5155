"""A group is tried as often as the settings say, and its failing clients are identified."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from raypfl.common.errors import ClientError, MethodError
from raypfl.common.messages import Mean
from raypfl.engine.backends.inline import Inline
from raypfl.federation.exchange.backend import Failed
from raypfl.federation.settings import FailureSettings
from tests.federation.test_cohort import ROWS, exchange, failing, federation

THREE_TRIES = FailureSettings(retries=2)
SKIP = FailureSettings(on_client_failure="skip", retries=2)


class Mortal(Inline):
    """Loses the processes of some groups as often as these may die, as the backend on Ray does.

    Parameters
    ----------
    kills : whether a group of these clients loses its process, given how many groups have.
    """

    def __init__(self, inline: Inline, kills: Callable[[tuple[int, ...], int], bool]):
        super().__init__(inline._worker)
        self.kills = kills
        self.dead: list[tuple[int, ...]] = []

    def run(self, call, groups):
        for group in groups:
            if self.kills(group.clients, len(self.dead)):
                self.dead.append(group.clients)
                yield group, Failed(OSError(), "Its process died.", deaths=group.deaths)
            else:
                yield from super().run(call, [group])


def test_a_client_that_kills_its_processes_is_singled_out_whatever_the_retries():
    fed = federation(failing(), failures=FailureSettings(retries=7, deaths=4))
    fed.runner.backend = mortal = Mortal(fed.runner.backend, lambda clients, deaths: 3 in clients)
    with pytest.raises(ClientError, match=r"^Client 3 failed 4 times in a row in round 0:\nIts process died\.$"):
        exchange(fed)
    assert mortal.dead == [(0, 1, 2, 3, 4), (3,)]


def test_a_group_that_dies_although_each_client_survives_alone_is_retried():
    fed = federation(failing(), failures=THREE_TRIES)
    fed.runner.backend = mortal = Mortal(fed.runner.backend, lambda clients, deaths: len(clients) == 5 and deaths < 2)
    np.testing.assert_allclose(exchange(fed)["rows"], ROWS + 1, rtol=1e-12)
    assert mortal.dead == [(0, 1, 2, 3, 4)] * 2


def test_a_group_that_dies_only_as_a_whole_fails_after_its_tries():
    fed = federation(failing(), failures=THREE_TRIES)
    fed.runner.backend = mortal = Mortal(fed.runner.backend, lambda clients, deaths: len(clients) == 5)
    with pytest.raises(ClientError, match=r"^All 5 clients of a group failed 5 times in a row"):
        exchange(fed)
    assert mortal.dead == [(0, 1, 2, 3, 4)] * 3


def test_a_misspelt_argument_of_a_message_is_one_sentence():
    fed = federation(lambda clients: {"x": Mean(torch.ones(len(clients), 2), weights=torch.ones(len(clients)))})
    with pytest.raises(MethodError, match=r"^Mean has no argument 'weights'; did you mean 'weight'\?"):
        exchange(fed)


def test_a_group_without_its_failing_clients_gets_all_its_tries_again():
    tries = []

    def answer(clients):
        tries.append(clients.ids)
        if 3 in clients.ids or (len(clients) == 4 and tries.count(clients.ids) < 3):
            raise OSError("a hiccup")
        return failing()(clients)

    fed = federation(answer, failures=SKIP)
    cohort = fed.cohort()
    reply = cohort.run(fed.method.reply)
    assert list(cohort.failed) == [3] and "Client 3 failed 3 times in a row" in cohort.failed[3]
    np.testing.assert_allclose(reply["rows"][[0, 1, 2, 4]], ROWS[[0, 1, 2, 4]] + 1, rtol=1e-12)


def test_clients_of_a_group_that_fail_in_turn_are_each_skipped_with_their_own_reason():
    def answer(clients):
        for culprit in sorted({1, 3} & set(clients.ids)):
            raise ClientError(f"Client {culprit} diverged.", [culprit], repeatable=True)
        return failing()(clients)

    fed = federation(answer, failures=SKIP)
    cohort = fed.cohort()
    reply = cohort.run(fed.method.reply)
    assert cohort.failed == {1: "Client 1 diverged.", 3: "Client 3 diverged."}
    np.testing.assert_allclose(reply["rows"][[0, 2, 4]], ROWS[[0, 2, 4]] + 1, rtol=1e-12)


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        pytest.param(None, 1, id="torch's error for wrong shapes"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), 3),
        (OSError("no route to host"), 3),
    ],
)
def test_torchs_error_for_wrong_shapes_is_a_mistake_that_is_not_tried_again_and_one_of_the_machine_is(error, tries):
    groups = []

    def answer(clients):
        groups.append(clients.ids)
        if error is not None:
            raise error
        return torch.zeros(2, 3) @ torch.zeros(4)

    fed = federation(answer, failures=THREE_TRIES)
    with pytest.raises(ClientError, match=r"^All 5 clients of a group failed"):
        exchange(fed)
    assert groups.count((0, 1, 2, 3, 4)) == tries
