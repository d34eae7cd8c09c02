"""Collectives in which every rank gives and takes: all_gather, all_to_all, and their single-tensor forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from typing_extensions import Unpack

from unisono import plan as plans
from unisono.calls.caller import Async, Blocking, Caller
from unisono.tensors import check_apart
from unisono.types import Work

__all__ = ["Exchanging"]


class Exchanging(Caller):
    """Collective: every rank of the group calls each of these, in the same order. Any dtype."""

    @overload
    def all_gather(
        self, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_gather(self, tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, **how: Unpack[Async]) -> Work: ...
    def all_gather(
        self,
        tensor_list: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """`tensor_list[r]` on every rank becomes the tensor of rank r.

        Collective. Ranks' tensors may differ in length, as all ranks' lists do alike.
        Cost: (p-1)/p of the list's bytes sent by each rank.

        Example:
            >>> def program(comm):
            ...     out = [torch.zeros(r + 1) for r in range(comm.size)]
            ...     comm.all_gather(out, torch.full((comm.rank + 1,), float(comm.rank)))
            ...     return [t.tolist() for t in out]
            >>> un.launch(program, nprocs=2, backend="thread")[0]
            [[0.0], [1.0, 1.0]]
        """
        if (
            algorithm is None
            and not async_op
            and self._engine.quickly("all_gather", tensor_list, tensor, "", None, timeout)
        ):
            return None
        self._enter("all_gather")
        self._check_tensor(tensor, "the tensor")
        self._check_list(tensor_list, "tensor_list", tensor, written=True)
        if tensor_list[self.rank].numel() != tensor.numel():
            raise ValueError(
                f"tensor_list[{self.rank}] is for this rank, whose tensor has {tensor.numel()} elements, "
                f"not {tensor_list[self.rank].numel()}"
            )
        self._check_targets(tensor_list, "tensor_list", tensor)
        plan = plans.all_gather(self._staging(), tensor_list, tensor, self.rank)
        return self._engine.run(plan, "all_gather", algorithm, async_op, timeout)

    @overload
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, **how: Unpack[Blocking]) -> None: ...
    @overload
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, **how: Unpack[Async]) -> Work: ...
    def all_gather_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """As `all_gather`, into one tensor of p times `input`'s elements, rank 0's first."""
        if (
            algorithm is None
            and not async_op
            and self._engine.quickly("all_gather_single", output, input, "", None, timeout)
        ):
            return None
        self._enter("all_gather_single")
        self._check_tensor(input, "input")
        self._check_tensor(output, "output", written=True)
        self._check_like(input, "input", output)
        if output.numel() != input.numel() * self.size:
            raise ValueError(
                f"output must have {self.size} times the {input.numel()} elements of input, not {output.numel()}"
            )
        if output.is_contiguous():
            self._check_targets(output.detach().view(-1).split([input.numel()] * self.size), "output", input)
        plan = plans.all_gather_single(self._staging(), output, input, self.rank, self.size)
        return self._engine.run(plan, "all_gather_single", algorithm, async_op, timeout)

    @overload
    def all_to_all(
        self, output_list: Sequence[torch.Tensor], input_list: Sequence[torch.Tensor], **how: Unpack[Blocking]
    ) -> None: ...
    @overload
    def all_to_all(
        self, output_list: Sequence[torch.Tensor], input_list: Sequence[torch.Tensor], **how: Unpack[Async]
    ) -> Work: ...
    def all_to_all(
        self,
        output_list: Sequence[torch.Tensor],
        input_list: Sequence[torch.Tensor],
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """`output_list[s]` on rank r becomes `input_list[r]` of rank s.

        Collective. Lengths are free, as long as both ends of each pair agree.
        Cost: (p-1)/p of the inputs' bytes sent by each rank.

        Example:
            >>> def program(comm):
            ...     out = [torch.zeros(1) for _ in range(comm.size)]
            ...     comm.all_to_all(out, [torch.tensor([10.0 * comm.rank + r]) for r in range(comm.size)])
            ...     return [t.item() for t in out]
            >>> un.launch(program, nprocs=2, backend="thread")
            [[0.0, 10.0], [1.0, 11.0]]
        """
        if (
            algorithm is None
            and not async_op
            and self._engine.quickly("all_to_all", output_list, input_list, "", None, timeout)
        ):
            return None
        self._enter("all_to_all")
        if not isinstance(input_list, Sequence) or not input_list:
            raise TypeError(f"input_list must be a list of {self.size} tensors")
        self._check_list(input_list, "input_list", input_list[0])
        self._check_list(output_list, "output_list", input_list[0], written=True)
        return self._all_to_all("all_to_all", output_list, input_list, algorithm, async_op, timeout)

    @overload
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        **how: Unpack[Blocking],
    ) -> None: ...
    @overload
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = ...,
        input_split_sizes: Sequence[int] | None = ...,
        **how: Unpack[Async],
    ) -> Work: ...
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """As `all_to_all`, with rows of one tensor: split along dimension 0, evenly or as the sizes say."""
        name, even = "all_to_all_single", output_split_sizes is None and input_split_sizes is None
        if even and algorithm is None and not async_op and self._engine.quickly(name, output, input, "", None, timeout):
            return None
        self._enter(name)
        self._check_tensor(input, "input")
        self._check_tensor(output, "output", written=True)
        self._check_like(output, "output", input)
        outputs = self._split_rows(output, output_split_sizes, "output")
        inputs = self._split_rows(input, input_split_sizes, "input")
        return self._all_to_all(name, outputs, inputs, algorithm, async_op, timeout)

    def _all_to_all(
        self,
        name: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        algorithm: str | None,
        async_op: bool,
        timeout: float | None,
    ) -> Work | None:
        given, taken = inputs[self.rank].numel(), outputs[self.rank].numel()
        if given != taken:
            raise ValueError(f"this rank gives itself {given} elements but expects {taken}")
        check_apart(
            [(f"output_list[{r}]", t) for r, t in enumerate(outputs)],
            [(f"input_list[{r}]", t) for r, t in enumerate(inputs)],
        )
        plan = plans.all_to_all(self._staging(), outputs, inputs, self.rank, self.size)
        return self._engine.run(plan, name, algorithm, async_op, timeout)

    def _split_rows(self, tensor: torch.Tensor, sizes: Sequence[int] | None, name: str) -> Sequence[torch.Tensor]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if tensor.dim() == 0:
            raise ValueError(f"{name} has no dimension to split; it must have at least one")
        if sizes is None:
            if rows % self.size:
                raise ValueError(f"{name} has {rows} rows, which {self.size} ranks do not divide; pass split sizes")
            sizes = [rows // self.size] * self.size
        if len(sizes) != self.size or min(sizes) < 0 or sum(sizes) != rows:
            raise ValueError(
                f"the split sizes of {name} must be {self.size} numbers that sum to its {rows} rows, not {list(sizes)}"
            )
        rows_by_rank: tuple[torch.Tensor, ...] = tensor.detach().split(list(sizes))
        return rows_by_rank
