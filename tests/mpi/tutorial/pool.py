"""The program pool.py of docs/examples/mpi4py, on mpi4py: `mpirun -n 4 python -m mpi4py.futures pool.py`."""

from mpi4py.futures import MPIPoolExecutor

WIDTH, HEIGHT = 64, 48


def row(number):
    steps, imaginary = 0, 3.0 * number / HEIGHT - 1.5
    for column in range(WIDTH):
        z = complex(4.0 * column / WIDTH - 2.0, imaginary)
        for _ in range(255):
            if abs(z) >= 2:
                break
            z, steps = z * z + complex(-0.4, 0.6), steps + 1
    return steps


if __name__ == "__main__":
    with MPIPoolExecutor() as executor:
        counts = list(executor.map(row, range(HEIGHT), chunksize=4))
    print(f"{sum(counts)} steps, {max(counts)} at most in a row")
