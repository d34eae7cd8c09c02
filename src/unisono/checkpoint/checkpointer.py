"""Manages the checkpoints of a run in one directory: saves every n-th step, and keeps the newest few."""

from __future__ import annotations

import logging
import os
from functools import partial
from operator import index
from types import TracebackType
from typing import Any, Self

from unisono.checkpoint.collective import CollectiveScope, SaveHandle
from unisono.checkpoint.errors import CheckpointError, CorruptError, NoCheckpointError
from unisono.checkpoint.loader import MapLocation, load
from unisono.checkpoint.manifest import FILE, MANIFEST
from unisono.checkpoint.save_lock import is_locked
from unisono.checkpoint.saver import SAVE_TOGETHER, Path, start, write
from unisono.checkpoint.storage import Storage, storage_at
from unisono.checkpoint.verification import complete
from unisono.communicator import Communicator, boundaries_of, engine_of
from unisono.core.step_boundaries import StepBoundaries
from unisono.errors import MismatchError

__all__ = ["Checkpointer"]

_PREFIX = "step-"
_log = logging.getLogger("unisono.checkpoint")


class Checkpointer:
    """Manager of a run's checkpoints: saves every n-th step into a separate directory, and keeps the newest few.

    An old checkpoint is removed only after a newer one is published on all ranks. The manifest is removed first, so
    that files left behind by a crash are never mistaken for a checkpoint. The checkpoint saved last counts as the
    newest, even if the clock was set back.

    Args:
        directory: Directory for the checkpoints of one run, such as "runs/7"; each checkpoint is a subdirectory named
            like "step-0000000100".
        comm: Communicator of the ranks that save together, which may be rebuilt (`comm.rebuild`); None for this process
            alone.
        keep: Number of complete checkpoints to keep; at least 1.
        every: Interval between saves: `step` saves when `every` divides the step's number.
        background: Whether to save as `async_save` does. If a save fails, the next save or `wait` raises its error.
        save_on_stop: Whether `close` saves the state of the last `step` if all ranks stop at the same step (`un.stop`).

    Raises:
        ValueError: `keep` or `every` is less than 1.

    Example:
        >>> import tempfile
        >>> state = {"w": torch.zeros(2)}
        >>> with un.checkpoint.Checkpointer(tempfile.mkdtemp(), keep=2, every=10) as checkpointer:
        ...     for step in range(1, 51):
        ...         state["w"] += 1
        ...         _ = checkpointer.step(step, state)
        ...     checkpointer.wait()
        ...     checkpointer.steps(), checkpointer.load(state), state["w"]
        ([40, 50], 50, tensor([50., 50.]))
    """

    def __init__(
        self,
        directory: Path,
        comm: Communicator | None = None,
        *,
        keep: int = 3,
        every: int = 1,
        background: bool = True,
        save_on_stop: bool = False,
    ) -> None:
        self.keep: int = index(keep)
        self.every: int = index(every)
        self.background = background
        if keep < 1 or every < 1:
            raise ValueError(f"keep={keep} and every={every} must be at least 1")
        self._storage = storage_at(directory)
        self._given = comm
        self._save_on_stop = save_on_stop
        self._saving: SaveHandle | None = None
        # Step and state passed in the last call to `step`; None once they are saved.
        self._unsaved: tuple[int, Any] | None = None
        self._stepped = False
        self._is_inside = False
        # Number of step boundaries that the communicator had passed at the last save.
        self._passed = 0
        self._saved = False
        # Names of checkpoints that this object has saved or found.
        self._known = set[str]()

    @property
    def _comm(self) -> Communicator | None:
        return None if self._given is None else self._given.latest

    @property
    def _boundaries(self) -> StepBoundaries:
        """The communicator's step boundaries, by which `un.stop` knows what is saved; unused if there is none."""
        return StepBoundaries() if self._comm is None else boundaries_of(self._comm)

    def step(self, step: int, state: Any) -> bool:
        """Save the state if `every` divides `step`; the call is collective for such steps.

        Args:
            step, state: As for `save`.

        Returns:
            Whether the step was saved, that is, whether `every` divides `step`.

        Raises:
            CheckpointError, MismatchError, TypeError, ValueError: As for `save`.
        """
        self._unsaved = step, state
        self._stepped = True
        if index(step) % self.every:
            return False
        self.save(step, state)
        return True

    def save(self, step: int, state: Any) -> None:
        """Save now. Collective.

        With `background`, waits for the previous save, and returns once the part of the state that this rank writes has
        been copied.

        Args:
            step: Number of the step, the same on all ranks. An earlier checkpoint of this step is replaced.
            state: As for `un.checkpoint.save`.

        Raises:
            ValueError: `step` is negative, or has more than 10 digits.
            CheckpointError, MismatchError, TypeError: As for `un.checkpoint.save`. With `background`, `save` also
                raises the error of a failed previous save. `save` also raises `CheckpointError` if another
                `Checkpointer` has saved to the directory since this object's last save.
        """
        step = index(step)
        if not 0 <= step < 10**10:
            raise ValueError(f"step={step} must be from 0 to 10**10 - 1")
        if self._is_inside or (self._comm is not None and engine_of(self._comm).is_inside):
            raise CheckpointError(
                "save() was called inside another save, or a call of the same communicator, as from a signal handler, "
                "where the other ranks are elsewhere. Let all ranks stop at the same step with un.stop, and save there"
            )
        self._is_inside = True
        try:
            self._save(step, state)
        finally:
            self._is_inside = False
        self._unsaved = None

    def _save(self, step: int, state: Any) -> None:
        self.wait()
        self._passed = self._boundaries.passed
        storage = self._storage.child(f"{_PREFIX}{step:010d}")
        extra = {"step": step}
        self._known.add(storage.name)
        try:
            if self.background:
                after = partial(self._rotate, storage.name)
                self._saving = start(storage, state, self._comm, extra=extra, newest=self._newest_ns, after=after)
            else:
                write(storage, state, self._comm, extra=extra, newest=self._newest_ns)
                self._rotate(storage.name)
                self._boundaries.saved_at = self._passed
        except MismatchError as error:
            if error.operation != "save":  # Other ranks called a different collective.
                error.add_note(SAVE_TOGETHER)
            raise

    def load(self, state: Any, *, step: int | None = None, map_location: MapLocation = None) -> int | None:
        """Load the newest complete checkpoint, or the checkpoint of a given step, in place. Collective.

        Args:
            state: State to load into, as for `un.checkpoint.load`; must be a dict, list or object, so that it can be
                updated in place.
            step: Number of the step; None for the newest complete checkpoint.
            map_location: As for `un.checkpoint.load`.

        Returns:
            The number of the step that was loaded. None if there is no checkpoint yet; the state is then unchanged.

        Raises:
            CheckpointError: Loading fails, as described for `un.checkpoint.load`, or a save in progress fails. If the
                checkpoint is damaged, no other checkpoint is loaded instead, but the message names an intact one.
        """
        self.wait()
        if step is not None:
            self._load(index(step), state, map_location)
            return index(step)
        found = self._newest()
        while found is not None:
            try:
                self._load(found, state, map_location)
                return found
            except (NoCheckpointError, CorruptError):
                # Another process may have saved a newer checkpoint and removed this one.
                before = found
                found = self._newest()
                if found == before:
                    raise
        return None

    def _load(self, step: int, state: Any, map_location: MapLocation) -> None:
        load(self._storage.child(f"{_PREFIX}{step:010d}"), state, self._comm, map_location=map_location)
        # If training stops before the next step, the loaded checkpoint is still current, so nothing needs to be saved.
        self._passed = self._boundaries.passed
        self._boundaries.saved_at = self._passed

    def steps(self) -> list[int]:
        """Return the numbers of the steps that have complete checkpoints, ascending.

        Raises:
            OSError: The directory cannot be read.

        Cost: reads the manifest of every checkpoint in the directory.
        """
        return sorted(int(storage.name.removeprefix(_PREFIX)) for storage in self._complete())

    def wait(self) -> None:
        """Wait for the save in progress, if there is one.

        Raises:
            CheckpointError, MismatchError, TypeError: The save has failed; raised only once.
        """
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.wait()
            self._boundaries.saved_at = self._passed

    def close(self) -> None:
        """Wait for the save in progress. With `save_on_stop`, save first if all ranks have stopped (collective).

        Rank 0 logs a warning if the state of the last `step` remains unsaved.

        Raises:
            CheckpointError, MismatchError, TypeError: A save has failed.
        """
        boundaries = self._boundaries
        if self._unsaved is not None and self._save_on_stop and boundaries.stopped:
            self.save(*self._unsaved)
        self.wait()
        if self._unsaved is None and self._stepped and boundaries.saved_at == self._passed:
            # Every training step is saved. Step boundaries passed after the last `step` call, for example before an
            # evaluation, do not belong to a training step, so count them as saved.
            boundaries.saved_at = boundaries.passed
        if self._unsaved is not None and (self._comm is None or self._comm.rank == 0):
            _log.warning(
                "step %s is the last, and is not saved: every=%s. Call save() at the end", self._unsaved[0], self.every
            )
        self._unsaved = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _newest(self) -> int | None:
        """Return the number of the newest complete step. Collective."""
        found = CollectiveScope(self._comm, "load", self._storage.where).first(
            lambda: [storage.name for storage in self._complete()[:1]], stores=True
        )
        return int(found[0].removeprefix(_PREFIX)) if found else None

    def _newest_ns(self) -> int:
        found = [(storage.name, manifest.created_ns) for storage, manifest in complete(self._storage)]
        names = {name for name, _ in found if _is_ours(name)}
        if self._saved and not names <= self._known:
            raise CheckpointError(
                f"another Checkpointer has saved {min(names - self._known)} to {os.fspath(self._storage.where)} since "
                "the last save of this one. Each run needs a directory of its own"
            )
        self._saved = True
        self._known |= names
        return max((created_ns for _, created_ns in found), default=0)

    def _complete(self) -> list[Storage]:
        """Return the complete checkpoints named "step-" and a number, newest first."""
        return [storage for storage, _ in complete(self._storage) if _is_ours(storage.name)]

    def _rotate(self, saved: str) -> None:
        """Remove old checkpoints and leftovers of crashed saves, on rank 0.

        Keeps the checkpoint just saved, even if an earlier checkpoint seems newer because the clock of its host was
        ahead.
        """
        scope = CollectiveScope(self._comm, "rotation", self._storage.where)
        if scope.rank == 0:
            scope.measured(partial(self._remove_old, saved))

    def _remove_old(self, saved: str) -> None:
        try:
            known = [storage for storage in self._complete() if storage.name in self._known]
            found = sorted(known, key=lambda storage: storage.name != saved)
            retained = {storage.name for storage in found[: self.keep]}
            others = [name for name in self._storage.children() if _is_ours(name) and name not in retained]
            broken = [name for name in others if self._is_broken(name)]
            for name in [*(storage.name for storage in found[self.keep :]), *broken]:
                _remove(self._storage.child(name))
        except OSError as error:
            _log.warning("old checkpoints remain in %s: %s", os.fspath(self._storage.where), error)

    def _is_broken(self, name: str) -> bool:
        storage = self._storage.child(name)
        return MANIFEST not in storage.sizes() and not is_locked(storage)


def _is_ours(name: str) -> bool:
    return name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdigit()


def _remove(storage: Storage) -> None:
    storage.remove(MANIFEST)
    storage.remove(*(name for name in storage.sizes() if FILE.fullmatch(name) or name.startswith(MANIFEST)))
    storage.discard()
