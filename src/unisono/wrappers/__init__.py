"""Transport wrappers: each changes one behaviour and forwards the rest."""

from __future__ import annotations

__all__: list[str] = []
