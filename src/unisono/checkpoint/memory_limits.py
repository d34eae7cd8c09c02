"""Limit of the memory that a checkpoint may request. Checked before any use.

It is twice the files, `OF_MANIFEST` times the manifest, and `GRANTED`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from unisono.checkpoint.errors import FormatError
from unisono.checkpoint.tree import MAX_DEPTH, Node, tag_of

__all__ = ["GRANTED", "HELD", "OF_MANIFEST", "check_cost", "check_trees", "cost_of"]

GRANTED = 16 << 20
"""Bytes that any checkpoint may take beyond twice its files: Python's values are much longer than their JSON."""
OF_MANIFEST = 24
"""Bytes for each byte of a manifest: what the entries of the smallest tensors take, by the costs below."""
HELD = 4 << 20
"""Bytes a rank up to which tensors are held in memory until all are known to be intact."""

# Largest cost of a JSON delimiter, in bytes of the parsed values and of those built from them; measured.
_MARKS = {b",": 66, b"[": 118, b"{": 207, b'"': 48}
# A number in a list: its slot and the object.
_NUMBER = 40
_COPIED = ("$array", "$scalar", "$bytes", "$bytearray")


def cost_of(text: bytes | bytearray) -> int:
    """Bytes of memory that values may take beyond `OF_MANIFEST` times the text that they are parsed from."""
    return max(0, sum(text.count(mark) * cost for mark, cost in _MARKS.items()) - OF_MANIFEST * len(text))


def check_cost(cost: int, nbytes: int) -> None:
    """Raise `FormatError` if `cost` exceeds the limit of a checkpoint with `nbytes` bytes of tensors.

    Tensors that are held exist twice: twice the files already. Larger ones have a single copy, which leaves the memory
    of a second one.
    """
    if cost > GRANTED + max(0, nbytes - HELD):
        raise FormatError(
            f"its values take about {cost >> 20} MiB of memory, too much for {nbytes} bytes of files; "
            "keep long lists and dicts as tensors"
        )


def check_trees(
    state: Node, per_rank: Iterable[Iterable[Node]], sizes: Mapping[str, tuple[int, int]], text: int, nbytes: int
) -> None:
    """Raise `FormatError` or `ValueError` if values of these trees repeat without bound, or take too much memory.

    Args:
        state, per_rank: As in a manifest.
        sizes: For each tensor, its numbers of elements and bytes.
        text: Memory cost of the trees themselves.
        nbytes: Bytes of all files.
    """
    referred: set[Any] = set()
    cost = text
    trees = [tree for trees in per_rank for tree in trees]
    for top in (state, trees):
        for tag, body in _tagged(top):
            if tag == "$numbers":
                cost += sizes[body][0] * _NUMBER
            elif tag in _COPIED and not isinstance(body, str):
                cost += 2 * sizes[body["$tensor"] if isinstance(body, dict) else body[2]][1]
            elif tag == "$rank":
                if top is trees or type(body[0]) is not int or body[0] < 0 or body[0] in referred:
                    raise ValueError("a value of one rank appears in two places")
                referred.add(body[0])
    check_cost(cost, nbytes)


def _tagged(tree: Node) -> Iterator[tuple[str, Any]]:
    """Every value with a tag; level by level, because a hostile tree may be deep."""
    level = [tree]
    for _ in range(4 * MAX_DEPTH):
        for node in level:
            tag = tag_of(node)
            if tag is not None:
                yield tag, node[tag]
        level = [item for node in level if isinstance(node, (dict, list)) for item in _items(node)]
        if not level:
            return
    raise FormatError(f"its state nests deeper than {4 * MAX_DEPTH}")


def _items(node: dict[str, Any] | list[Any]) -> Iterator[Any]:
    return iter(node.values()) if isinstance(node, dict) else iter(node)
