"""Agreement of all ranks on the name of the run, so that none reads what an earlier run left in the job's store.

A launcher that restarts a training may keep the store with all its content, and its restart count differs between
hosts, since torchrun counts only restarts that processes of the same host caused. So none of its numbers is both equal
on all hosts and different in each run. Instead, one rank chooses a random name for the run, and keeps writing it with a
rising number. What an earlier run left does not change any more, since all its processes end before the next ones
start, so the other ranks use the name as soon as they have seen the value change.
"""

import json
import secrets
from dataclasses import dataclass, field

from gpuenergyd_across_hosts.ranks.job_store import Store

_BEAT_S = 1.0
"""How often the name is written; a rank that starts has to wait for the next time."""
_NAME_BYTES = 4


@dataclass(slots=True)
class RunAgreement:
    """The agreement as one rank takes part in it, with the first rank of one replica."""

    dp_rank: int
    """The replica whose first rank chooses the name."""
    is_first: bool
    """Whether this rank is that rank."""
    _run: str | None = None
    _num_beats: int = 0
    _next_beat_s: float = 0.0
    _found: list[bytes | None] = field(default_factory=list)
    """The first value that this rank read, once it has read one."""

    def find(self, store: Store, now_s: float) -> Store | None:
        """Return this run's part of the store, None until its name is known; must be called in each exchange."""
        if self.is_first:
            self._beat(store, now_s)
        elif self._run is None:
            self._look(store)
        return None if self._run is None else store.within(self._run)

    def _beat(self, store: Store, now_s: float) -> None:
        if self._run is None:
            self._run = secrets.token_hex(_NAME_BYTES)
        if self._num_beats == 0 or now_s >= self._next_beat_s:
            store.set(self._key, json.dumps([self._run, self._num_beats]))
            self._num_beats += 1
            self._next_beat_s = now_s + _BEAT_S

    def _look(self, store: Store) -> None:
        raw = store.get(self._key)
        if not self._found:
            self._found.append(raw)
        elif raw is not None and raw != self._found[0]:
            self._run = json.loads(raw)[0]

    @property
    def _key(self) -> str:
        return f"{self.dp_rank}/run"
