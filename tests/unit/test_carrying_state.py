"""What the state of an elastic run keeps, and when, with a state of Horovod's that is pretended."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_compress.engine import CarryingState


class _HostsUpdated(Exception):
    def __init__(self, skip_sync: bool) -> None:
        self.skip_sync = skip_sync


class _Horovods:
    """Keeps one value, as `ObjectState` does."""

    def __init__(self) -> None:
        self.step = self.kept = 0
        self.others_came = False

    def save(self) -> None:
        self.kept = self.step

    def restore(self) -> None:
        self.step = self.kept

    def sync(self) -> None:
        self.step = self.kept

    def check_host_updates(self) -> None:
        if self.others_came:
            raise _HostsUpdated(skip_sync=True)


class _Carried:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = False

    def save(self) -> None:
        self.calls.append("save")

    def share(self) -> Any:
        if self.fails:
            raise ConnectionError
        self.calls.append("tell")
        return lambda: self.calls.append("take over")


class _State(CarryingState, _Horovods):
    def __init__(self, carried: list[_Carried]) -> None:
        super().__init__()
        self.all = carried
        self._commits = 0

    def _carried(self) -> Any:
        return self.all

    def _hosts_updated(self) -> type[Exception]:
        return _HostsUpdated


def test_a_commit_keeps_nothing_before_all_ranks_have_told_everything() -> None:
    state = _State([_Carried(), _Carried()])
    state.step = 1
    state.commit()
    assert [carried.calls for carried in state.all] == [["tell", "take over", "save"]] * 2
    state.step, state.all[1].fails = 2, True
    with pytest.raises(ConnectionError):
        state.commit()
    assert state.all[0].calls[3:] == ["tell"]
    assert state.all[1].calls[3:] == []
    assert (state.kept, state._commits) == (1, 1)


def test_values_go_on_with_the_weights_when_hosts_change() -> None:
    state = _State([_Carried()])
    state.step = 1
    state.commit()
    state.step, state.others_came = 7, True
    with pytest.raises(_HostsUpdated) as caught:
        state.check_host_updates()
    assert not caught.value.skip_sync
    assert (state.kept, state.all[0].calls[-1]) == (7, "save")
