"""BatchNorm with statistics computed over the batches of all ranks, on the CPU or a GPU."""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.communicator import Communicator

__all__ = ["Normalise", "SyncBatchNorm", "batch_statistics", "convert_sync_batchnorm"]


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, `2d` and `3d` with statistics over all ranks' batches. Construction is collective.

    Batches may differ in length, and some may be empty. In training mode, forward and backward are collective: each
    rank that runs forward must also run backward. Gradients of weight and bias are local to each rank; gradient
    averaging treats them like any other gradients. In evaluation mode, the layer behaves like torch's layers.

    Args:
        num_features: Number of channels C. The input has shape (N, C) or (N, C, ...) and any floating-point dtype.
        comm: Communicator of the ranks that share statistics; duplicated for the layer, unless `dup` is False.
        eps, momentum, affine, track_running_stats, device, dtype: As in `torch.nn.BatchNorm1d`.
        dup: Whether to duplicate `comm`. If False, several layers may share `comm`, but it must not be used for
            anything else.
        more: Other arguments of BatchNorm in the installed version of torch.

    Raises:
        ValueError: The input has no channels or the wrong number of channels; or all ranks together have only one value
            per channel, so there is no variance.
        MismatchError: Ranks created layers of different kinds.

    Cost: in forward, one all_gather of 2C + 1 numbers of 8 bytes; in backward, one all_reduce of 2C numbers.

    Example:
        >>> from unisono.gradients.sync_batch_norm import SyncBatchNorm
        >>> def program(comm):
        ...     norm = SyncBatchNorm(1, comm, eps=0.0)
        ...     return norm(torch.tensor([[0.0], [2.0]]) + 2 * comm.rank).view(-1).tolist(), norm.running_mean.item()
        >>> un.launch(program, 2, "thread")[0]
        ([-1.4142135381698608, 0.0], 0.20000000298023224)
    """

    def __init__(
        self,
        num_features: int,
        comm: Communicator,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        dup: bool = True,
        **more: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **more)
        shared = _agreed_dup(comm, str(self), "layer") if dup else comm
        # Autograd may run the backward pass in another thread.
        shared.allow_any_thread()
        self._shared = _StatisticsComm(shared)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch. In training mode, the call and its backward pass are collective.

        Args:
            input: Tensor of shape (N, C) or (N, C, ...) and a floating-point dtype; N may be 0 in training mode.

        Returns: A new tensor of the same shape and dtype.

        Raises:
            ValueError: `input` has fewer than 2 dimensions or the wrong number of channels; or all ranks together have
                only one value per channel, which has no variance.
        """
        comm = self._shared.comm
        if not self.training or (comm is not None and comm.size == 1):
            return super().forward(input)
        if comm is None:
            raise RuntimeError(
                "this SyncBatchNorm was loaded from a file, which holds no communicator. Call "
                "convert_sync_batchnorm(model, comm) on all ranks"
            )
        self._check_input_dim(input)
        with torch.no_grad():
            total, mean, variance = batch_statistics(input, comm)
            if total == 1:
                raise ValueError(
                    f"one value per channel on all {comm.size} ranks together has no variance; use larger batches"
                )
            if self.track_running_stats and total:
                self._track(total, mean, variance)
            scale = (variance + self.eps).rsqrt()
        output = Normalise.apply(input, self.weight, self.bias, mean, scale, total, comm)  # type: ignore[no-untyped-call]  # torch's
        return cast(torch.Tensor, output)

    def close(self) -> None:
        """Release this layer's communicator, which converted layers share.

        Closing the communicator that the program passed also closes its duplicates.
        """
        if self._shared.comm is not None:
            self._shared.comm.close()

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"input must have at least the dimensions (N, C), not {input.dim()}")
        if input.shape[1] != self.num_features:
            raise ValueError(f"input must have {self.num_features} channels, not {input.shape[1]}")

    def _track(self, total: int, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        factor = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, now in ((self.running_mean, mean), (self.running_var, variance * (total / (total - 1)))):
            running.mul_(1 - factor).add_((factor * now).to(running.dtype))


def convert_sync_batchnorm(module: torch.nn.Module, comm: Communicator) -> torch.nn.Module:
    """Replace every BatchNorm layer of a module with a `SyncBatchNorm`, in place. Collective.

    The new layers keep the old layers' parameters and buffers (the same tensors, so optimizers remain valid), hooks,
    mode and names; the state dict remains the same. All converted layers share one duplicate of `comm`, and so does
    each `SyncBatchNorm` that has no communicator because it was unpickled.

    Args:
        module: Any module; BatchNorm layers at any depth are replaced.
        comm: Communicator of the ranks that share statistics; duplicated once for all layers.

    Returns:
        `module` itself, or a new layer if `module` is a BatchNorm layer.

    Raises:
        ValueError: A layer is lazy, so its number of channels is not known yet; or a layer has a custom class whose
            `forward`, `train` or parametrizations would be lost.
        MismatchError: Ranks have different layers.

    Example:
        >>> from unisono.gradients.sync_batch_norm import convert_sync_batchnorm
        >>> def program(comm):
        ...     model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        ...     return type(convert_sync_batchnorm(model, comm)[1]).__name__
        >>> un.launch(program, 2, "thread")
        ['SyncBatchNorm', 'SyncBatchNorm']
    """
    layers = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and not (isinstance(layer, SyncBatchNorm) and layer._shared.comm is not None)
    }
    for name, layer in layers.items():
        if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
            raise ValueError(f"{name!r} is lazy: run a batch through the model before it is converted")
        plain = torch.nn.SyncBatchNorm if isinstance(layer, torch.nn.SyncBatchNorm) else _BatchNorm
        own = [each for each in _BEHAVIOUR if getattr(type(layer), each) is not getattr(plain, each)]
        own += [each for each in ("forward", "parametrizations") if each in {**vars(layer), **layer._modules}]
        if own and not isinstance(layer, SyncBatchNorm):
            raise ValueError(
                f"{name!r} is a {type(layer).__name__} with its own {own[0]}, which a SyncBatchNorm would not have. "
                "Derive its class from SyncBatchNorm, or put what it adds into a module beside a plain BatchNorm"
            )
    shared = _agreed_dup(comm, {name: str(layer) for name, layer in layers.items()}, "BatchNorm layers")
    if not layers:
        shared.close()
    made = {layer: _converted(layer, shared) for layer in layers.values()}
    if isinstance(module, _BatchNorm) and module in made:
        return made[module]
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if isinstance(child, _BatchNorm) and child in made:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, made[child])
    return module


_BEHAVIOUR = ("__call__", "forward", "train")
"""Methods that a custom class may override, for example to stay in evaluation mode, and that conversion would lose."""


def _converted(layer: _BatchNorm, shared: Communicator) -> SyncBatchNorm:
    if isinstance(layer, SyncBatchNorm):
        shared.allow_any_thread()
        layer._shared.comm = shared
        return layer
    made = SyncBatchNorm(layer.num_features, shared, dup=False)
    # Share the old layer's tables of tensors and hooks, so that the caller's hook handles also work on the new layer.
    vars(made).update(vars(layer))
    return made


class _StatisticsComm:
    """Holder of a communicator: a layer's copies (such as weight averages) share it, and pickled layers have none."""

    def __init__(self, comm: Communicator | None = None) -> None:
        self.comm = comm

    def __reduce__(self) -> tuple[type[_StatisticsComm], tuple[()]]:
        return _StatisticsComm, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def _agreed_dup(comm: Communicator, layers: object, name: str) -> Communicator:
    comm.agree(layers, name)
    comm.flush_agreements()
    return comm.dup()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _dims(input: torch.Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def batch_statistics(input: torch.Tensor, comm: Communicator) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the number of values per channel on all ranks, and each channel's mean and biased variance in float64.

    Ranks combine means and sums of squared deviations. A variance computed from sums and sums of squares would lose
    digits to cancellation (Chan, Golub, LeVeque: Updating formulae, 1979). All ranks compute from the same numbers, so
    their results are bitwise identical.
    """
    channels = input.shape[1]
    count = input.numel() // channels if channels else 0
    own = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    if count:
        variance, mean = torch.var_mean(input.to(_wide(input.dtype)), _dims(input), correction=0)
        own[0] = count
        own[1 : channels + 1] = mean
        own[channels + 1 :] = variance.double() * count
    table = own.new_empty((comm.size, own.numel()))
    comm.all_gather_single(table, own)
    counts = table[:, :1]
    means = table[:, 1 : channels + 1]
    squares = table[:, channels + 1 :]
    total = int(counts.sum())
    mean = (counts * means).sum(0) / max(total, 1)
    variance = (squares + counts * (means - mean).square()).sum(0) / max(total, 1)
    return total, mean, variance


class Normalise(torch.autograd.Function):
    """(input - mean) * scale * weight + bias, where mean and scale depend on all ranks' inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        scale: torch.Tensor,
        total: int,
        comm: Communicator,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, mean, scale)
        ctx.total = total
        ctx.comm = comm
        ctx.bias_dtype = None if bias is None else bias.dtype
        output = _standard(input, mean, scale)
        if weight is not None:
            output *= _shaped(weight, output)
        if bias is not None:
            output += _shaped(bias, output)
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given, weight, mean, scale = ctx.saved_tensors
        standard = _standard(given, mean, scale)
        gradient = gradient.to(standard.dtype)
        along = (gradient * standard).sum(_dims(given))
        sums = gradient.sum(_dims(given))
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        for_input = None
        if needs_input:
            both = torch.cat([sums, along]).double()
            ctx.comm.all_reduce(both)
            # Gradients that reach each input through the mean and the variance over all ranks' inputs.
            of_mean, of_variance = (both / max(ctx.total, 1)).chunk(2)
            for_input = gradient - _shaped(of_mean, standard) - standard * _shaped(of_variance, standard)
            for_input *= _shaped(scale if weight is None else scale * weight, standard)
            for_input = for_input.to(given.dtype)
        for_weight = along.to(weight.dtype) if needs_weight else None
        for_bias = sums.to(ctx.bias_dtype) if needs_bias else None
        return for_input, for_weight, for_bias, None, None, None, None


def _standard(input: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = input.to(_wide(input.dtype))
    return (wide - _shaped(mean, wide)) * _shaped(scale, wide)


def _shaped(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return one number per channel as a view that broadcasts with (N, C, ...)."""
    return channels.to(like.dtype).view(-1, *[1] * (like.dim() - 2))
