"""Transport wrappers: each changes one behaviour of a transport and forwards all other calls."""

from __future__ import annotations

__all__: list[str] = []
