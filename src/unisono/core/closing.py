"""Base class of objects that a `with` block closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Closing"]


class Closing(ABC):
    """Context manager that returns itself and calls `close` on exit, whether or not an error was raised."""

    @abstractmethod
    def close(self) -> None:
        """Release the object's resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
