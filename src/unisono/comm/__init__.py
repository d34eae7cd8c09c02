"""What a communicator can be asked to do, by kind: messages, reductions, movements, objects."""

from __future__ import annotations

__all__: list[str] = []
