from __future__ import annotations

import json
import sys

import pytest

from hvd_compress import OneBit
from tests.python_calls import count_calls


def test_what_comes_before_the_package_does_not_count_and_what_it_calls_does() -> None:
    def work() -> None:
        json.dumps(1)
        OneBit().get_config()
        json.dumps(2)

    calls = count_calls(work)
    assert next(iter(calls)).startswith("hvd_compress.")
    assert calls["json.dumps"] == 1
    assert calls == count_calls(work)
    assert sys.getprofile() is None


def test_counting_ends_where_work_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        count_calls(lambda: 1 / 0)
    assert sys.getprofile() is None
