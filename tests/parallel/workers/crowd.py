"""Many more ranks than cores: five steps with every compressor."""

from __future__ import annotations

from tests.parallel.cases import Cases
from tests.parallel.workers.common import check_equal_on_all_ranks
from tests.parallel.workers.replicas import COMPRESSORS, run

cases = Cases()


@cases.each(COMPRESSORS)
def stay_equal(compressor: object) -> None:
    model, _, _ = run(compressor, "two_phase", steps=5)
    check_equal_on_all_ranks(model)
