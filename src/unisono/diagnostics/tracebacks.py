"""Tracebacks that show the user's code, without frames from this library and torch.

`UNISONO_TRACEBACK=full` shows all frames, as Python does.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.core import clock
from unisono.core.flight_recorder import NOT_THE_USERS, is_installed, is_internal
from unisono.errors import AbortedError, MismatchError, PeerLostError

__all__ = ["TorchrunReport", "brief_error", "format_error", "hide_frames", "show_errors"]

_SETTING = "UNISONO_TRACEBACK"
_MOST_LETTERS = 240
_PATIENCE_S = 1.0
"""If another rank's error made this rank fail, seconds to wait for the other rank to report it."""
_IS_SHOWN_ELSEWHERE = re.compile(r"rank \d+ (failed|gave up) in ")
"""Start of a `PeerLostError`'s message if the lost peer had failed with an error."""
_STARTERS = ("<frozen runpy>", str(Path("IPython", "core", "interactiveshell.py")))
"""Path suffixes of the files that start a user's program."""


def format_error(error: BaseException, rank: int | None = None, size: int | None = None) -> str:
    """Return an error's traceback as text, without internal frames, prefixed with the rank.

    Args:
        error: The error; if it was never raised, there is no traceback to show.
        rank, size: Rank of the process, and number of ranks; if None, no rank is shown.

    Example:
        >>> print(format_error(KeyError("lr"), 1, 4), end="")
        [rank 1 of 4] KeyError: 'lr'
    """
    front = _front(rank, size)
    if os.environ.get(_SETTING) == "full":
        return front + "".join(traceback.format_exception(error))
    report = traceback.TracebackException.from_exception(error)
    hidden = _hide_frames(report)
    text = "".join(report.format())
    note = f"; {hidden} frames of unisono and torch are hidden, {_SETTING}=full shows them" if hidden else ""
    return front + text.replace("(most recent call last)", f"(most recent call last{note})", 1)


def brief_error(error: BaseException, rank: int | None, size: int | None, instead: str | None = None) -> str:
    """Return one line about a failure that another rank shows in full.

    Args:
        error: The error; if it was never raised, there is no traceback to show.
        rank, size: Rank of the process, and number of ranks; if None, no rank is shown.
        instead: Text to show in place of the error's class and message.

    Example:
        >>> print(brief_error(KeyError("lr"), 1, 4), end="")
        [rank 1 of 4] KeyError: 'lr'
    """
    report = traceback.TracebackException.from_exception(error)
    _hide_frames(report)
    place = f"{os.path.basename(report.stack[-1].filename)}:{report.stack[-1].lineno}: " if report.stack else ""
    sentence = instead or "".join(report.format_exception_only()).partition("\n")[0]
    shown = sentence if len(sentence) <= _MOST_LETTERS else f"{sentence[:_MOST_LETTERS]}..."
    return f"{_front(rank, size)}{place}{shown}\n"


def _front(rank: int | None, size: int | None) -> str:
    return "" if rank is None else f"[rank {rank} of {size}] "


def hide_frames(error: BaseException) -> None:
    """Remove internal frames from an error and its causes, for a program such as pytest that prints tracebacks itself.

    Args:
        error: An error that was raised. A traceback without user frames is not changed.

    Example:
        >>> try:
        ...     un.init(init_method="tcp://")
        ... except ValueError as error:
        ...     hide_frames(error)
        ...     print(error.__traceback__.tb_next)
        None
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    files = _files(error)
    trace: TracebackType | None = None
    for frame, line in (frames[index] for index in reversed(_shown(files))):
        # Pass -1 as the instruction index: column positions are unknown for frames from another process.
        trace = TracebackType(trace, frame, -1, line)
    if _is_ours(files):
        error.__cause__ = error.__cause__ if _has_user_frames(_files(error.__cause__)) else None
        error.__context__ = error.__context__ if _has_user_frames(_files(error.__context__)) else None
    for other in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        if other is not None:
            hide_frames(other)
    error.__traceback__ = trace or error.__traceback__


def _files(error: BaseException | None) -> list[str]:
    trace = None if error is None else error.__traceback__
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]


def _shown(files: list[str]) -> list[int]:
    """Return the indices of the frames to show, given the file of each frame in a traceback."""
    kept = [i for i, file in enumerate(files) if not file.startswith(NOT_THE_USERS) and not file.endswith(_STARTERS)]
    if _is_ours(files):
        # For an error that this library raised, also hide installed packages, such as the runner that called the user's
        # code.
        kept = [i for i in kept if not is_installed(files[i])] or kept
    return kept


def _is_ours(files: list[str]) -> bool:
    """Return whether this library raised an error, given the files of its traceback's frames."""
    return bool(files) and is_internal(files[-1])


def _hide_frames(report: traceback.TracebackException) -> int:
    """Remove internal frames from an error's report, including its causes and sub-errors; return their number."""
    frames = list(report.stack)
    files = [frame.filename for frame in frames]
    kept = [frames[index] for index in _shown(files)]
    # Omit column positions, which are unknown for frames from another process.
    plain = [(each.filename, each.lineno or 0, each.name, each.line) for each in kept]
    report.stack = traceback.StackSummary.from_list(plain)
    hidden = len(frames) - len(kept)
    for other in (report.__cause__, report.__context__, *(report.exceptions or ())):
        hidden += 0 if other is None else _hide_frames(other)
    if _is_ours(files):
        # The message of this library's error already explains its cause, so show the cause only if it has frames in the
        # user's code.
        report.__cause__ = report.__cause__ if _has_user_frames(_files_in(report.__cause__)) else None
        report.__context__ = report.__context__ if _has_user_frames(_files_in(report.__context__)) else None
    return hidden


def _files_in(report: traceback.TracebackException | None) -> list[str]:
    return [] if report is None else [frame.filename for frame in report.stack]


def _has_user_frames(files: list[str]) -> bool:
    return any(not is_internal(file) and not is_installed(file) for file in files)


def _name_cells(text: str, shell: Any) -> str:
    """Replace IPython's file names for cells with the cells' numbers."""
    for path, number in getattr(shell.compile, "_filename_map", {}).items():
        text = text.replace(f'File "{path}"', f"Cell In[{number}]")
        text = text.replace(f"{os.path.basename(path)}:", f"In[{number}]:")
    return text


class _ErrorDisplay:
    """Shows uncaught errors with `format_error`, in scripts and notebooks."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._size: int | None = None
        self._report: int | None = None
        self._process = os.getpid()
        self._others: Callable[[type[BaseException], BaseException, TracebackType | None], Any] = sys.__excepthook__

    def install(self) -> None:
        """Show uncaught errors from now on, unless the program has set `sys.excepthook` itself.

        If Ray has set the hook, Ray's hook is replaced, and is still called for errors that don't concern this library.
        """
        if sys.excepthook is sys.__excepthook__ or getattr(sys.excepthook, "__module__", "").partition(".")[0] == "ray":
            self._others = sys.excepthook
            sys.excepthook = self.excepthook

    def report_to(self, file: int) -> None:
        """Write uncaught errors of this process to a file descriptor, for `unisono run`."""
        self._report = file
        self._process = os.getpid()

    def identify(self, rank: int, size: int) -> None:
        """Set this process's rank, which is shown before errors, except if there is only one rank."""
        self._rank, self._size = (rank, size) if size > 1 else (None, None)

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show an error, or leave it to torchrun's report. A single write keeps ranks' output from interleaving.

        This rank shows only one line for an error that another rank shows in full: the loss of a peer; a mismatch,
        which all ranks raise and rank 0 shows; and under torchrun, every error after this host's first one.
        """
        # A forked child inherits this hook, but must not write to its parent's report file.
        file = self._report if self._process == os.getpid() else None
        if isinstance(error, KeyboardInterrupt) or not self._concerns(error):
            # Under `unisono run`, which forwards an interrupt to all ranks, don't show the interrupt.
            if file is None or not isinstance(error, KeyboardInterrupt):
                self._others(kind, error, trace)
            return
        with suppress(AttributeError, OSError, ValueError):
            if file is not None:
                # `unisono run` reads this file, and shows the error of the rank that failed first.
                report = {
                    "kind": kind.__name__,
                    "time": time.time(),
                    "text": format_error(error, self._rank, self._size),
                    "brief": brief_error(error, self._rank, self._size),
                }
                os.pwrite(file, json.dumps(report).encode(), 0)
            else:
                sys.stderr.write(self._text(error))
                sys.stderr.flush()

    def _text(self, error: BaseException) -> str:
        """Return the text that this rank prints about an error, and record the error for torchrun's report."""
        report = TorchrunReport()
        kind = type(error).__name__
        follows = isinstance(error, PeerLostError | AbortedError)
        if follows:
            first = report.await_first(_PATIENCE_S if _IS_SHOWN_ELSEWHERE.match(getattr(error, "message", "")) else 0.0)
        else:
            first = report.claim(kind if self._rank is None else f"{kind} on rank {self._rank}")
        elsewhere = first or follows or (isinstance(error, MismatchError) and self._rank and not report.shared)
        if not elsewhere or os.environ.get(_SETTING) == "full":
            text = format_error(error, self._rank, self._size)
        else:
            text = brief_error(error, self._rank, self._size, first and f"{kind}, after {first}")
        report.record(f"{kind}: {error}", text, follows or first is not None)
        if not report.prints:
            return text
        hint = f"{kind}; torchrun's report shows it when all ranks have ended"
        return "" if elsewhere else brief_error(error, self._rank, self._size, hint)

    def notebook(self, shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any) -> Any:
        """Handler for IPython's `set_custom_exc`: show an error in a notebook cell."""
        if not self._concerns(error):
            return shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
        lines = _name_cells(format_error(error, self._rank, self._size), shell).splitlines()
        shell._showtraceback(kind, error, lines)
        return lines

    def _concerns(self, error: BaseException) -> bool:
        """Return whether this process is one of several ranks, or the error has frames from this library."""
        frames = traceback.walk_tb(error.__traceback__)
        return self._rank is not None or any(is_internal(frame.f_code.co_filename) for frame, _ in frames)


_display = _ErrorDisplay()


def show_errors(rank: int | None = None, size: int | None = None, report: int | None = None) -> None:
    """Show uncaught errors of this process without internal frames from now on.

    A program's own `sys.excepthook`, or its handler in IPython, is kept.

    Args:
        rank, size: Rank of the process, and number of ranks; None until they are known.
        report: Descriptor of the file that `unisono run` reads, if it started the process.
    """
    if report is not None:
        _display.report_to(report)
    _display.install()
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((Exception,), _display.notebook)
    if rank is not None and size is not None:
        _display.identify(rank, size)


_FILE = "TORCHELASTIC_ERROR_FILE"
_ATTEMPTS = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
_FIRST = "unisono-first-error"
_POLL_S = 0.02
# A rank that exits without an error has no error file, so torchrun takes the time at which it sees the process end. On
# a busy machine, that is seconds after the other ranks have learned that the rank left.
_FOLLOWS_BY_S = 10


class TorchrunReport:
    """Access to the error file of this process, from which torchrun builds its report.

    Attributes:
        shared: Whether the ranks of this host can see each other's errors.
        prints: Whether torchrun prints the recorded error. True only in torchrun's last attempt, after which it doesn't
            restart the ranks.
    """

    def __init__(self) -> None:
        path = os.environ.get(_FILE)
        (attempt, last) = map(os.environ.get, _ATTEMPTS)
        # If the file exists, torch's decorator `record` has already written it, before the hook for uncaught errors was
        # called.
        self._path = Path(path) if path and not Path(path).exists() else None
        # Torchrun creates a folder for each attempt, with a subfolder for each rank.
        self.shared: bool = self._path is not None and self._path.name == "error.json" and attempt is not None
        self._first = self._path.parents[1] / _FIRST if self._path is not None and self.shared else None
        self.prints: bool = self.shared and attempt == last

    def claim(self, error: str) -> str | None:
        """Register this error as the host's first one, and return None. If there already is a first one, return that.

        Args:
            error: A short description that other ranks use to refer to this error.
        """
        if self._path is None or self._first is None:
            return None
        own = self._path.with_name(_FIRST)
        try:
            own.write_text(error)
            os.link(own, self._first)
        except FileExistsError:
            return self._first.read_text()
        except OSError:
            return None
        return None

    def await_first(self, timeout_s: float) -> str | None:
        """Wait for the host's first error, and return it, or None if there is none within `timeout_s`."""
        if self._first is None:
            return None
        deadline = clock.now() + timeout_s
        # Don't ask often, because the file may be on a network file system.
        while not self._first.exists() and clock.now() < deadline:
            time.sleep(_POLL_S)
        with suppress(OSError):
            return self._first.read_text()
        return None

    def record(self, message: str, text: str, follows: bool) -> None:
        """Write the error file from which torchrun builds its report.

        Args:
            message: The error as one line.
            text: The error as the report shows it.
            follows: Whether the error was caused by another rank's error.
        """
        if self._path is None:
            return
        # Torchrun's report shows the error with the earliest timestamp, in whole seconds, as the root cause. If another
        # rank's failure caused this error, give it a later timestamp.
        details = {"py_callstack": text, "timestamp": str(int(time.time()) + _FOLLOWS_BY_S * follows)}
        with suppress(OSError):
            self._path.write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
