"""Sizes as people write them."""

from __future__ import annotations

import pytest

from unisono.tools.bench import parse_sizes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", (8,)),
        ("8, 4K,1m,2GiB", (8, 4096, 1 << 20, 2 << 30)),
        ("8:128:*4", (8, 32, 128)),
        ("8:100:*4", (8, 32)),
        ("1M:3M:+1M", (1 << 20, 2 << 20, 3 << 20)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' is not a size"),
        ("8,,9", "'' is not a size"),
        ("0", "positive number"),
        ("-8", "not a size"),
        ("4T", "K, M or G"),
        ("8:128", "first:last:\\*factor"),
        ("8:128:4", "first:last:\\*factor"),
        ("8:128:*1", "never ends"),
        ("8:128:+0", "positive number"),
        ("128:8:*2", "is empty"),
    ],
)
def test_no_sizes(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_sizes(text)
