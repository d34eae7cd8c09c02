"""Operations of a communicator, by kind: messages, reductions, data movement, objects."""

from __future__ import annotations

__all__: list[str] = []
