"""Codecs, which average a flat bucket over all ranks in compressed form: interface and lookup by name."""

from __future__ import annotations

import copy
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Self

import torch

from unisono.communicator import Communicator
from unisono.core.registry import Registry

__all__ = ["CODECS", "DTYPES", "Codec", "Spec", "SteppedCodec", "accumulation_dtype", "check_bucket", "resolve"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that a bucket may have."""


class Codec(ABC):
    """Codec that averages a flat bucket over all ranks in compressed form. One object per bucket; `clone` makes more.

    To add a codec, create a file in `unisono.compression.codecs` that ends in `CODEC = YourCodec`, or register an entry
    point of the group `unisono.compression.codecs` in another package. The codec's `average` must call `prepare` first,
    and its `repr` must show its settings, which all ranks compare. `unisono.testing.codecs` has conformance checks for
    codecs.

    Attributes:
        name: Name by which `resolve` finds the codec.

    Example:
        >>> class Exact(un.compression.Codec):
        ...     name = "exact"
        ...     def average(self, flat, comm, shapes, kept=None):
        ...         self.prepare(flat, comm, shapes, kept)
        ...         if kept is not None:
        ...             kept.copy_(flat)
        ...         comm.all_reduce(flat, "avg")
        ...     def error_bound(self, flat, others, shapes):
        ...         return 0.0
        ...     def wire_bytes(self, numel, shapes, size, itemsize):
        ...         return 2 * (size - 1) / size * numel * itemsize
        >>> from unisono.testing.codecs import Bucket, check_codec
        >>> check_codec(Exact, size=2, bucket=Bucket(shapes=[(3, 4), (5,)]))
    """

    name: ClassVar[str]
    checkpoint_policy: ClassVar[str] = "keep"
    _agreed: tuple[weakref.ref[Communicator], object] | None = None

    @abstractmethod
    def average(
        self,
        flat: torch.Tensor,
        comm: Communicator,
        shapes: Sequence[torch.Size],
        kept: torch.Tensor | None = None,
    ) -> None:
        """Replace this rank's contribution with the mean of all ranks' compressed contributions.

        Collective. The result replaces `flat`, and is bitwise identical on all ranks.

        The result is the mean of `kept` over all p ranks, up to rounding in the bucket's dtype. A rank that also
        encodes a sum of contributions subtracts p times that encoding's loss from its own `kept`, so that error
        feedback compensates for the loss. With only one rank, the contribution is still encoded and decoded, with the
        same kind of loss.

        Args:
            flat: One-dimensional contiguous tensor of float16, bfloat16, float32 or float64.
            comm: Communicator of the ranks whose contributions are averaged.
            shapes: Shapes of the parameters stored consecutively in `flat`.
            kept: Optional output with flat's shape and dtype: the part of this rank's contribution that compression has
                preserved.

        Raises:
            MismatchError: Ranks have different codecs, or different buckets.
            TypeError, ValueError: The arguments are not as described; nothing was sent.
            CommTimeoutError, PeerLostError: See `unisono.errors`; the communicator is then broken.
        """

    def average_masked(
        self, flat: torch.Tensor, comm: Communicator, shapes: Sequence[torch.Size], used: Sequence[bool]
    ) -> None:
        """Average a bucket as `average` does, for a caller that ignores the means of some parameters.

        Args:
            flat: Bucket as for `average`, with zeros for the parameters that are not used.
            comm, shapes: As for `average`.
            used: For each shape, whether its parameter is used; the same on all ranks.

        Raises:
            CommError, TypeError, ValueError: As for `average`.

        Example:
            >>> codec = un.compression.error_feedback("topk")
            >>> flat = torch.tensor([4.0, 1.0, 0.0])
            >>> with un.init() as comm:
            ...     codec.average_masked(flat, comm, [torch.Size([2]), torch.Size([1])], used=[True, False])
            >>> flat, codec.state_dict()["residual"]
            (tensor([4., 0., 0.]), tensor([0., 1., 0.]))
        """
        self.average(flat, comm, shapes)

    @abstractmethod
    def error_bound(self, flat: torch.Tensor, others: Sequence[torch.Tensor], shapes: Sequence[torch.Size]) -> float:
        """Return an upper bound on the Euclidean norm of `flat - kept`, for a codec without state.

        Args:
            flat: This rank's contribution, as for `average`.
            others: The other ranks' contributions, in any order, for codecs that also encode the sum of all
                contributions.
            shapes: As for `average`.

        Returns:
            The bound; infinite if `kept` may be infinite.

        Example:
            >>> flat = torch.tensor([4.0, 3.0])
            >>> round(un.compression.topk(ratio=0.5).error_bound(flat, [], [flat.shape]), 1)
            3.6
        """

    @abstractmethod
    def wire_bytes(self, numel: int, shapes: Sequence[torch.Size], size: int, itemsize: int) -> float:
        """Return how many bytes a rank sends in one call to `average`, as a mean over ranks.

        An all_reduce over p ranks counts as the theoretical minimum, 2(p-1)/p times its message size. The first call
        for a bucket also sends 8 bytes to every other rank, to check that all ranks use the same codec and shapes.

        Args:
            numel: Elements in the bucket.
            shapes: As for `average`.
            size: Number of ranks.
            itemsize: Bytes per element of the bucket.

        Example:
            >>> un.compression.bf16().wire_bytes(1000, [torch.Size([1000])], size=4, itemsize=4)
            3000.0
        """

    def clone(self) -> Self:
        """Return a codec with the same settings, but no state, for another bucket."""
        fresh = copy.deepcopy(self)
        fresh.reset()
        return fresh

    def reset(self) -> None:
        """Discard the state left by earlier calls of `average`."""
        self._agreed = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state left by earlier calls of `average`: tensors, numbers, strings and containers of them.

        Example:
            >>> codec, flat = un.compression.randomk(seed=7), torch.ones(4)
            >>> with un.init() as comm:
            ...     codec.average(flat, comm, [flat.shape])
            >>> other = codec.clone()
            >>> codec.state_dict(), other.state_dict()
            ({'step': 1}, {'step': 0})
            >>> other.load_state_dict(codec.state_dict())
            >>> other.shared_state()
            1
            >>> other.reset()
            >>> other.state_dict()
            {'step': 0}
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state. Every rank loads the state that it saved.

        Args:
            state: Result of `state_dict`; its tensors are copied.

        Raises:
            ValueError: The state's keys differ, because it belongs to another kind of codec.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError(f"the state of {self!r} has {sorted(self.state_dict())}, not {sorted(state)}")
        self._agreed = None

    def shared_state(self) -> object:
        """Return the part of the state that must be equal on all ranks; `prepare` compares it as a string."""
        return None

    def prepare(
        self,
        flat: torch.Tensor,
        comm: Communicator,
        shapes: Sequence[torch.Size],
        kept: torch.Tensor | None = None,
    ) -> None:
        """Check the arguments of `average`; the first call for a communicator and bucket also compares ranks' codecs.

        Args:
            flat, comm, shapes, kept: As for `average`.

        Raises:
            TypeError: `flat` or `kept` is not a tensor of a dtype that `average` accepts.
            ValueError: `flat` or `kept` is not one-dimensional, contiguous and detached; `shapes` and `flat` differ in
                number of elements; or `kept` differs from `flat` in length, dtype or device or shares its memory.
            MismatchError: Codecs, their settings, `shared_state`, dtypes or shapes differ between ranks.

        Cost: one `Communicator.flush_agreements` in the first call, and whenever the communicator or bucket differs
        from the last call's.
        """
        check_bucket(flat, shapes, kept)
        bucket = (flat.dtype, tuple(shapes))
        if self._agreed is None or self._agreed[0]() is not comm or self._agreed[1] != bucket:
            sizes = [tuple(shape) for shape in shapes]
            how = {"codec": repr(self), "state": str(self.shared_state()), "dtype": flat.dtype, "shapes": sizes}
            comm.agree(how, "compression")
            comm.flush_agreements()
            self._agreed = (weakref.ref(comm), bucket)

    def __repr__(self) -> str:
        names: list[str] = [field.name for field in fields(self)] if is_dataclass(self) else []
        return f"{self.name}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __getstate__(self) -> dict[str, Any]:
        # A copy is used for another bucket or in another process, where the ranks must compare their codecs again.
        return {key: value for key, value in self.__dict__.items() if key != "_agreed"}


class SteppedCodec(Codec):
    """Base class for codecs that draw random numbers in each call of `average`. All ranks draw the same numbers.

    Attributes:
        seed: Seed of the draws; the same on all ranks.
    """

    seed: int
    _step = 0

    def generator(self) -> torch.Generator:
        """Return a CPU generator for this call of `average`, independent of all other generators."""
        return torch.Generator().manual_seed((self.seed * 0x9E3779B1 + self._step) % 2**32)

    def reset(self) -> None:
        super().reset()
        self._step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._step = int(state["step"])

    def shared_state(self) -> object:
        return self._step


def check_bucket(flat: torch.Tensor, shapes: Sequence[torch.Size], kept: torch.Tensor | None = None) -> None:
    """Raise `TypeError` or `ValueError` unless `flat` is a valid bucket with these shapes, and `kept` matches it."""
    for name, tensor in (("flat", flat), ("kept", kept)):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}; only floating-point gradients can be compressed")
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.requires_grad:
            raise ValueError(
                f"{name} must be one-dimensional, contiguous and detached, not of shape {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}, requires_grad={tensor.requires_grad}"
            )
    total = sum(math.prod(shape) for shape in shapes)
    if total != flat.numel():
        raise ValueError(f"the shapes have {total} elements in all, but flat has {flat.numel()}")
    if kept is None:
        return
    if (kept.dtype, kept.numel(), kept.device) != (flat.dtype, flat.numel(), flat.device):
        raise ValueError(
            f"kept must be like flat, {flat.numel()} of {flat.dtype} on {flat.device}, "
            f"not {kept.numel()} of {kept.dtype} on {kept.device}"
        )
    if flat.numel() and abs(kept.data_ptr() - flat.data_ptr()) < flat.nbytes:
        raise ValueError("kept and flat share memory; pass separate tensors")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of this dtype are summed.

    Example:
        >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


CODECS: Registry[Callable[..., Codec]] = Registry("codec", "unisono.compression.codecs", "CODEC")
"""All codecs: `CODECS["int8"]` is a class."""

Spec = Codec | Callable[[], Codec] | str
"""Types that specify a codec."""


def resolve(spec: Spec) -> Codec:
    """Return the codec that `spec` specifies.

    Args:
        spec: A codec, which is returned unchanged; a class or function that returns a codec when called without
            arguments; or a name in `CODECS`.

    Raises:
        ValueError: There is no codec of that name.
        TypeError: `spec`, or its result, is not a codec.

    Example:
        >>> un.compression.resolve("int8"), un.compression.resolve(un.compression.int8)
        (int8(block=1024), int8(block=1024))
        >>> un.compression.resolve("int3")
        Traceback (most recent call last):
        ...
        ValueError: unknown codec 'int3'; known: ...
    """
    made = CODECS[spec]() if isinstance(spec, str) else spec
    if not isinstance(made, Codec) and callable(made):
        made = made()
    if not isinstance(made, Codec):
        raise TypeError(
            f"a codec, a function that makes one, or one of {', '.join(CODECS.names())} is needed, not {spec!r}"
        )
    return made
