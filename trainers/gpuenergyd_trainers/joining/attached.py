"""What this process has attached: a second attach to the same object returns the handle of the first."""

import logging
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet, WeakValueDictionary

logger = logging.getLogger("gpuenergyd.trainers")


class _Joined(Protocol):
    """A handle of an attached object, which it keeps alive."""

    @property
    def job_name(self) -> str: ...

    @property
    def is_first(self) -> bool:
        """Whether its rank is the one that speaks to the user."""
        ...


H = TypeVar("H", bound=_Joined)


class AttachedObjects(Generic[H]):
    """Handles by the objects that they are attached to, until they are detached.

    The objects need not be hashable: a handle keeps its object alive, so that its id stays its own.
    """

    def __init__(self) -> None:
        self._handles: WeakValueDictionary[int, H] = WeakValueDictionary()
        self._reported: WeakSet[H] = WeakSet()

    def add(self, target: object, handle: H) -> None:
        self._handles[id(target)] = handle

    def remove(self, target: object) -> None:
        """Forget an object that is detached."""
        self._handles.pop(id(target), None)

    def find(self, target: object, target_name: str) -> H | None:
        """Return the handle of an object that is attached, and tell the user at the first time; None for another."""
        handle = self._handles.get(id(target))
        if handle is not None and handle not in self._reported:
            self._reported.add(handle)
            logger.log(
                logging.WARNING if handle.is_first else logging.INFO,
                "gpuenergyd: job %s: %s is attached already: this attach returns the same handle, and its arguments"
                " are ignored",
                handle.job_name,
                target_name,
            )
        return handle
