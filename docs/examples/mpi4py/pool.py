"""The rows of a Julia set by a pool of workers, and how many steps each row took.

python docs/examples/mpi4py/pool.py
"""

from __future__ import annotations

import unisono as un

WIDTH, HEIGHT = 64, 48


def row(number: int) -> int:
    """Return the sum, over one row of points, of the steps until z * z + c has left the circle of radius 2."""
    steps, imaginary = 0, 3.0 * number / HEIGHT - 1.5
    for column in range(WIDTH):
        z = complex(4.0 * column / WIDTH - 2.0, imaginary)
        for _ in range(255):
            if abs(z) >= 2:
                break
            z, steps = z * z + complex(-0.4, 0.6), steps + 1
    return steps


def main(backend: str = "shm") -> str:
    """Return the steps of the rows, as three workers have counted them."""
    with un.Pool(3, backend=backend) as pool:
        counts = list(pool.map(row, range(HEIGHT), chunksize=4))
    return f"{sum(counts)} steps, {max(counts)} at most in a row"


if __name__ == "__main__":
    print(main())
