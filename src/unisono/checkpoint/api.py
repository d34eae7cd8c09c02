"""`save`, `async_save` and `load`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from unisono.checkpoint.background import SaveHandle, begin, finish_earlier
from unisono.checkpoint.collective import CollectiveScope
from unisono.checkpoint.errors import CheckpointError, StateError
from unisono.checkpoint.loader import LoadOptions, MapLocation, load_state
from unisono.checkpoint.saver import PreparedState, Progress, commit, prepare
from unisono.checkpoint.storage import Storage, storage_at
from unisono.checkpoint.verification import last_good
from unisono.core.types import Timeout

if TYPE_CHECKING:
    from unisono.communicator import Communicator

__all__ = ["Path", "async_save", "load", "save", "start", "write"]

Path = str | os.PathLike[str] | Storage


def save(
    path: Path,
    state: Any,
    comm: Communicator | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    timeout: Timeout | None = None,
    progress: Progress | None = None,
) -> None:
    """Save a state. On return, the checkpoint is complete and would survive a loss of power.

    Collective: every rank calls it with the same path and, except for `PerRank` values, the same state. Each writes an
    equal share. An earlier checkpoint of the same name stays until the end, and is what a crash leaves.

    Args:
        path: A directory to create, on a file system that all ranks share; or a URL that fsspec supports.
        state: Modules, optimizers, schedulers, samplers and all else with `state_dict` and `load_state_dict`; tensors,
            numbers, strings, bytes; and dicts, lists, tuples and sets of them. Samplers, data loaders, `RNG`,
            `torch.Generator`, `GradientAverager` and codecs are per rank; so are values wrapped in `PerRank`. Of a
            tensor in `TensorShard`s each rank writes its own elements.
        comm: The ranks that save together; None is this process alone.
        extra: Plain values to store in the manifest, for readers of the checkpoint.
        timeout: Limit of the wait for the slowest rank in each phase: seconds or a `timedelta`; the communicator's if
            None.
        progress: Called with the bytes that this rank has written, and with the total that it has to write.

    Raises:
        MismatchError: Ranks have different states; tensors and ranks are named. Nothing was written.
        TypeError: A value in the state cannot be saved, which is named; or `path` is no path.
        ValueError: The state nests too deep, or contains itself.
        FormatError: Numbers and strings would take too much memory to load; keep long lists as tensors.
        StorageError: The storage is full, read-only, or gone. Earlier contents stay.
        CheckpointError: Another save to the path is running; names its process.
        UnavailableError: `path` is a URL, and fsspec is not installed.

    Cost: each of several ranks reads the state once for the comparison, and writes 1/p of it.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> path = tempfile.mkdtemp() + "/first"
        >>> un.checkpoint.save(path, {"model": model, "step": 7})
        >>> un.checkpoint.load(path, {"model": model, "step": 0})["step"]
        7
    """
    write(path, state, comm, extra=extra, timeout=timeout, progress=progress)


def write(
    path: Path,
    state: Any,
    comm: Communicator | None,
    *,
    extra: Mapping[str, Any] | None,
    timeout: Timeout | None = None,
    progress: Progress | None = None,
    newest: Callable[[], int] = int,
) -> None:
    """Save as `save` does, with a time after the one that `newest` returns on rank 0 (ns), whatever the clock."""
    storage = storage_at(path)
    finish_earlier(storage.where, comm)
    team = CollectiveScope(comm, "save", storage.where, timeout)
    make = partial(prepare, state, team.rank, team.size, copy=False)
    commit(make, storage, team, dict(extra or {}), progress, newest)


def async_save(
    path: Path,
    state: Any,
    comm: Communicator | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    timeout: Timeout | None = None,
    progress: Progress | None = None,
) -> SaveHandle:
    """Save as `save` does, but return when this rank's share is copied: training continues during the write.

    Collective: waits until every rank has called it. A later save of the same communicator waits for this save, and so
    does its `close`. Until `wait()` on the returned handle the caller does not know that the checkpoint is published. A
    failure is logged; it is raised by `wait`, by the next save, or by `close`, and printed at exit. Under `launch` and
    `unisono run` it is the rank's error.

    Args:
        path, state, comm, extra, timeout, progress: As for `save`. `progress` is called from another thread.

    Returns:
        A handle of the save, whose `wait` raises the errors of `save`.

    Cost: stalls the caller for a copy of 1/p of the state, and for a pass over all of it if there are several
    ranks. The copy is kept in memory until it is written. The first call creates a second communicator.

    Example:
        >>> import tempfile
        >>> weights = torch.zeros(3)
        >>> path = tempfile.mkdtemp()
        >>> saving = un.checkpoint.async_save(path, {"w": weights})
        >>> weights += 1
        >>> saving.wait()
        >>> un.checkpoint.load(path)
        {'w': tensor([0., 0., 0.])}
    """
    return start(path, state, comm, extra=extra, timeout=timeout, progress=progress)


def start(
    path: Path,
    state: Any,
    comm: Communicator | None,
    *,
    extra: Mapping[str, Any] | None,
    timeout: Timeout | None = None,
    progress: Progress | None = None,
    newest: Callable[[], int] = int,
    after: Callable[[], None] | None = None,
) -> SaveHandle:
    """Save as `async_save`, with `newest` of `write`; every rank calls `after` in the background once published."""
    storage = storage_at(path)
    finish_earlier(storage.where, comm)
    rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
    if comm is not None:
        # Where another rank makes another call, it says so at once.
        comm.barrier(timeout=timeout)
    make = _held(lambda: prepare(state, rank, size, copy=True))

    def work(twin: Communicator | None) -> None:
        commit(
            make, storage, CollectiveScope(twin, "save", storage.where, timeout), dict(extra or {}), progress, newest
        )
        if after is not None:
            after()

    return begin(storage.where, comm, work)


def _held(make: Callable[[], PreparedState]) -> Callable[[], PreparedState]:
    """Call `make` now, but raise its error later, when it can be reported to the other ranks."""
    try:
        snapshot = make()
    except Exception as error:
        failed = error

        def fail() -> PreparedState:
            raise failed

        return fail
    return lambda: snapshot


def load(
    path: Path,
    state: Any = None,
    comm: Communicator | None = None,
    map_location: MapLocation = None,
    *,
    strict: bool = True,
    check: bool | Literal["first"] = True,
    timeout: Timeout | None = None,
    progress: Progress | None = None,
) -> Any:
    """Load a checkpoint into a state, in place, and return the state.

    Collective. More or fewer ranks may load than saved. Nothing is changed before the state is known to fit, all files
    to exist, and objects of up to 64 MiB to accept their states. States of optimizers go to the parameters of the same
    names; modules that adapt what they load do so as under torch.

    On each host every byte is read from the disk once: each rank reads a share, and copies the other shares from the
    page cache; for storage without one, such as `s3://...`, the ranks broadcast their shares.

    Args:
        path: As passed to `save`.
        state: Of the same shape as was saved; entries that a dict leaves out are not read. Tensors, modules
            and objects are updated in place; numbers and strings are replaced in their dict or list. None creates
            everything: tensors, and dicts instead of objects. Of a `TensorShard` only its elements are read, in blocks
            of 4 MiB.
        comm: The ranks that load together; None is this process alone.
        map_location: Device of tensors that are created: a device, a dict from saved devices to others, or a
            function, as for `torch.load`; but the CPU if None. Existing tensors stay on their device.
        strict: Names that only one of module and checkpoint has are an error.
        check: Compare all bytes with their digests as they are read. "first" does so before anything is changed, in a
            separate pass; so does True if a rank has at most 4 MiB to read. If a larger checkpoint is damaged, some
            tensors of the state are already overwritten when the error is raised, and the message says so.
        timeout: As for `save`.
        progress: Called with the bytes that are in place, and with the total.

    Returns:
        `state` itself if it is a dict, list, tensor or object; else a new value.

    Raises:
        NoCheckpointError: There is none, or only an unfinished one.
        CorruptError: It is damaged; tensors are named, and the last good checkpoint beside it.
        FormatError: It was written by a newer version.
        StateError: It is of another model: missing and unexpected names, shapes, and dtypes that would change values;
            or an object refuses its state. The message says what was changed, if anything.
        StorageError: It cannot be read.
        TypeError, ValueError: `map_location` is not as described.

    Per-rank values of rank r are loaded by rank r if the number of ranks is unchanged. Otherwise rank r loads those of
    rank r mod p, but random generators from rank p on stay unchanged (see `PerRank`).

    Cost: each byte is read from the disk once a host, as long as its memory holds 32 MiB for each rank; on each rank it
    is copied once, straight into its tensor, and hashed there.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp()
        >>> un.checkpoint.save(path, {"w": torch.ones(2), "epoch": 3})
        >>> un.checkpoint.load(path, {"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
    """
    storage = storage_at(path)
    finish_earlier(storage.where, comm, raises=False)
    team = CollectiveScope(comm, "load", storage.where, timeout)
    try:
        return load_state(storage, state, team, LoadOptions(map_location, strict, check, progress))
    except StateError:
        raise
    except CheckpointError as error:
        good = team.first(lambda: last_good(storage))
        error.message += f"; the last good checkpoint beside it is {good}" if good else "; there is no other beside it"
        raise
