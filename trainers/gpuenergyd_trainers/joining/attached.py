"""The objects that this process has attached; attaching one of them again returns its first handle."""

import logging
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet, WeakValueDictionary

from gpuenergyd.log_lines import safe_logger

logger = safe_logger("gpuenergyd.trainers")


class _Joined(Protocol):
    """The handle of an attached object; it keeps the object alive."""

    @property
    def job_name(self) -> str: ...

    @property
    def is_first(self) -> bool:
        """Whether its rank is the one that prints messages to the user."""
        ...


H = TypeVar("H", bound=_Joined)


class AttachedObjects(Generic[H]):
    """The handles of attached objects, until they are detached.

    Objects need not be hashable, as they are found by `id`: a handle keeps its object alive, so no other gets that id.
    """

    def __init__(self) -> None:
        self._handles: WeakValueDictionary[int, H] = WeakValueDictionary()
        self._reported: WeakSet[H] = WeakSet()

    def add(self, target: object, handle: H) -> None:
        self._handles[id(target)] = handle

    def remove(self, target: object) -> None:
        """Forget an object that was detached."""
        self._handles.pop(id(target), None)

    def find(self, target: object, target_name: str) -> H | None:
        """Return the handle of an attached object, and tell the user the first time; None for any other object."""
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
