"""Where states are kept: no more than is needed, and nothing that counts before it should."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypfl.errors import Stopped
from raypfl.federation import checkpoint
from raypfl.federation.backend import Inline
from raypfl.federation.checkpoint import Snapshot
from raypfl.federation.states import Stack, StateTable, shards_of
from raypfl.messages import per_client
from tests.support import Federation
from tests.test_cohort import Probe

ROUNDS = st.lists(st.lists(st.sets(st.integers(0, 11), min_size=1), min_size=1, max_size=3), max_size=12)


def stack_of(clients: tuple[int, ...], round: int) -> Stack:
    rows = np.array([[client, round] for client in clients])
    return Stack({"w": rows}, {"w": np.arange(len(clients))})


@given(ROUNDS)
def test_every_client_has_its_newest_state_and_no_stack_outlives_its_rows(rounds):
    table, newest = StateTable(), {}
    for number, groups in enumerate(rounds):
        for group in groups:
            clients = tuple(sorted(group))
            table.stage(clients, stack_of(clients, number))
            newest |= dict.fromkeys(clients, number)
        table.commit()
    found = {}
    for lot in table.lots():
        assert lot.live == len(table.live(lot)) > 0
        found |= {lot.clients[k]: lot.stack.of(k)["w"].tolist() for k in table.live(lot)}
    assert found == {client: [client, number] for client, number in newest.items()}
    assert len(table) == len(newest)
    for client, number in newest.items():
        place = table.place(client)
        assert place.stack.of(place.k)["w"].tolist() == [client, number]


def test_a_lot_is_written_as_shards_of_clients_that_remember_the_same_things():
    table = StateTable()
    before = [{"a": np.ones(2)}, {}, {"a": np.zeros(2)}]
    table.stage((5, 7, 8), Stack.updated(before, {"b": np.arange(3)}))
    table.commit()
    (lot,) = table.lots()
    shards = {tuple(s.tensors): s for s in shards_of(lot, table.live(lot), lot.stack)}
    assert shards["a", "b"].clients.tolist() == [5, 8] and shards["a", "b"].tensors["b"].tolist() == [0, 2]
    assert shards["b",].clients.tolist() == [7] and shards["b",].tensors["b"].tolist() == [1]


def test_a_client_alone_has_the_same_state_without_a_copy():
    stack = Stack.updated([{"a": np.ones(2)}, {}], {"b": np.arange(6).reshape(2, 3)})
    for k in range(2):
        own = stack.alone(k)
        assert own.of(0).keys() == stack.of(k).keys()
        for name, row in own.of(0).items():
            assert np.array_equal(row, stack.of(k)[name]) and np.shares_memory(row, stack.rows[name])


def visits(clients):
    clients.state["rounds"] = clients.state.get("rounds", default=torch.zeros(1)) + 1


@pytest.mark.parametrize("executor", ["vectorised", "sequential"])
def test_stacks_that_few_rows_keep_alive_are_rewritten_and_nobodys_state_changes(executor):
    fed = Federation(sizes=(3,) * 60, method=Probe(answer=visits), group_size=4, executor=executor)
    draws, counts = np.random.default_rng(0), np.zeros(60)
    for round in range(80):
        cohort = np.sort(draws.choice(60, 12, replace=False))
        fed.exchanger.gather(round)
        held = sum(len(lot.clients) for lot in fed.states.lots())
        assert held <= 1.6 * len(fed.states)  # three to four times as many, if nothing is rewritten
        fed.cohort(cohort.tolist()).run(fed.method.reply)
        fed.states.commit()
        counts[cohort] += 1
    assert [float(fed.state_of(c)["rounds"][0]) for c in range(60)] == counts.tolist()


class StopsHalfway(Inline):
    """Is asked to stop when one group is done."""

    def run(self, call, groups):
        yield from super().run(call, groups[:1])
        raise Stopped("The run was asked to stop.")


def test_a_rewrite_that_is_stopped_halfway_changes_nothing():
    fed = Federation(sizes=(3,) * 24, method=Probe(answer=visits), group_size=4)
    for cohort in (range(24), range(0, 24, 2)):
        fed.cohort(cohort).run(fed.method.reply)
        fed.states.commit()
    assert len(fed.states.scattered()) > 1
    before = {c: fed.state_of(c)["rounds"] for c in range(24)}
    lots = fed.states.lots()
    fed.exchanger.backend = StopsHalfway(fed.exchanger.backend._worker)
    with pytest.raises(Stopped):
        fed.exchanger.gather(3)
    fed.states.commit()  # as the next round does
    assert fed.states.lots() == lots and all(fed.state_of(c)["rounds"] == before[c] for c in before)


def test_a_state_is_read_with_one_copy_whatever_the_default():
    fed = Federation(sizes=(3, 3, 3))
    state = {"w": np.arange(4, dtype=np.float32)}
    state["w"].flags.writeable = False  # as it comes from shared memory
    clients = fed.clients(round=0)
    clients.state._rows = [state, {}, state]
    default = clients.initial[:4] * 0 + 9
    rows = clients.state.get("w", default=default)
    assert rows.dtype == default.dtype and rows.tolist() == [[0, 1, 2, 3], [9] * 4, [0, 1, 2, 3]]
    rows += 1
    assert state["w"].tolist() == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="Some clients of the group have no 'w' yet"):
        clients.state.get("w")


def saved(table: StateTable, location: Path, round: int) -> Path:
    packs = [(p, lots) for p, lots in table.packs() if checkpoint.holds(str(location), p)]
    packed = {lot for _, lots in packs for lot in lots}
    shards = [s for lot in table.lots() if lot not in packed for s in shards_of(lot, table.live(lot), lot.stack)]
    return Path(checkpoint.save(str(location), Snapshot(round, {}, shards, {}, {}, packs), keep=2))


def restored(location: Path) -> StateTable:
    table, loaded = StateTable(), checkpoint.load(str(location), lambda text: None)
    assert loaded is not None
    for shard in loaded.states:
        table.stage(shard.clients.tolist(), shard.stack(), pack=shard.pack)
    table.commit()
    return table


def contents(table: StateTable) -> dict[int, list[int]]:
    return {lot.clients[k]: lot.stack.of(k)["w"].tolist() for lot in table.lots() for k in table.live(lot)}


def inodes(folder: Path) -> list[int]:
    return [file.stat().st_ino for file in sorted(folder.glob("states-*"))]


def test_a_checkpoint_writes_only_what_has_changed_since_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PACK", 1)
    table = StateTable()
    for first in (0, 10, 20):
        table.stage(tuple(range(first, first + 10)), stack_of(tuple(range(first, first + 10)), 1))
    table.commit()
    before = inodes(saved(table, tmp_path, 1))
    table.stage((3, 21), stack_of((3, 21), 2))
    table.stage((10, 11, 12, 13), stack_of((10, 11, 12, 13), 2))
    table.commit()
    after = inodes(saved(table, tmp_path, 2))
    assert after[:2] == [before[0], before[2]] and not set(after[2:]) & set(before)
    assert contents(restored(tmp_path)) == contents(table)


@pytest.mark.parametrize("harm", ["truncated", "deleted"])
def test_a_file_that_is_no_longer_what_it_was_is_written_anew(tmp_path, harm):
    table = StateTable()
    table.stage((1, 2), stack_of((1, 2), 1))
    table.commit()
    file = saved(table, tmp_path, 1) / "states-00000.safetensors"
    if harm == "deleted":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-3])
    saved(table, tmp_path, 2)
    assert contents(restored(tmp_path)) == {1: [1, 1], 2: [2, 1]}


@given(ROUNDS.filter(len), st.data())
def test_whatever_changed_between_checkpoints_the_newest_states_come_back(rounds, data):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "PACK", 100)
        patch.setattr(checkpoint, "_fsync", lambda path: None)
        table = StateTable()
        for number, groups in enumerate(rounds):
            for group in groups:
                table.stage(sorted(group), stack_of(tuple(sorted(group)), number))
            table.commit()
            if data.draw(st.booleans()):
                saved(table, Path(folder), number)
            if data.draw(st.booleans()) and list(Path(folder).iterdir()):
                saved(table, Path(folder), number)
                expected = contents(table)
                table = restored(Path(folder))
                assert contents(table) == expected


def test_a_default_may_be_made_for_new_clients_alone():
    fed, asked = Federation(), []
    clients = fed.clients()
    clients.state._rows = [{"w": np.array([1.0, 2.0])}, {}, {"w": np.array([3.0, 4.0])}, {}]

    def made(new):
        asked.append(new.tolist())
        return torch.stack([torch.full((2,), float(k)) for k in new])

    rows = clients.state.get("w", default=made)
    assert asked == [[1, 3]] and rows.tolist() == [[1, 2], [1, 1], [3, 4], [3, 3]]
    assert clients.state.get("v", default=made).tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    each = per_client(torch.arange(8.0).reshape(4, 2))
    assert clients.state.get("w", default=each).tolist() == [[1, 2], [2, 3], [3, 4], [6, 7]]
    with pytest.raises(KeyError, match=r"Some clients of the group have no 'w' yet; .* default\(new\)"):
        clients.state.get("w")
    clients.state._rows = [{"w": np.array([1.0, 2.0])}] * 4
    assert clients.state.get("w", default=made).tolist() == [[1, 2]] * 4 and len(asked) == 2
