"""The prompt of the debugger."""

from __future__ import annotations

import cmd
import linecache
from typing import IO, Any

from unisono.debugger.session import Session
from unisono.errors import CommError

__all__ = ["Prompt"]

_AROUND = 5


class Prompt(cmd.Cmd):
    """Commands that look at held ranks; what is none of them is evaluated on the chosen rank.

    Args:
        session: The ranks.
        rank: The chosen one at first; the lowest one if None.
        lets_go: Whether this thread is one of the ranks: the end of the input, and `detach`, then let all go on.
        stdin, stdout: Replace those of the process.
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
        self.use_rawinput = stdin is None
        self._session = session
        self._lets_go = lets_go
        ranks = session.ranks()
        self.intro = f"{session.reason}; {len(ranks)} ranks are here. `help` lists the commands"
        self._choose(next(iter(ranks)) if rank is None else rank)

    def _choose(self, rank: int) -> None:
        self._session.stack(rank)
        self._rank = rank
        self.prompt = f"rank {rank}> "

    def _print(self, *lines: str) -> None:
        self.stdout.write("".join(f"{line}\n" for line in lines if line))

    def onecmd(self, line: str) -> bool:
        """Carry out one command; return whether it was the last."""
        try:
            return bool(super().onecmd(line))
        except ValueError as error:
            self._print(str(error))
            return False
        except CommError as error:
            self._print(error.message)
            return True

    def emptyline(self) -> bool:
        """Do nothing: to step twice by mistake would not be undone."""
        return False

    def default(self, line: str) -> None:
        """Evaluate on the chosen rank."""
        self._print(self._session.evaluate(self._rank, line))

    def do_p(self, code: str) -> None:
        """Evaluate on the chosen rank what begins like a command: p CODE. Local variables cannot be set."""
        self._print(self._session.evaluate(self._rank, code))

    def do_all(self, code: str) -> None:
        """Evaluate on every rank: all CODE."""
        self._print(*(f"rank {rank}: {text}" for rank, text in self._session.evaluate_all(code).items()))

    def do_ranks(self, _: str) -> None:
        """Print where each rank is."""
        self._print(*(f"rank {rank}: {_line(described)}" for rank, described in self._session.ranks().items()))

    def do_rank(self, number: str) -> None:
        """Choose a rank: rank N."""
        if not number.isdigit():
            raise ValueError(f"rank takes a number, not {number!r}")
        self._choose(int(number))

    def do_where(self, _: str) -> None:
        """Print the stack of the chosen rank."""
        self._print(*self._session.stack(self._rank))

    def do_list(self, _: str) -> None:
        """Print the lines around the one where the chosen rank is."""
        described = self._session.ranks()[self._rank]
        number = described["line"]
        for each in range(max(1, (number or 1) - _AROUND), (number or 0) + _AROUND + 1):
            text = linecache.getline(described["file"] or "", each).rstrip()
            self._print(f"{'->' if each == number else '  '} {each:4} {text}" if text else "")

    def do_step(self, _: str) -> None:
        """Let the chosen rank run to its next line. A call in this line waits for the ranks that are held."""
        arrived = self._session.step(self._rank)
        self._print(("" if arrived else "not there yet: ") + _line(self._session.ranks()[self._rank]))

    def do_go(self, _: str) -> bool:
        """Let all ranks go on."""
        self._session.go()
        return True

    def do_quit(self, _: str) -> bool:
        """End the job; every rank raises AbortedError."""
        self._session.quit()
        return True

    def do_detach(self, _: str) -> bool:
        """Leave, with the ranks held; at the prompt of a program, let them go on."""
        if self._lets_go:
            self._session.go()
        return True

    do_EOF = do_detach  # noqa: N815  # as cmd.Cmd calls it


def _line(described: dict[str, Any]) -> str:
    where = "its thread has ended" if described["site"] is None else f"{described['site']} in {described['function']}"
    return f"{described['state']}, at {where}"
