"""Tracebacks that show the user's lines: the library's own frames are hidden.

`UNISONO_TRACEBACK=full` shows all frames, as Python does.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from unisono.core.call_site import is_installed, is_internal
from unisono.errors import AbortedError, MismatchError, PeerLostError

__all__ = ["format_error", "show_errors"]

_SETTING = "UNISONO_TRACEBACK"
_ERROR_FILE = "UNISONO_ERROR_FILE"
_TORCHRUN_FILE = "TORCHELASTIC_ERROR_FILE"
_MOST_LETTERS = 160
_STARTERS = ("<frozen runpy>", str(Path("IPython", "core", "interactiveshell.py")))
"""Ends of the names of files that start a user's program."""


def format_error(error: BaseException, rank: int | None = None, size: int | None = None) -> str:
    """Return the traceback of an error as text, without frames of this library, and with the rank in front.

    Args:
        error: Raised, so that it has a traceback.
        rank, size: Of the process; no rank is shown if None.

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
    note = f"; {hidden} frames of unisono are hidden, {_SETTING}=full shows them" if hidden else ""
    return front + text.replace("(most recent call last)", f"(most recent call last{note})", 1)


def _brief(error: BaseException, rank: int | None, size: int | None) -> str:
    """Return one line about a failure that another rank shows in full."""
    report = traceback.TracebackException.from_exception(error)
    _hide_frames(report)
    place = f"{os.path.basename(report.stack[-1].filename)}:{report.stack[-1].lineno}: " if report.stack else ""
    sentence = "".join(report.format_exception_only()).partition("\n")[0]
    shown = sentence if len(sentence) <= _MOST_LETTERS else f"{sentence[:_MOST_LETTERS]}..."
    return f"{_front(rank, size)}{place}{shown}\n"


def _front(rank: int | None, size: int | None) -> str:
    return "" if rank is None else f"[rank {rank} of {size}] "


def _hide_frames(report: traceback.TracebackException) -> int:
    """Remove internal frames from a report and its causes, and return how many they were."""
    frames = list(report.stack)
    kept = [frame for frame in frames if not is_internal(frame.filename) and not frame.filename.endswith(_STARTERS)]
    ours = bool(frames) and is_internal(frames[-1].filename)
    if ours:
        # What calls the user's code, such as runpy or torch's autograd, does not matter to an error of this library.
        kept = [frame for frame in kept if not is_installed(frame.filename)] or kept
    # Without columns: those of another process's frames are unknown.
    plain = [(each.filename, each.lineno or 0, each.name, each.line) for each in kept]
    report.stack = traceback.StackSummary.from_list(plain)
    hidden = len(frames) - len(kept)
    for other in (report.__cause__, report.__context__, *(report.exceptions or ())):
        hidden += 0 if other is None else _hide_frames(other)
    if ours:
        # The error of this library says what its cause means; only a cause in the user's code adds to it.
        report.__cause__ = report.__cause__ if _has_user_frames(report.__cause__) else None
        report.__context__ = report.__context__ if _has_user_frames(report.__context__) else None
    return hidden


def _has_user_frames(report: traceback.TracebackException | None) -> bool:
    return report is not None and any(not is_installed(frame.filename) for frame in report.stack)


def _name_cells(text: str, shell: Any) -> str:
    """Replace the file names that IPython makes for cells by the numbers of the cells."""
    for path, number in getattr(shell.compile, "_filename_map", {}).items():
        text = text.replace(f'File "{path}"', f"Cell In[{number}]")
        text = text.replace(f"{os.path.basename(path)}:", f"In[{number}]:")
    return text


class _ErrorDisplay:
    """Show uncaught errors by `format_error`, in a script and in a notebook."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._size: int | None = None

    def identify(self, rank: int, size: int) -> None:
        """Set this process's rank, shown before errors. A world of one has none."""
        self._rank, self._size = (rank, size) if size > 1 else (None, None)

    def excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show an error in one write, so that texts of several ranks do not mix; and record it for torchrun.

        An error that another rank shows in full is one line here: the loss of a peer, and a mismatch, which all ranks
        raise, on other ranks than rank 0.
        """
        path = os.environ.get(_ERROR_FILE)
        if isinstance(error, KeyboardInterrupt) or not self._concerns(error):
            # `unisono run` passes an interrupt on to all ranks, and has nothing to show.
            if not (path and isinstance(error, KeyboardInterrupt)):
                sys.__excepthook__(kind, error, trace)
            return
        elsewhere = isinstance(error, PeerLostError | AbortedError) or (isinstance(error, MismatchError) and self._rank)
        whole = path or os.environ.get(_SETTING) == "full" or not elsewhere
        text = (format_error if whole else _brief)(error, self._rank, self._size)
        self._record(error, text)
        with suppress(AttributeError, OSError, ValueError):
            if path:
                # For `unisono run`, which shows the first error of all ranks.
                Path(path).write_text(json.dumps({"kind": kind.__name__, "text": text, "time": time.time()}))
            else:
                sys.stderr.write(text)
                sys.stderr.flush()

    def notebook(self, shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any) -> Any:
        """Show an error of a cell; IPython's handler of custom exceptions."""
        if not self._concerns(error):
            return shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
        lines = _name_cells(format_error(error, self._rank, self._size), shell).splitlines()
        shell._showtraceback(kind, error, lines)
        return lines

    def _concerns(self, error: BaseException) -> bool:
        """Return whether an error was raised on a rank among others, or has frames of this library."""
        frames = traceback.walk_tb(error.__traceback__)
        return self._rank is not None or any(is_internal(frame.f_code.co_filename) for frame, _ in frames)

    def _record(self, error: BaseException, text: str) -> None:
        """Write the file from which torchrun's report has its text, unless torch's `record` has written it."""
        path = os.environ.get(_TORCHRUN_FILE)
        if not path or Path(path).exists():
            return
        # The report calls the earliest error the cause, in whole seconds.
        follows = isinstance(error, PeerLostError | AbortedError)
        details = {"py_callstack": text, "timestamp": str(int(time.time()) + follows)}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))


_display = _ErrorDisplay()


def show_errors(rank: int | None = None, size: int | None = None) -> None:
    """Show uncaught errors of this process without internal frames from now on.

    A program's own `sys.excepthook`, or its own handler in IPython, stays.

    Args:
        rank, size: Of the process, once they are known.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _display.excepthook
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((Exception,), _display.notebook)
    if rank is not None and size is not None:
        _display.identify(rank, size)
