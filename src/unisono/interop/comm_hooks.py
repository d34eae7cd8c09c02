"""Communication hooks that use unisono's codecs in torch's DistributedDataParallel.

from unisono.interop import comm_hooks
ddp.register_comm_hook(None, comm_hooks.averaging(un.compression.bf16, comm))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from unisono.communicator import Communicator
from unisono.compression import Codec, resolve
from unisono.compression.codec import Spec
from unisono.core.staging import ACCELERATORS
from unisono.errors import ClosedError

__all__ = ["Hook", "averaging"]

Hook = Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]
"""Argument of `DistributedDataParallel.register_comm_hook`."""

_Kind = tuple[torch.dtype, tuple[torch.Size, ...]]


def averaging(codec: Spec, comm: Communicator) -> Hook:
    """Return a hook that averages DDP's buckets with a codec during the backward pass. Use one hook per model.

    Collective: creates a second communicator of the same ranks for the hook, and a thread that averages one bucket
    after another. Closing `comm` also closes the second communicator and ends the thread, so close `comm` after
    training. Each bucket has its own codec. DDP rebuilds its buckets after the first training step, which drops the
    error feedback accumulated until then.

    Args:
        codec: A codec, a class or function that creates one, or a codec's name.
        comm: Communicator of the ranks of DDP's process group.

    Returns:
        A function for `register_comm_hook`; it ignores `state`.

    Raises:
        ValueError: There is no such codec.

    Example:
        >>> import torch.distributed as dist
        >>> with un.init() as comm:
        ...     hook = averaging("bf16", comm)
        >>> hook.__qualname__
        'unisono.bf16'
    """
    pattern = resolve(codec)
    own = comm.dup()
    own.allow_any_thread()
    # Use a single thread, so that every rank averages its buckets in the same order: the order in which DDP fills them.
    thread = ThreadPoolExecutor(1, "unisono comm hook")
    codecs: dict[int, tuple[_Kind, Codec]] = {}

    def codec_for(index: int, kind: _Kind) -> Codec:
        if index not in codecs or codecs[index][0] != kind:
            codecs[index] = kind, pattern.clone()
        return codecs[index][1]

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        sizes = [gradient.shape for gradient in bucket.gradients()]
        chosen = codec_for(bucket.index(), (flat.dtype, tuple(sizes)))
        if flat.device.type in ACCELERATORS:
            # On accelerators, average immediately, on the stream that filled the buffer.
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[flat.device])
            done.set_result(_average(chosen, flat, own, sizes))
            return done
        return _in_thread(thread, lambda: _average(chosen, flat, own, sizes))

    comm.after_close(lambda: thread.shutdown(wait=True))
    # Torch compares the hook's annotations with types, but annotations in this module are strings, so set the types
    # here.
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    hook.__name__ = hook.__qualname__ = f"unisono.{pattern.name}"
    return hook


def _average(codec: Codec, flat: torch.Tensor, comm: Communicator, sizes: Sequence[torch.Size]) -> torch.Tensor:
    with torch.no_grad():
        codec.average(flat, comm, sizes)
    return flat


def _in_thread(thread: ThreadPoolExecutor, action: Callable[[], torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
    """Return a future for the action's result.

    Torch converts an error to a class that its C++ code can handle, but keeps the error's text.
    """
    ended: torch.futures.Future[None] = torch.futures.Future()
    try:
        work = thread.submit(action)
    except RuntimeError as error:
        raise ClosedError("the communicator of this hook is closed; keep it open as long as DDP trains") from error
    result = ended.then(lambda _: work.result())
    work.add_done_callback(lambda _: ended.set_result(None))
    return result
