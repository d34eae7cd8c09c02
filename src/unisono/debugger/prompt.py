"""The debugger's prompt."""

from __future__ import annotations

import cmd
import linecache
from typing import IO, Any

from unisono.debugger.session import Session
from unisono.errors import CommError

__all__ = ["Prompt"]

_AROUND = 5


class Prompt(cmd.Cmd):
    """Prompt with commands to inspect held ranks; any other line is evaluated on the chosen rank.

    Args:
        session: Connection to the ranks.
        rank: Rank chosen initially; if None, the rank that stopped the others.
        lets_go: Whether `detach` and the end of the input let all ranks continue, because this thread is itself a rank.
        stdin, stdout: Streams to use in place of the process's standard streams.
    """

    def __init__(
        self,
        session: Session,
        rank: int | None = None,
        *,
        lets_go: bool = False,
        stdin: IO[str] | None = None,
        stdout: IO[str] | None = None,
    ) -> None:
        super().__init__(stdin=stdin, stdout=stdout)
        self.use_rawinput: bool = stdin is None
        self._session = session
        self._lets_go = lets_go
        ranks = session.ranks()
        self.intro: str = f"{session.reason}; {len(ranks)} ranks are here. `help` lists the commands"
        # By default, choose the rank that stopped the other ranks, if it is on this host.
        named = [each for each in ranks if session.reason.startswith(f"rank {each} ")]
        self._choose((named or list(ranks))[0] if rank is None else rank)

    def _choose(self, rank: int) -> None:
        self._session.stack(rank)
        self._rank = rank
        # The chosen frame: 0 is the innermost frame, 1 its caller, and so on.
        self._up = 0
        self.prompt: str = f"rank {rank}> "

    def _print(self, *lines: str) -> None:
        self.stdout.write("".join(f"{line}\n" for line in lines if line))

    def onecmd(self, line: str) -> bool:
        """Run a command; return whether to leave the prompt."""
        try:
            return bool(super().onecmd(line))
        except ValueError as error:
            self._print(str(error))
            return False
        except CommError as error:
            self._print(error.message)
            return True

    def emptyline(self) -> bool:
        """Do nothing on an empty line.

        `cmd.Cmd` would repeat the last command, but a repeated `step` cannot be undone.
        """
        return False

    def default(self, line: str) -> None:
        """Evaluate the line on the chosen rank."""
        self._print(self._session.evaluate(self._rank, line, self._up))

    def do_p(self, code: str) -> None:
        """Evaluate code on the chosen rank, even if it looks like a command: p CODE. Local variables cannot be set."""
        self._print(self._session.evaluate(self._rank, code, self._up))

    def do_all(self, code: str) -> None:
        """Evaluate code on every rank: all CODE."""
        self._print(*(f"rank {rank}: {text}" for rank, text in self._session.evaluate_all(code).items()))

    def do_ranks(self, _: str) -> None:
        """Print the state and the current line of each rank."""
        self._print(*(f"rank {rank}: {_line(described)}" for rank, described in self._session.ranks().items()))

    def do_rank(self, number: str) -> None:
        """Choose a rank: rank N."""
        if not number.isdigit():
            raise ValueError(f"rank takes a number, not {number!r}")
        self._choose(int(number))

    def do_where(self, _: str) -> None:
        """Print the stack of the chosen rank; an arrow marks the chosen frame."""
        stack = self._session.stack(self._rank)
        chosen = len(stack) - 1 - self._up
        self._print(*(f"{'->' if index == chosen else '  '} {line}" for index, line in enumerate(stack)))

    def do_up(self, count: str) -> None:
        """Choose the caller of the chosen frame, or the frame N levels above it: up [N]."""
        self._print(self._choose_frame(self._up + int(count or 1)))

    def do_down(self, count: str) -> None:
        """Choose the frame called by the chosen frame, or the frame N levels below it: down [N]."""
        self._print(self._choose_frame(self._up - int(count or 1)))

    def _choose_frame(self, up: int) -> str:
        """Choose the frame `up` levels above the innermost, or the nearest frame that exists; return it as text."""
        stack = self._session.stack(self._rank)
        if not stack:
            raise ValueError("its thread has ended")
        self._up = min(max(up, 0), len(stack) - 1)
        return stack[-1 - self._up]

    def do_list(self, _: str) -> None:
        """Print the source lines around the current line of the chosen frame."""
        file, _, line = self._choose_frame(self._up).rpartition(" in ")[0].rpartition(":")
        for each in range(max(1, int(line) - _AROUND), int(line) + _AROUND + 1):
            text = linecache.getline(file, each).rstrip()
            self._print(f"{'->' if each == int(line) else '  '} {each:4} {text}" if text else "")

    def do_step(self, _: str) -> None:
        """Run the chosen rank to its next line. If it calls a collective, that call waits for the ranks still held."""
        self._up = 0
        arrived = self._session.step(self._rank)
        self._print(("" if arrived else "not there yet: ") + _line(self._session.ranks()[self._rank]))

    def do_go(self, _: str) -> bool:
        """Continue all ranks."""
        self._session.go()
        return True

    def do_quit(self, _: str) -> bool:
        """Abort the job; every rank raises AbortedError."""
        self._session.quit()
        return True

    def do_detach(self, _: str) -> bool:
        """Leave the prompt. The ranks continue if the program itself opened the prompt; otherwise, they remain held."""
        if self._lets_go:
            self._session.go()
        return True

    do_EOF = do_detach  # noqa: N815  # the name that cmd.Cmd expects


def _line(described: dict[str, Any]) -> str:
    where = "its thread has ended" if described["site"] is None else f"{described['site']} in {described['function']}"
    return f"{described['state']}, at {where}"
