"""Fast path of a transport that performs collectives with another library's calls."""

from __future__ import annotations

from typing import Any, NoReturn

from unisono.core import clock
from unisono.core.call import NATIVE, NOTHING_SENT, Call, Fingerprint
from unisono.core.collective import Collective
from unisono.core.flight_recorder import Activity
from unisono.core.numbers import Status
from unisono.core.tensors import HALVES, as_flat, copy_back, divide
from unisono.core.tracing import SINK
from unisono.core.transport import Transport
from unisono.core.types import ReduceOp
from unisono.errors import MismatchError

__all__ = ["PlainCalls"]

_OPS = {**{op.value: op for op in ReduceOp}, ReduceOp.AVG.value: ReduceOp.SUM}


class PlainCalls:
    """Fast path that passes the caller's tensor directly to another library's collective, without staging.

    Reductions to a root, barriers and collectives on several tensors take the general path, which calls the same
    transport methods.

    Args:
        transport: Transport that compares the collectives.
        plain: Transport that runs the collectives, as returned by `Transport.plain`.
        activity: This rank's activity, whose current call is the collective to run.
    """

    def __init__(self, transport: Transport, plain: Transport, activity: Activity) -> None:
        self._transport = transport
        self._plain = plain
        self._activity = activity
        self._devices = plain.devices - plain.host_staged

    def try_collective(
        self,
        collective: Collective,
        output: Any,
        input: Any,
        op: Any,
        root: Any,
        algorithm: str | None,
        deadline: float,
    ) -> Status:
        """As in `FastPath`. Calls that name an algorithm, and all calls during a recording, take the general path."""
        if not (collective.in_place and collective.moves) or algorithm is not None or SINK.get() is not None:
            return Status.UNSUPPORTED
        operation = None
        if collective.reduces:
            operation = _OPS.get(op) if isinstance(op, str) else None
            if operation is None or collective.root is not None:
                return Status.UNSUPPORTED
        elif type(root) is not int or not 0 <= root < self._plain.group.size:
            return Status.UNSUPPORTED
        contributes = root is None or root == self._plain.group.rank
        target = as_flat(output, collective.output, written=root is None or not contributes, devices=self._devices)
        average = operation is not None and op == ReduceOp.AVG.value
        if target is None or (average and not (target.is_floating_point() or target.is_complex())):
            return Status.UNSUPPORTED
        # As in `Staging.flat`, give stride 1 even to a single element.
        flat = target.as_strided((target.numel(),), (1,))
        record = self._activity.now
        assert record is not None
        fingerprint = Fingerprint(
            record[1] or 0,
            collective.name,
            str(op) if collective.reduces else None,
            root,
            str(flat.dtype).removeprefix("torch."),
            (flat.numel(),),
            flat.device.type,
            NATIVE,
            shape=tuple(target.shape),
            site=record[3],
        )
        call = Call(
            collective.family,
            (flat,) if contributes else (),
            (flat,),
            operation,
            root=root,
            fingerprint=fingerprint,
        )
        if not self._plain.supports(call):
            return Status.UNSUPPORTED
        self._transport.compare(call, deadline)
        early = flat.dtype in HALVES
        if average and early:
            # Divide first, because the sum of half-precision numbers could overflow.
            divide(flat, self._plain.group.size)
        self._plain.run(call).wait(max(deadline - clock.now(), 0.0))
        if average and not early:
            divide(flat, self._plain.group.size)
        if target is not output:
            copy_back(output, target)
        return Status.OK

    def mismatch(self, fingerprint: Fingerprint) -> NoReturn:
        """Raise a `MismatchError`; usually, the transport's `compare` has raised one before this is called."""
        raise MismatchError(f"ranks differ in what they are about to do. {NOTHING_SENT}")

    def takes(self, tensor: Any, peer: int, tag: int) -> bool:
        """Return False, because `PlainCalls` does not support messages."""
        return False

    def try_message(self, name: str, tensor: Any, peer: int, tag: int, deadline: float) -> Status:
        """Return `UNSUPPORTED`, because `PlainCalls` does not support messages."""
        return Status.UNSUPPORTED
