"""Energy and emissions of running jobs, read from the history: the status shows what reports show."""

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping

from gpuenergyd.errors import StoreError
from gpuenergyd.quantities.by_job import energy_by_job
from gpuenergyd.quantities.energy_use import NO_ENERGY, EnergyUse
from gpuenergyd.quantities.rates import read_rates
from gpuenergyd.store import open_history

_MAX_DUTY_RATIO = 0.01
"""Part of the time in which the history may be read for this: a long training has many hours to add up."""


class RunningEmissions:
    """The energy use of running jobs by the definitions of reports, as of the last update."""

    def __init__(self, database_url: str, pue: float) -> None:
        self._database_url, self._pue = database_url, pue
        self._uses: Mapping[str, EnergyUse] = {}
        self._next_mono_s = float("-inf")

    def use_of(self, job_id: str) -> EnergyUse:
        """Return the energy use of a job; all of it is missing before the first update."""
        return self._uses.get(job_id, NO_ENERGY)

    async def update(self, job_ids: Collection[str]) -> None:
        """Read the history in a thread, unless that took too long to do it again already."""
        begun_mono_s = time.monotonic()
        if begun_mono_s < self._next_mono_s:
            return
        with contextlib.suppress(StoreError):
            self._uses = await asyncio.to_thread(self.read, job_ids)
        now_mono_s = time.monotonic()
        self._next_mono_s = now_mono_s + (now_mono_s - begun_mono_s) / _MAX_DUTY_RATIO

    def read(self, job_ids: Collection[str]) -> Mapping[str, EnergyUse]:
        """Return the energy use of jobs, of those that the history has."""
        if not job_ids:
            return {}
        with open_history(self._database_url) as history:
            spans = history.job_spans()
            starts = [spans[job_id][0] for job_id in job_ids if job_id in spans]
            if not starts:
                return {}
            first_at = min(starts)
            uses = energy_by_job(history, read_rates(history, pue=self._pue, since=first_at), first_at=first_at)
        return {job_id: uses[job_id] for job_id in job_ids if job_id in uses}
