"""What is refused in elastic runs, whose ranks come and go, and that it is not refused in others."""

from __future__ import annotations

import pytest

from hvd_compress._keras.daso import DASOCallback
from hvd_compress._keras.diloco import DiLoCoCallback
from hvd_compress._keras.eventgrad import EventGraDCallback
from hvd_compress.elastic import refuse_elastic_averaging
from hvd_compress.errors import UnsupportedError


def test_averaging_of_parameters_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    refuse_elastic_averaging("anything", "nobody knows why")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(UnsupportedError, match=r"anything in an elastic run: nobody knows why. .*hvd.DiLoCo"):
        refuse_elastic_averaging("anything", "nobody knows why")


def test_ddp_has_no_state_of_elastic_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from hvd_compress import ddp

    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"hvd_compress.ddp.DiLoCo in an elastic run: no state"):
        ddp.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", [DASOCallback, DiLoCoCallback, EventGraDCallback])
def test_keras_callbacks_have_no_state_of_elastic_runs(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(UnsupportedError, match=f"{kind.__name__} in an elastic run: no state"):
        kind()


@pytest.mark.parametrize("ranks_per_node", [None, 2])
@pytest.mark.parametrize("kind", ["DASO", "DiLoCo"])
def test_nodes_of_several_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, ranks_per_node: int | None
) -> None:
    torch = pytest.importorskip("torch")
    import hvd_compress.torch as hvd

    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    model = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    told = rf"{kind}\(ranks_per_node={ranks_per_node}\) in an elastic run: .*process sets.* Use ranks_per_node=1"
    with pytest.raises(UnsupportedError, match=told):
        getattr(hvd, kind)(sgd, model.named_parameters(), ranks_per_node=ranks_per_node)
