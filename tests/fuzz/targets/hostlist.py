"""Slurm's lists of hosts."""

from __future__ import annotations

from unisono.bootstrap.slurm import MAX_HOSTS, expand

REFUSALS = (ValueError,)
# MAX_HOSTS names, each as long as the text, are what it may come to.
MEMORY = (64 << 20, 1 << 17)


def seeds() -> list[bytes]:
    texts = ["node1", "node[001-003,7],gpu-a", "a[1-2]b[3-4]", "rack[1,a]", "x[08-10],y[1-2][3-4][5-6]"]
    return [text.encode() for text in texts]


def run(data: bytes) -> None:
    assert len(expand(data.decode("utf-8", "replace"))) <= MAX_HOSTS
