"""What an optimizer of this package asks of a framework beyond Python's operators, in a graph as outside of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Arithmetic"]

Tensor = Any


class Arithmetic(ABC):
    """Reads and writes variables, chooses between ways, and computes; edges fill it in with their framework.

    Flags and numbers may be Python's own where a framework has no graph.
    """

    @abstractmethod
    def read(self, variable: Any) -> Tensor:
        """The value of a variable, of Keras or of `zeros`."""

    @abstractmethod
    def write(self, variable: Any, value: Tensor) -> None:
        """Set a variable, of Keras or of `zeros`; NumPy arrays are taken, too."""

    @abstractmethod
    def zeros(self, variable: Any) -> Any:
        """A variable of this rank alone, which Keras neither saves nor broadcasts, of another one's shape and type."""

    @abstractmethod
    def counter(self) -> Any:
        """A variable of this rank alone that counts from 0."""

    @abstractmethod
    def array(self, variable: Any) -> Any:
        """The value of a variable as a NumPy array of its own."""

    @abstractmethod
    def number(self, value: Any) -> Any:
        """A whole number of the type of a counter."""

    @abstractmethod
    def dense(self, gradient: Any, variable: Any) -> Tensor:
        """A gradient, a sparse one too, of the variable's type; None counts as zeros."""

    @abstractmethod
    def root(self, value: Tensor) -> Tensor:
        """The square root of each element."""

    @abstractmethod
    def clipped(self, value: Tensor, bound: float) -> Tensor:
        """Each element, but none beyond plus or minus `bound`."""

    @abstractmethod
    def where(self, flag: Any, one: Any, other: Any) -> Tensor:
        """One or the other, elementwise; a flag may be for all elements."""

    @abstractmethod
    def nothing(self, like: Tensor) -> Tensor:
        """Zeros of a value's shape and type."""

    @abstractmethod
    def spoiled(self, value: Tensor) -> Tensor:
        """One number of the value's type: 0 if all elements are finite, else NaN."""

    @abstractmethod
    def correction(self, beta: float, steps: Any, like: Tensor) -> Any:
        """1 - beta ** steps, computed in float64, of the type of `like`."""

    @abstractmethod
    def rate(self, learning_rate: Any, like: Tensor) -> Any:
        """A learning rate of the type of `like`."""

    @abstractmethod
    def all_finite(self, values: Sequence[Tensor]) -> Any:
        """Whether no element of them is an infinity or NaN."""

    @abstractmethod
    def any_nonzero(self, values: Sequence[Tensor]) -> Any:
        """Whether an element of them is not 0."""

    @abstractmethod
    def choose(self, flag: Any, one: Callable[[], Any], other: Callable[[], Any]) -> Any:
        """Run one or the other, which both return a flag, and return that."""

    @abstractmethod
    def decided(self, decision: Callable[[int], bool], number: Any) -> Any:
        """What a function of a number says, which is asked in each step."""

    @abstractmethod
    def any_rank(self, flag: Any, name: str, process_set: Any) -> Any:
        """Whether the flag is set on some rank; a collective call, of a name that was claimed."""

    @abstractmethod
    def claimed(self, name: str, process_set: Any) -> str:
        """A name for collectives which no other one has, the same on all ranks."""

    @abstractmethod
    def warned(self, text: str) -> Any:
        """Warn when this is run; returns a flag that is not set."""

    @abstractmethod
    def one_piece(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which no compiler of the framework rewrites."""
