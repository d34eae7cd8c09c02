"""Transport over the process groups of torch.distributed."""

from unisono.transports.torch.transport import TRANSPORT, TorchTransport

__all__ = ["TRANSPORT", "TorchTransport"]
