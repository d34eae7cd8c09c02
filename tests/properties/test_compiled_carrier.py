"""Messages that the compiled class carries are those that the class of Python does, whatever comes in between."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_kit import COMPILED, PLAIN, both
from hypothesis import example, given, settings
from hypothesis import strategies as st

import unisono as un
from unisono.transports._mpi_carrier import HEADER

ERRORS = {"MPI": KeyError("MPI"), "interrupt": KeyboardInterrupt("stop"), "late": un.errors.CommTimeoutError("late")}
LOOKS, NUMBERS = 3, 4
CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "moved": lambda tensor: setattr(tensor, "data", torch.zeros(4)),
    "shortened": lambda tensor: tensor.resize_(2),
    "of another dtype": lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
    "nothing": lambda tensor: None,
}


class Lock:
    """Tells how often it is held, and fails to be released when it is told to."""

    def __init__(self) -> None:
        self.held, self.jammed = 0, False

    def acquire(self) -> bool:
        self.held += 1
        return True

    def release(self) -> None:
        self.held -= 1
        if self.jammed:
            raise RuntimeError("jammed")

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Mpi:
    """As MPI: what is begun is done after some tests of it."""

    def __init__(self, log: list[Any], lock: Lock | None, step: dict[str, Any]) -> None:
        self.log, self.lock, self.step, self.begun = log, lock, step, 0
        self.outer = self

    class Request:
        def __init__(self, mpi: Any, number: int) -> None:
            self.mpi, self.number, self.left = mpi, number, mpi.step["tests"]

        def Test(self) -> Any:  # noqa: N802  # MPI's name
            mpi = self.mpi
            mpi.log.append(("test", self.number, mpi.lock and mpi.lock.held))
            if mpi.step["fails"] == ("test", self.number):
                raise ERRORS[mpi.step["how"]]
            if mpi.step["changes"] == ("test", self.number):
                CHANGES[mpi.step["change"]](mpi.tensor)
            self.left -= 1
            if self.left >= 0:
                return False
            if self.number == 0 and mpi.step["arrives"] is not None:
                mpi.envelope[: len(mpi.step["arrives"])] = mpi.step["arrives"]
            return True

    def begin(self, *given: Any) -> Any:
        what = bytes(given[0][0]) if isinstance(given[0], list) else given[0]
        self.log.append(("begin", what, given[1:], self.lock and self.lock.held))
        number, self.begun = self.begun, self.begun + 1
        if self.step["fails"] == ("begin", number):
            raise ERRORS[self.step["how"]]
        if self.step["changes"] == ("begin", number):
            CHANGES[self.step["change"]](self.tensor)
        return self.Request(self, number)


def carrier_of(
    kinds: dict[str, Any], log: list[Any], mpi: Mpi, tensor: torch.Tensor, receives: bool, inline: bool
) -> Any:
    class Letter(kinds["Carrier"]):  # type: ignore[misc]  # whichever it is
        def _see_through(self, request: Any, tensor: Any, deadline: float) -> None:
            log.append(("see through", request.number, deadline))
            if mpi.step["fails"] == ("wait", request.number):
                raise ERRORS[mpi.step["how"]]
            while not request.Test():
                pass

        def _unfit(self, tensor: Any) -> None:
            raise un.errors.MismatchError("unfit")

        def _ended(self, error: BaseException, under_way: list[Any], tensor: Any) -> BaseException:
            log.append(("ended", type(error), [request.number for request in under_way], self.busy))
            if not isinstance(error, KeyError):
                return error
            told = un.errors.CommError("told")
            told.__cause__ = error
            return told

    header = HEADER.pack(tensor.numel(), 0, b"float32")
    envelope = bytearray(64) if receives else bytearray(header) + bytes(tensor.nbytes if inline else 0)
    mpi.envelope, mpi.tensor = envelope, tensor
    rest = None if inline else "the rest"
    first = ([envelope, "bytes"], 1, 6)
    more = (tensor, tensor.nbytes, rest, 1, itertools.count(2), NUMBERS, receives, LOOKS)
    return Letter(mpi.lock, mpi.begin, envelope, first, header, *more)


ARRIVALS = {
    "fits": HEADER.pack(4, 9, b"float32") + torch.arange(4.0).numpy().tobytes(),
    "of another number": HEADER.pack(4, 2**40, b"float32") + torch.arange(4.0, 8.0).numpy().tobytes(),
    "longer": HEADER.pack(5, 0, b"float32"),
    "of another dtype": HEADER.pack(4, 0, b"float64"),
    "of a longer name": HEADER.pack(4, 0, b"float32x"),
}
STEPS = st.fixed_dictionaries(
    {
        "tests": st.integers(0, LOOKS + 2),
        "arrives": st.sampled_from([*ARRIVALS, "fits", "fits"]),
        "fails": st.one_of(
            st.none(), st.none(), st.tuples(st.sampled_from(["begin", "test", "wait"]), st.integers(0, 1))
        ),
        "how": st.sampled_from(list(ERRORS)),
        "changes": st.one_of(st.none(), st.none(), st.tuples(st.sampled_from(["begin", "test"]), st.integers(0, 1))),
        "change": st.sampled_from(list(CHANGES)),
        "jammed": st.sampled_from([False] * 9 + [True]),
    }
)


def played(kinds: dict[str, Any], steps: list[dict[str, Any]], receives: bool, inline: bool, locked: bool) -> list[Any]:
    log: list[Any] = []
    lock, tensor = Lock() if locked else None, torch.full((4,), 7.0)
    mpi = Mpi(log, lock, steps[0])
    carrier = carrier_of(kinds, log, mpi, tensor, receives, inline)
    for step in steps:
        mpi.step, mpi.begun = {**step, "arrives": ARRIVALS[step["arrives"]] if receives else None}, 0
        if lock:
            lock.jammed = step["jammed"]
        try:
            log.append(carrier.carry(tensor, 5.0))
        except BaseException as error:
            log.append((type(error), str(error), type(error.__cause__)))
            log.append((carrier.busy, carrier.take()))
            tensor = tensor.detach().clone()
            carrier = carrier_of(kinds, log, mpi, tensor, receives, inline)
        else:
            log.append((carrier.busy, carrier.take(), carrier.take()))
        log.append((carrier.busy, tensor.tolist(), lock and lock.held))
        tensor += 1
    return log


def step_of(**other: Any) -> dict[str, Any]:
    usual = {"tests": 0, "arrives": "fits", "fails": None, "how": "MPI", "changes": None, "change": "moved"}
    return {**usual, "jammed": False, **other}


@both
@settings(max_examples=10 * settings.default.max_examples)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=6),
    receives=st.booleans(),
    inline=st.booleans(),
    locked=st.booleans(),
)
@example([step_of(jammed=True), step_of()], False, False, True)
@example([step_of(jammed=True, fails=("begin", 1))], False, False, True)
@example([step_of(changes=("test", 0)), step_of()], True, True, False)
@example([step_of(changes=("test", 0), change="shortened")], True, False, False)
@example([step_of(), step_of(arrives="of a longer name"), step_of()], True, True, False)
@example([step_of(tests=LOOKS + 1), step_of(tests=LOOKS + 1, fails=("test", 1), how="interrupt")], True, False, True)
def test_messages_are_carried_alike(steps: list[dict[str, Any]], receives: bool, inline: bool, locked: bool) -> None:
    assert played(COMPILED, steps, receives, inline, locked) == played(PLAIN, steps, receives, inline, locked)


@both
@pytest.mark.parametrize("receives", [True, False])
def test_a_carrier_is_let_go_of_though_it_knows_itself(receives: bool) -> None:
    for kinds in (COMPILED, PLAIN):
        mpi = Mpi([], None, {})
        carrier = carrier_of(kinds, [], mpi, torch.zeros(4), receives, True)
        mpi.lock, mpi.outer = carrier, carrier
        gone = weakref.ref(mpi)
        del mpi, carrier
        gc.collect()
        assert gone() is None


@both
def test_a_carrier_that_cannot_be() -> None:
    here = torch.zeros(4)

    def made(**other: Any) -> Any:
        envelope = bytearray(56)
        usual = {
            "lock": None,
            "begin": print,
            "envelope": envelope,
            "first": (),
            "header": bytes(40),
            "tensor": torch.zeros(4),
            "nbytes": 16,
            "rest": None,
            "peer": 1,
            "numbers": itertools.count(),
            "most": 4,
            "receives": False,
            "looks": 1,
        }
        return COMPILED["Carrier"](*{**usual, **other}.values())

    for wrong in ({"envelope": bytearray(55)}, {"header": bytes(39)}, {"nbytes": -1}, {"most": 0}, {"numbers": []}):
        with pytest.raises(ValueError, match="40 bytes"):
            made(**wrong)
    with pytest.raises(TypeError):
        made(envelope=bytes(56))
    with pytest.raises(RuntimeError, match="once"):
        made().__init__(*range(13))
    with pytest.raises(RuntimeError, match="not called"):
        COMPILED["Carrier"].__new__(COMPILED["Carrier"]).carry(None, 1.0)
    with pytest.raises(TypeError, match="2 arguments"):
        made().carry(None)
    free = made(begin=lambda *given: Mpi.Request(Mpi([], None, step_of(arrives=None)), 0), tensor=here)
    assert not free.take()
    free.carry(here, 1.0)
    with pytest.raises(RuntimeError, match="taken"):
        free.carry(here, 1.0)
