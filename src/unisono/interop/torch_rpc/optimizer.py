"""`torch.distributed.optim.DistributedOptimizer`."""

from __future__ import annotations

from unisono import rpc
from unisono.interop.torch_rpc.dist_autograd import checked

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(rpc.DistributedOptimizer):
    """A torch optimizer on every rank that owns some of the parameters.

    Args:
        optimizer_class: Any subclass of `torch.optim.Optimizer`.
        params_rref: References to parameters.
        args, kwargs: For the optimizer.
    """

    def step(self, context_id: int) -> None:
        """One step with the gradients of a context. Raises RuntimeError if there is no such context."""
        super().step(checked(context_id))
