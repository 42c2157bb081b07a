"""An in-memory stand-in for a training job's TCPStore, for tests in one process."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class MemoryStore:
    """The TCPStore methods that adapters use."""

    values: dict[str, bytes] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    prefix: str = "gpuenergyd/run-1"

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes | None:
        """Return a key's value, None if missing."""
        return self.values.get(key)

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of all keys, None if one is missing."""
        found = [self.values[key] for key in keys if key in self.values]
        return found if len(found) == len(keys) else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return it."""
        self.counters[key] = self.counters.get(key, 0) + amount
        return self.counters[key]

    def set_once(self, key: str, value: str) -> bytes:
        """Write a key unless it has a value; return its value."""
        return self.values.setdefault(key, value.encode())

    def delete(self, key: str) -> None:
        """Delete a key if there is one."""
        self.values.pop(key, None)
