"""An in-memory stand-in for a training job's TCPStore, for tests in one process."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass
class MemoryStore:
    """The TCPStore methods that adapters use."""

    values: dict[str, bytes] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    prefix: str = "gpuenergyd/run-1"

    def within(self, folder: str) -> "MemoryStore":
        """Return the part of this store whose keys begin with a folder."""
        return replace(self, prefix=f"{self.prefix}/{folder}")

    def set(self, key: str, value: str) -> None:
        self.values[f"{self.prefix}/{key}"] = value.encode()

    def get(self, key: str) -> bytes | None:
        """Return a key's value, None if missing."""
        return self.values.get(f"{self.prefix}/{key}")

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of all keys, None if one is missing."""
        found = [value for value in map(self.get, keys) if value is not None]
        return found if len(found) == len(keys) else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return it."""
        name = f"{self.prefix}/{key}"
        self.counters[name] = self.counters.get(name, 0) + amount
        return self.counters[name]
