"""Wraps a method on one object, whatever its class, and undoes it without a trace."""

from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]


class WrappedAttribute:
    """`target.name` replaced on the instance by `make(original)`.

    The class stays as it is, so objects that a framework built can be wrapped too.
    """

    def __init__(self, target: object, name: str, make: Callable[[Call], Call]) -> None:
        self._target = target
        self._name = name
        self._was_on_instance = name in vars(target)
        self._original: Call = getattr(target, name)
        self._wrapper = make(self._original)
        setattr(target, name, self._wrapper)

    def undo(self) -> bool:
        """Restore the object; False when somebody has wrapped over this wrapper, which then stays in their chain."""
        if vars(self._target).get(self._name) is not self._wrapper:
            return False
        if self._was_on_instance:
            setattr(self._target, self._name, self._original)
        else:
            delattr(self._target, self._name)
        return True
