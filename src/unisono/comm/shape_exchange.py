"""Collectives on tensors whose shapes the other ranks don't know, preceded by an exchange of shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.collectives.algorithms import find
from unisono.collectives.arguments import check_list, check_rank
from unisono.collectives.selection import FEWEST_BYTES
from unisono.comm.engine import Engine
from unisono.core.call import NATIVE, Call
from unisono.core.collective import Collective, header_of
from unisono.core.staging import current_streams, entered
from unisono.core.tensors import Buffer, check_tensor
from unisono.core.transport import Tensors
from unisono.core.types import Timeout
from unisono.core.work import ResultWork
from unisono.errors import MismatchError

__all__ = ["ShapeExchange", "exchange_shapes", "run_uneven"]

_MOST_DIMENSIONS = 16
_NUMBERS = 2 + _MOST_DIMENSIONS
_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_REFUSED = -1
"""Replaces the dtype's index in a header if the root has nothing that can be sent."""


class ShapeExchange:
    """One rank's view of a collective: the headers that the rank sends and receives, and the tensors they describe.

    The output will be on the device of this rank's tensors, or on the communicator's device if this rank has none.
    Headers are in CPU memory if the transport supports CPU tensors. A sending root that rejects its tensors does not
    raise here: the other ranks are waiting for its headers, which report the rejection instead.

    Args:
        engine: Engine of the communicator.
        collective: A collective that allocates its output.
        root: Root of the collective, if it has one.
        tensors: The argument of this rank's call.

    Attributes:
        header: Collective that moves the headers.
        mine, table: Input and output of the header collective. A header is the dtype, number of dimensions and shape of
            a tensor; `mine` contains a header for each tensor that this rank sends; `table` contains the headers that
            this rank needs.
        input, output: Arguments of the collective itself; the output exists after `allocate`.
        device: Device of the output.
        lengths: See `Call`.
    """

    def __init__(self, engine: Engine, collective: Collective, root: int | None, tensors: Tensors) -> None:
        self._what = collective
        self._root = root or 0
        self._rank = engine.group.rank
        self._size = engine.group.size
        self._devices = engine.transport.devices
        self._refusal: Exception | None = None
        self.header: Collective = header_of(collective)
        self.output: Any = None
        self.lengths: tuple[int, ...] = ()
        given = tuple[torch.Tensor, ...]()
        if collective.contributes(self._rank, self._root):
            try:
                given = self._checked(tensors)
            except (TypeError, ValueError) as error:
                if collective.root != "src":
                    raise
                self._refusal = error
        elif tensors is not None:
            raise ValueError(f"{collective.input} is for rank {self._root} only; pass None on the other ranks")
        rows = [[_DTYPES.index(t.dtype), t.dim(), *t.shape, *[0] * (_MOST_DIMENSIONS - t.dim())] for t in given] or [
            [_REFUSED] * _NUMBERS
        ] * self._size
        self.input: Any = given if collective.scatters and given else given[0] if given else None
        self.device: torch.device = given[0].device if given else torch.device(engine.options.device)
        where = "cpu" if "cpu" in self._devices else self.device
        self.mine: torch.Tensor = torch.tensor(rows, dtype=torch.int64, device=where)
        self.table: torch.Tensor = self.mine if self.header.in_place else self.mine.new_empty(self._size, _NUMBERS)

    def _checked(self, tensors: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors that this rank sends, after checking them."""
        what = self._what
        name = self._what.input
        if what.scatters:
            if tensors is None and what.root is not None:
                raise ValueError(f"{name} must be given on rank {self._root}, one tensor per rank")
            found = check_list(tensors, name, self._size, self._devices, written=False)
        else:
            found = (check_tensor(tensors, "the tensor", self._devices, written=False),)
        for index, tensor in enumerate(found):
            label = f"{name}[{index}]" if what.scatters else "the tensor"
            if tensor.dim() > _MOST_DIMENSIONS:
                raise ValueError(f"{label} has {tensor.dim()} dimensions; at most {_MOST_DIMENSIONS} can be sent so")
            if _fixed(tensor.dtype, tensor.shape) != _fixed(found[0].dtype, found[0].shape):
                raise ValueError(
                    f"{label} has shape {tuple(tensor.shape)}, but {name}[0] has {tuple(found[0].shape)}; they may "
                    "differ in the first dimension only"
                )
        return found

    def allocate(self) -> None:
        """Allocate the output from the received table.

        Raises:
            MismatchError: Tensors on different ranks do not match.
            TypeError, ValueError: The root has rejected its tensors.
        """
        rows: list[list[int]] = self.table.tolist()
        if rows[0][0] == _REFUSED:
            raise self._refusal or ValueError(
                f"rank {self._root} passed no {self._what.input} that can be sent; its own error gives the reason"
            )
        kinds = [(_DTYPES[row[0]], torch.Size(row[2 : 2 + row[1]])) for row in rows]
        if len({_fixed(*kind) for kind in kinds}) > 1:
            quoted = ", ".join(f"{dtype} {tuple(shape)} on rank {rank}" for rank, (dtype, shape) in enumerate(kinds))
            raise MismatchError(
                f"ranks' tensors may differ in their first dimension only: {quoted.replace('torch.', '')}. "
                "Nothing was sent"
            )
        what = self._what
        shapes = [shape for _, shape in kinds]
        if what.root is not None and len(set(shapes)) > 1:
            self.lengths = tuple(shape.numel() for shape in shapes)
        if what.receives(self._rank, self._root):
            wanted = shapes if what.gathers else [shapes[self._rank]]
            blanks = [torch.empty(shape, dtype=kinds[0][0], device=self.device) for shape in wanted]
            self.output = blanks if what.gathers else blanks[0]


def _fixed(dtype: torch.dtype, shape: torch.Size) -> tuple[torch.dtype, int, torch.Size]:
    """Return the properties that must be equal on all ranks."""
    return dtype, len(shape), shape[1:]


def exchange_shapes(
    engine: Engine, what: Collective, tensors: Tensors, root: int | None = None, timeout: Timeout | None = None
) -> ShapeExchange:
    """Return the exchange of a blocking call, after moving the headers and allocating the output. Collective.

    Args:
        engine: Engine of the communicator.
        what: A collective that allocates its output.
        tensors: The argument of this rank's call.
        root: Root of the collective, if it has one.
        timeout: Limit for moving the headers.

    Raises:
        MismatchError: Tensors on different ranks do not match; this breaks the communicator.
        TypeError, ValueError: This rank or the root has rejected its tensors.
    """
    exchange = ShapeExchange(engine, what, root, tensors)
    engine.block(exchange.header, exchange.table, exchange.mine, root=root, timeout=timeout)
    try:
        exchange.allocate()
    except MismatchError as error:
        raise engine.failures.report(error, what.name) from None
    except (TypeError, ValueError):
        # No rank runs the collective for the data, but it counts, because an asynchronous call reserves its number in
        # advance.
        engine.activity.calls += 1
        raise
    return exchange


def run_uneven(
    engine: Engine,
    what: Collective,
    tensors: Buffer | Sequence[Buffer] | None,
    root: int | None,
    algorithm: str | None,
    async_op: bool,
    timeout: Timeout | None,
) -> Any:
    """Exchange shapes, allocate the output, and move the data.

    In a blocking call, the exchange of shapes and the data transfer may both use the fast path.
    """
    engine.enter(what.name)
    group = engine.group
    if what.root is not None:
        check_rank(root, what.root, group.size)
    if algorithm not in (None, NATIVE, FEWEST_BYTES):
        find(what.family, algorithm)
    if async_op:
        exchange = ShapeExchange(engine, what, root, tensors)
        streams = current_streams([exchange.device])

        def second(make: Callable[..., Call]) -> Call:
            with entered(streams):
                exchange.allocate()
                call = make(
                    what, exchange.output, exchange.input, None, root, algorithm, timeout, lengths=exchange.lengths
                )
                call.staging.follow((*call.inputs, *call.outputs))
                return call

        work = engine.run(
            exchange.header, exchange.table, exchange.mine, None, root, None, timeout, async_op=True, then=second
        )
        assert work is not None
        return ResultWork(work, lambda: exchange.output)
    exchange = exchange_shapes(engine, what, tensors, root, timeout)
    engine.block(
        what,
        exchange.output,
        exchange.input,
        root=root,
        algorithm=algorithm,
        timeout=timeout,
        lengths=exchange.lengths,
    )
    return exchange.output
