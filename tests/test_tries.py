"""A group is tried as often as the settings say, and its failing clients are found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from raypfl.backends.inline import Inline
from raypfl.common.errors import ClientError
from raypfl.federation.backend import Failed
from raypfl.federation.settings import FailureSettings
from tests.test_cohort import ROWS, exchange, failing, federation

THREE_TRIES = FailureSettings(retries=2)
SKIP = FailureSettings(on_client_failure="skip", retries=2)


class Mortal(Inline):
    """Loses a process whenever client 3 is at work, and tries again itself, as the backend on Ray does: this often."""

    def __init__(self, inline: Inline, own_tries: int):
        super().__init__(inline._worker)
        self.own_tries = own_tries
        self.deaths: list[tuple[int, ...]] = []

    def run(self, call, groups):
        for group in groups:
            if 3 not in group.clients:
                yield from super().run(call, [group])
                continue
            spent = min(group.tries, self.own_tries)
            self.deaths += [group.clients] * spent
            yield replace(group, tries=group.tries - spent + 1), Failed(OSError(), "Its process died.")


@pytest.mark.parametrize("own_tries", [1, 2, 9])
def test_a_group_is_tried_as_often_as_the_settings_say_whoever_tries_again(own_tries):
    fed = federation(failing(), failures=THREE_TRIES)
    fed.runner.backend = mortal = Mortal(fed.runner.backend, own_tries)
    with pytest.raises(ClientError, match=r"^Client 3 failed 3 times in a row in round 0:\nIts process died\.$"):
        exchange(fed)
    assert mortal.deaths == [(0, 1, 2, 3, 4)] * 3 + [(3,)]


def test_what_is_left_of_a_group_without_its_culprits_is_tried_as_often_again():
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


def test_clients_of_a_group_that_fail_one_after_the_other_are_each_skipped_for_a_reason_of_their_own():
    def answer(clients):
        for culprit in sorted({1, 3} & set(clients.ids)):
            raise ClientError(f"Client {culprit} diverged.", [culprit], repeatable=True)
        return failing()(clients)

    fed = federation(answer, failures=SKIP)
    cohort = fed.cohort()
    reply = cohort.run(fed.method.reply)
    assert cohort.failed == {1: "Client 1 diverged.", 3: "Client 3 diverged."}
    np.testing.assert_allclose(reply["rows"][[0, 2, 4]], ROWS[[0, 2, 4]] + 1, rtol=1e-12)
