"""The storage of clients' states: bounded memory, and nothing that counts before its round is done."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raypfl.clients.state import ClientState
from raypfl.common import files
from raypfl.common.errors import MethodError, Stopped
from raypfl.common.messages import per_client
from raypfl.engine.backends.inline import Inline
from raypfl.engine.state.client_states import all_digests
from raypfl.storage import checkpoints, filesystems
from raypfl.storage.checkpoints import Snapshot, state_files
from raypfl.storage.stacks import Fetch, Stack, merged
from raypfl.storage.states import StateFile, StateShard, StateTable
from tests.federation.test_cohort import Probe
from tests.support.federation import Federation

ROUNDS = st.lists(st.lists(st.sets(st.integers(0, 11), min_size=1), min_size=1, max_size=3), max_size=12)


def stack_of(clients: tuple[int, ...], round: int) -> Stack:
    rows = np.array([[client, round] for client in clients])
    return Stack({"w": rows}, {"w": np.arange(len(clients))})


@given(ROUNDS)
def test_every_client_has_its_newest_state_and_no_stack_outlives_its_rows(rounds):
    table = StateTable()
    newest = {}
    for number, groups in enumerate(rounds):
        for group in groups:
            clients = tuple(sorted(group))
            table.stage(clients, stack_of(clients, number))
            newest |= dict.fromkeys(clients, number)
        table.commit()

    states = {}
    for stack in table.stacks():
        assert stack.num_live == len(table.live_names(stack)) > 0
        for k in table.live_names(stack):
            states[stack.clients[k]] = stack.handle.state_of(k)["w"].tolist()

    assert states == {client: [client, number] for client, number in newest.items()}
    assert len(table) == len(newest)

    for client, number in newest.items():
        (ref,) = table.refs(client)
        assert ref.stack.state_of(ref.slot)["w"].tolist() == [client, number]


def test_a_stack_is_written_as_shards_of_clients_that_keep_the_same_names():
    table = StateTable()
    before = [{"a": np.ones(2)}, {}, {"a": np.zeros(2)}]
    table.stage((5, 7, 8), Stack.updated(before, {"b": np.arange(3)}))
    table.commit()
    (stack,) = table.stacks()
    shards = {tuple(shard.tensors): shard for shard in table.live_rows(stack).shards(stack.handle)}
    assert shards["a", "b"].clients.tolist() == [5, 8] and shards["a", "b"].tensors["b"].tolist() == [0, 2]
    assert shards["b",].clients.tolist() == [7] and shards["b",].tensors["b"].tolist() == [1]


def test_a_client_alone_has_the_same_state_without_a_copy():
    stack = Stack.updated([{"a": np.ones(2)}, {}], {"b": np.arange(6).reshape(2, 3)})
    for k in range(2):
        single = stack.single(k)
        assert single.state_of(0).keys() == stack.state_of(k).keys()
        for name, row in single.state_of(0).items():
            assert np.array_equal(row, stack.state_of(k)[name]) and np.shares_memory(row, stack.rows[name])


def counts_rounds(clients):
    clients.state["rounds"] = clients.state.get("rounds", default=torch.zeros(1)) + 1


@pytest.mark.parametrize("executor", ["vectorised", "sequential"])
def test_stacks_that_few_rows_keep_alive_are_rewritten_and_nobodys_state_changes(executor):
    fed = Federation(sizes=(3,) * 60, method=Probe(answer=counts_rounds), group_size=4, executor=executor)
    draws = np.random.default_rng(0)
    counts = np.zeros(60)

    for round in range(80):
        cohort = np.sort(draws.choice(60, 12, replace=False))
        fed.runner.compact_states(round)
        rows = sum(len(stack.clients) for stack in fed.states.stacks())
        assert rows <= 1.6 * len(fed.states)  # without rewriting, three to four times as many
        fed.cohort(cohort.tolist()).run(fed.method.reply)
        fed.states.commit()
        counts[cohort] += 1

    assert [float(fed.state_of(c)["rounds"][0]) for c in range(60)] == counts.tolist()


class StopsHalfway(Inline):
    """A backend that is stopped after one group."""

    def run(self, call, groups):
        yield from super().run(call, groups[:1])
        raise Stopped("The run was asked to stop.")


def test_a_rewrite_that_is_stopped_halfway_changes_nothing():
    fed = Federation(sizes=(3,) * 24, method=Probe(answer=counts_rounds), group_size=4)
    for cohort in (range(24), range(0, 24, 2)):
        fed.cohort(cohort).run(fed.method.reply)
        fed.states.commit()

    assert len(fed.states.clients_to_rewrite()) > 1

    before = {c: fed.state_of(c)["rounds"] for c in range(24)}
    stacks = fed.states.stacks()
    fed.runner.backend = StopsHalfway(fed.runner.backend._worker)

    with pytest.raises(Stopped):
        fed.runner.compact_states(3)

    fed.states.commit()  # as the next round does
    assert fed.states.stacks() == stacks and all(fed.state_of(c)["rounds"] == before[c] for c in before)


def test_a_state_is_read_with_one_copy_whatever_the_default():
    fed = Federation(sizes=(3, 3, 3))
    state = {"w": np.arange(4, dtype=np.float32)}
    state["w"].flags.writeable = False  # as it comes from shared memory
    clients = fed.clients(states=[state, {}, state])
    default = clients.initial[:4] * 0 + 9
    rows = clients.state.get("w", default=default)

    assert rows.dtype == default.dtype and rows.tolist() == [[0, 1, 2, 3], [9] * 4, [0, 1, 2, 3]]

    rows += 1
    assert state["w"].tolist() == [0, 1, 2, 3]
    with pytest.raises(LookupError, match="Some clients of the group have no 'w' yet"):
        clients.state.get("w")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_state_is_read_in_the_type_of_its_default_with_a_copy_or_without(read_only):
    state = ClientState([{"w": np.ones(2, np.float16)}], torch.device("cpu"), read_only)
    assert state.get("w", default=torch.zeros(2)).dtype == torch.float32
    assert state["w"].dtype == torch.float16


def saved(table: StateTable, location: object, round: int, fetch: Fetch = lambda stacks: stacks) -> list[StateFile]:
    """Save a checkpoint; return its files of states."""
    write = partial(checkpoints.write_file, str(location), fetch)
    states = checkpoints.save_states(str(location), table, lambda files: list(map(write, files)))
    checkpoints.save(str(location), Snapshot(round, {}, states, {}, {}), keep=2)
    return list(states.state_files)


def restored(location: object) -> StateTable:
    loaded = checkpoints.load(str(location), lambda text: None)
    assert loaded is not None

    table = StateTable()
    for shard in loaded.states:
        table.stage(shard.clients.tolist(), shard.stack(), shard=shard)
    table.commit()
    return table


def contents(table: StateTable) -> dict[int, list[int]]:
    """What each client has under ``w``."""
    states = {}
    for stack in table.stacks():
        for k in table.live_names(stack):
            states[stack.clients[k]] = stack.handle.state_of(k)["w"].tolist()
    return states


class Recording:
    """A pretended object store that records what is done with its files."""

    def __init__(self, folder: Path):
        self._files = pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem())
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            self.calls.append((name, str(path)))
            return getattr(self._files, name)(path, *arguments, **options)

        return call

    def written(self) -> set[str]:
        """The paths that were written since the last look; raises an AssertionError if files were copied."""
        assert not {name for name, _ in self.calls} & {"copy_file", "move"}
        paths = {path for name, path in self.calls if name == "open_output_stream"}
        self.calls.clear()
        return paths


def test_a_checkpoint_writes_only_what_has_changed_since_the_one_before(tmp_path, monkeypatch):
    store = Recording(tmp_path)
    monkeypatch.setattr(filesystems, "open_location", lambda location: (store, location))
    monkeypatch.setattr(state_files, "FILE_SIZE", 1)
    table = StateTable()
    rest = {"server.safetensors", "meta.json", "manifest.json"}
    for first in (0, 10, 20):
        table.stage(tuple(range(first, first + 10)), stack_of(tuple(range(first, first + 10)), 1))

    table.commit()
    before = saved(table, "run", 1)
    assert store.written() == {f"run/{file.path}" for file in before} | {f"run/000001-round-1/{name}" for name in rest}

    table.stage((3, 21), stack_of((3, 21), 2))
    table.stage((10, 11, 12, 13), stack_of((10, 11, 12, 13), 2))
    table.commit()
    after = saved(table, "run", 2)
    new = set(after) - set(before)
    assert set(after) & set(before) == {before[0], before[2]} and len(new) == 3
    assert store.written() == {f"run/{file.path}" for file in new} | {f"run/000002-round-2/{name}" for name in rest}
    assert contents(restored("run")) == contents(table)

    # Until no checkpoint lists it any more.
    assert (tmp_path / "run" / before[1].path).exists()
    assert set(saved(table, "run", 3)) == set(after)
    assert {f"states/{file.name}" for file in tmp_path.glob("run/states/*")} == {file.path for file in after}


def test_a_save_has_one_file_of_states_in_memory_and_small_ones_share_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(state_files, "FILE_SIZE", 2 * 16)
    table = StateTable()
    for client in range(5):
        table.stage((client,), stack_of((client,), 1))
    table.commit()
    written_before = []

    def fetch(stacks: Sequence[Stack]) -> Sequence[Stack]:
        written_before.append((len(stacks), len(list(tmp_path.glob("states/*")))))
        return stacks

    assert len(saved(table, tmp_path, 1, fetch)) == 3
    assert written_before == [(2, 0), (2, 1), (1, 2)]
    assert contents(restored(tmp_path)) == contents(table)


def test_a_file_has_the_stacks_of_one_node(tmp_path):
    table = StateTable()
    for client in range(6):
        table.stage((client,), stack_of((client,), 1), node=f"node {client % 2}")
    table.commit()
    assert [[stack.clients for stack in stacks] for stacks in table.by_file(99, without=())] == [
        [(0,), (2,), (4,)],
        [(1,), (3,), (5,)],
    ]


@pytest.mark.parametrize("harm", ["truncated", "deleted"])
def test_a_damaged_file_of_states_is_written_again(tmp_path, harm):
    table = StateTable()
    table.stage((1, 2), stack_of((1, 2), 1))
    table.commit()
    file = tmp_path / saved(table, tmp_path, 1)[0].path
    if harm == "deleted":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-3])
    saved(table, tmp_path, 2)

    assert contents(restored(tmp_path)) == {1: [1, 1], 2: [2, 1]}


@settings(deadline=None)
@given(ROUNDS.filter(len), st.data())
def test_whatever_changed_between_checkpoints_the_newest_states_come_back(rounds, data):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_files, "FILE_SIZE", 100)
        patch.setattr(files, "sync", lambda path: None)

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


def test_a_default_is_computed_for_new_clients_only():
    fed = Federation()
    requests = []
    clients = fed.clients(states=[{"w": np.array([1.0, 2.0])}, {}, {"w": np.array([3.0, 4.0])}, {}])

    def make_default(new):
        requests.append(new.tolist())
        return torch.stack([torch.full((2,), float(k)) for k in new])

    rows = clients.state.get("w", default=make_default)
    assert requests == [[1, 3]] and rows.tolist() == [[1, 2], [1, 1], [3, 4], [3, 3]]
    assert clients.state.get("v", default=make_default).tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    each = per_client(torch.arange(8.0).reshape(4, 2))
    assert clients.state.get("w", default=each).tolist() == [[1, 2], [2, 3], [3, 4], [6, 7]]
    with pytest.raises(LookupError, match=r"Some clients of the group have no 'w' yet; .* default\(new\)"):
        clients.state.get("w")
    clients = fed.clients(states=[{"w": np.array([1.0, 2.0])}] * 4)
    assert clients.state.get("w", default=make_default).tolist() == [[1, 2]] * 4 and len(requests) == 2


@pytest.mark.parametrize(
    "use",
    [
        lambda state: "w" in state,
        lambda state: state.setdefault("w", torch.zeros(2, 1)),
        lambda state: state.pop("w", torch.zeros(2, 1)),
    ],
    ids=["in", "setdefault", "pop"],
)
def test_no_use_of_a_state_takes_a_client_that_has_one_for_new_since_another_is(use):
    state = Federation().clients(states=[{"w": np.ones(1)}, {}]).state
    with pytest.raises(LookupError, match="Some clients of the group have no 'w' yet"):
        use(state)
    assert not state.changed
    use(Federation().clients(states=[{"w": np.ones(1)}] * 2).state)
    use(Federation().clients(states=[{}, {}]).state)


@pytest.mark.parametrize("default", [torch.zeros(3), per_client(torch.zeros(2, 3)), None])
def test_a_state_of_another_shape_than_the_default_or_the_other_clients_is_refused(default):
    clients = Federation().clients(states=[{"w": np.ones(1)}, {} if default is not None else {"w": np.ones(3)}])
    with pytest.raises(MethodError, match=r"state\['w'\] has the shape \(.*\) .* but \(.*start a new run"):
        clients.state.get("w", default=default)


# ------------------------------------------------------------------------------------------ states of several names
CHANGES = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "delete a", "delete all"]), st.sets(st.integers(0, 5), min_size=1)),
    min_size=1,
    max_size=14,
)


def changes_one_name(clients, what, value):
    if what.startswith("delete"):
        for name in [name for name in clients.state if what in ("delete all", f"delete {name}")]:
            del clients.state[name]
    else:
        clients.state[what] = torch.tensor([[client, value] for client in clients.ids]).repeat(1, 1 + ord(what) % 3)


def all_states(fed: Federation) -> dict[int, dict[str, list[int]]]:
    return {client: {name: row.tolist() for name, row in fed.state_of(client).items()} for client in range(6)}


@settings(max_examples=25)
@given(CHANGES, st.data())
def test_states_hold_exactly_the_names_that_clients_have_set_and_not_deleted(changes, data):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_files, "FILE_SIZE", 100)
        patch.setattr(files, "sync", lambda path: None)
        fed = Federation(sizes=(3,) * 6, method=Probe(answer=changes_one_name), group_size=2)
        expected = {}

        for value, (what, cohort) in enumerate(changes):
            fed.runner.compact_states(value)
            fed.cohort(sorted(cohort)).run(fed.method.reply, what=what, value=value)
            fed.states.commit()

            for client in cohort:
                state = expected.setdefault(client, {})
                if what.startswith("delete"):
                    for name in [name for name in state if what in ("delete all", f"delete {name}")]:
                        del state[name]
                else:
                    state[what] = [client, value] * (1 + ord(what) % 3)

            assert all_states(fed) == {client: expected.get(client, {}) for client in range(6)}
            for stack in fed.states.stacks():
                live = fed.states.live_names(stack)
                assert stack.num_live == len(live) > 0

                live_bytes = 0
                for k, names in live.items():
                    live_bytes += sum(stack.sizes[k][name] for name in names)
                assert stack.live_bytes == live_bytes

            if data.draw(st.booleans()):
                saved(fed.states, Path(folder), value)
            if data.draw(st.booleans()):
                saved(fed.states, Path(folder), value)
                loaded = checkpoints.load(folder, lambda text: None)
                assert loaded is not None
                for client in range(6):
                    stored = {name: row.tolist() for name, row in loaded.state_of(client).items()}
                    assert stored == expected.get(client, {})
                fed.states = fed.runner.states = restored(Path(folder))
                assert all_states(fed) == {client: expected.get(client, {}) for client in range(6)}


def test_names_that_a_client_does_not_set_are_not_copied():
    def answer(clients, name, width):
        clients.state[name] = torch.zeros(len(clients), width)

    fed = Federation(sizes=(3,) * 4, method=Probe(answer=answer), group_size=2)
    fed.cohort().run(fed.method.reply, name="large", width=1000)
    fed.states.commit()
    large = [fed.state_of(client)["large"] for client in range(4)]
    for _ in range(5):
        fed.runner.compact_states(0)
        fed.cohort().run(fed.method.reply, name="small", width=1)
        fed.states.commit()
        assert all(np.shares_memory(fed.state_of(client)["large"], large[client]) for client in range(4))
    assert [stack.bytes for stack in fed.states.stacks()] == [2 * 4000] * 2 + [2 * 4] * 2


def test_a_checkpoint_writes_only_the_names_that_have_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(state_files, "FILE_SIZE", 1)
    table = StateTable()
    table.stage((1, 2), Stack.updated([{}, {}], {"constant": np.zeros((2, 1000)), "moving": np.zeros((2, 1))}))
    table.commit()
    (before,) = saved(table, tmp_path, 1)
    new = Stack.updated([{}, {}], {"moving": np.ones((2, 1))})
    table.stage((1, 2), new, contents=new.contents(2, complete=False))
    table.commit()
    unchanged, changed = saved(table, tmp_path, 2)
    assert unchanged == before and changed.bytes < 1000

    for client in (1, 2):
        state = merged(ref.stack.state_of(ref.slot) for ref in restored(tmp_path).refs(client))
        assert state["constant"].shape == (1000,) and state["moving"].tolist() == [1]


def test_memory_is_bounded_if_a_large_name_changes_and_a_small_one_does_not():
    def answer(clients, round):
        if round == 0:
            clients.state["small"] = torch.zeros(len(clients), 1)
        clients.state["large"] = torch.full((len(clients), 100), float(round))

    fed = Federation(sizes=(3,) * 12, method=Probe(answer=answer), group_size=4)
    draws = np.random.default_rng(0)
    for round in range(30):
        fed.runner.compact_states(round)
        cohort = np.sort(draws.choice(12, 12 if round == 0 else 5, replace=False))
        fed.cohort(cohort).run(fed.method.reply, round=round)
        fed.states.commit()
        bytes_of_states = 0
        for stack in fed.states.stacks():
            bytes_of_states += sum(rows.nbytes for rows in stack.handle.rows.values())
        assert bytes_of_states <= 2.2 * 12 * 404  # what a round replaces is rewritten before the next
    assert all(set(fed.state_of(client)) == {"small", "large"} for client in range(12))


def test_a_client_that_deletes_all_that_it_has_just_stored_keeps_nothing():
    def answer(clients):
        clients.state["scratch"] = torch.zeros(len(clients), 3)
        del clients.state["scratch"]
        return {}

    fed = Federation(method=Probe(answer=answer))
    fed.cohort().run(fed.method.reply)
    fed.states.commit()
    assert all_digests(fed.states, fed.runner.backend) == {}
    assert fed.states.refs(0) == ()


def test_clients_of_one_file_are_read_at_once_and_own_what_they_get(tmp_path: Path, monkeypatch) -> None:
    rows = np.arange(6.0).reshape(3, 2)
    file = checkpoints.write_shards(str(tmp_path), [StateShard(np.arange(3), {"w": rows})])
    stored = checkpoints.StoredStates(str(tmp_path), (file,))
    reads = []
    read = state_files.read_bytes
    monkeypatch.setattr(state_files, "read_bytes", lambda *place: reads.append(place) or read(*place))

    for client in range(3):
        stored.state_of(client)["w"][:] = -1
        assert stored.state_of(client)["w"].tolist() == rows[client].tolist()
    assert len(reads) == 2  # to find the clients of all files, and then their states
