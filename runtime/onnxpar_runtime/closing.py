"""What is used in a `with` statement and closed at its end."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Something that holds resources until it is closed; a context manager that closes it."""

    @abstractmethod
    def close(self) -> None:
        """Frees what it holds."""

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        self.close()
