"""One time account per training on this host: shared by its replicas, kept when its ranks restart, saved against kills.

Jobs of one user with the same name and run key are replicas of one training. A normal restart of the daemon hands each
job over with its account; a pipeline across hosts, whose leader begins anew, and a killed daemon rely on the file.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from gpuenergyd.core.job.time_account import AccountTotals, TimeAccount
from gpuenergyd.daemon.account_file import AccountFile, FileContent, SavedAccount, running_processes
from gpuenergyd.daemon.jobs.replicas import TrainingKey
from gpuenergyd.daemon.ports import RunningJob

log = logging.getLogger(__name__)

_ENDED_KEPT = 64
"""Trainings without a running job whose accounts are kept: their ranks may begin again, as after a failure."""


class TimeAccounts:
    """The accounts of all trainings, owned by the event loop."""

    def __init__(self, path: Path | None = None) -> None:
        """Keep the accounts in a file; without a path they end with the daemon."""
        what = "time accounts"
        self._file = None if path is None else AccountFile(path, FileContent[AccountTotals], what=what)
        self._shared: OrderedDict[TrainingKey, TimeAccount] = OrderedDict()
        self._key_of: dict[str, TrainingKey] = {}

    def join(self, key: TrainingKey, runner: RunningJob) -> None:
        """Let a job share the account of its training; the first job brings its own."""
        experiments = runner.job.control.experiments
        if not experiments.is_paying:
            return
        self._key_of[runner.job_id] = key
        experiments.account = self._shared.setdefault(key, experiments.account)
        self._shared.move_to_end(key)

    def claim(self, runner: RunningJob) -> None:
        """Continue the account that an earlier daemon has saved for the processes of a job that is new to this one."""
        experiments = runner.job.control.experiments
        if self._file is None or not experiments.is_paying or experiments.account.num_iterations:
            return
        saved = self._file.take_over(runner.job.description.job_name, runner.pids)
        if saved is not None:
            experiments.account.take_over(saved)
            log.info(
                "job %s: took over its time account: cost so far %.3g s", runner.job_id, experiments.account.cost_s
            )

    def leave(self, job_id: str) -> None:
        """Note the end of a job; only a training whose run key is known may go on later."""
        key = self._key_of.pop(job_id, None)
        if key is None or key in self._key_of.values():
            return
        self._shared[key].forget_iterations()
        if not key[-1]:
            del self._shared[key]
        idle = [other for other in self._shared if other not in self._key_of.values()]
        for oldest in idle[:-_ENDED_KEPT]:
            del self._shared[oldest]

    async def save(self, runners: Iterable[RunningJob]) -> None:
        """Write the accounts of running jobs to the file; what is committed counts as spent."""
        if self._file is None:
            return
        saved = []
        for runner in runners:
            experiments, own = runner.job.control.experiments, runner.job.control.experiments.account
            if experiments.is_paying and own.num_iterations:
                totals = replace(own.totals, cost_s=own.totals.cost_s + own.spent_or_committed_s - own.cost_s)
                saved.append(SavedAccount(runner.job.description.job_name, running_processes(runner.pids), totals))
        await asyncio.to_thread(self._file.save, tuple(saved))
