"""Agreement of ranks on the present run, so that none of them reads what an earlier run has left in the job's store.

A launcher that restarts a training may keep the store with everything in it, and the restarts that it counts differ
between hosts: torchrun counts those that processes of a host have caused. No number of the launcher is therefore the
same on all hosts and another one in each run. Instead one rank draws a name for the run, and writes it again and again
with a rising number. What an earlier run has left does not change any more, because all its processes have ended before
the next ones begin: the other ranks use the name as soon as they have seen it change.
"""

import json
import secrets
from dataclasses import dataclass, field

from gpuenergyd_trainers.across_hosts.job_store import Store

_BEAT_S = 1.0
"""Interval in which the name is written: a rank that begins waits for the next one."""
_NAME_BYTES = 4


@dataclass(slots=True)
class RunAgreement:
    """One rank's side of the agreement with the first rank of one replica."""

    dp_rank: int
    """The replica whose first rank names the run."""
    is_first: bool
    """Whether this is that rank."""
    _run: str | None = None
    _num_beats: int = 0
    _next_beat_s: float = 0.0
    _found: list[bytes | None] = field(default_factory=list)
    """The value that this rank has found, once it has looked."""

    def find(self, store: Store, now_s: float) -> Store | None:
        """Return this run's part of the store, None until its name is known; call it in each exchange."""
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
