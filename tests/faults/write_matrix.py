"""Try every cell of the matrix, and write the table into docs/reliability.md. Arguments are backends; all without."""

from __future__ import annotations

import re
import sys

from fault_jobs import JOBS
from fault_matrix import BACKENDS, JOB, Cell, table, tried, why_not
from fault_rows import FAULTS
from test_matrix import PAGE

from unisono.transports import TRANSPORTS


def _try(cells: dict[tuple[str, str], Cell], name: str, backend: str) -> None:
    cell = cells[name, backend] = tried(name, backend)
    print(backend, name, *cell.wrong or ["is right"], sep=": ", flush=True)


def main(backends: list[str]) -> None:
    cells: dict[tuple[str, str], Cell] = {}
    for backend in backends:
        for name, fault in FAULTS.items():
            if why_not(fault, backend) is None:
                _try(cells, name, backend)
    for name in JOBS if "mpi" in backends else ():
        _try(cells, name, JOB)
    marks = "<!-- the matrix begins -->", "<!-- the matrix ends -->"
    page = PAGE.read_text()
    made = f"{marks[0]}\n\n{table(cells)}\n\n{marks[1]}"
    PAGE.write_text(re.sub(f"{marks[0]}.*{marks[1]}", lambda _: made, page, flags=re.DOTALL))
    if any(cell.wrong for cell in cells.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:] or [backend for backend in BACKENDS if backend in TRANSPORTS.names()])
