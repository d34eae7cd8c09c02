"""Functions by value: the registry of modules that cloudpickle keeps for the process is left as it was found."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest

from unisono.serialization.functions import dumps

MODULE = sys.modules[__name__]


def three() -> int:
    return 3


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns after each few bytecodes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty")
def test_threads_send_functions_of_one_module_at_a_time() -> None:
    with ThreadPoolExecutor(2) as pool:
        sent = list(pool.map(lambda _: dumps(three, MODULE), range(200)))
    assert {pickle.loads(each)() for each in sent} == {3}
    assert MODULE.__name__ not in cloudpickle.list_registry_pickle_by_value()


def test_a_registration_of_the_users_stays() -> None:
    cloudpickle.register_pickle_by_value(MODULE)
    try:
        dumps(three, MODULE)
        assert MODULE.__name__ in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(MODULE)
