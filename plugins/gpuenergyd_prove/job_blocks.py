"""Runs the blocks of a proof within one running job, which is paused for full speed and resumed for a policy."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote

from gpuenergyd.cli.job.finding import find_job
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuEnergyError, ProtocolError, UsageError
from gpuenergyd_prove.block_options import (
    HISTORY_LIMIT_S,
    LONGEST_RATIO,
    POLL_S,
    BlockOptions,
    PowerSampler,
    check_is_tuned,
    has_energies,
    rows_of_arm,
    samples_of,
)
from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.proof.measurements import Block, IterationSample
from gpuenergyd_prove.proof.registration import BASELINE_ARM, Arm

_BEGUN_BEFORE = 2
"""Extra iterations to wait for, since this many may have begun before the block."""
_LISTED_LIMIT_S = 2.0
"""Time after which the status no longer lists an ended job."""


@dataclass(slots=True)
class JobBlocks:
    """Makes one running job follow the arms in turn, and withdraws these orders at the end of the `with` block.

    A resumed job keeps what its policy has learned if full speed has not changed; a different policy starts over.

    Raises:
        UsageError: no such job runs, several have the name, or the job already has orders of an operator.
    """

    options: BlockOptions
    job_name: str
    """Name or id of the job."""
    _job_id: str = field(init=False)

    def __post_init__(self) -> None:
        job = find_job(self.options.status(), self.job_name)
        given = sorted(name for name, value in job["orders"].items() if value is not None)
        if given:
            raise UsageError(
                f"job {self.job_name!r} is under orders of an operator ({', '.join(given)}), which the proof would"
                f" withdraw at its end: gpuenergyd job release {job['job_id']}"
            )
        self._job_id = str(job["job_id"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(GpuEnergyError):  # the job may have ended
            self._order({"is_released": True})

    @property
    def command(self) -> tuple[str, ...]:
        """The command registered in place of a program."""
        return ("gpuenergyd", "prove", "--job", self.job_name)

    def calibrate(self) -> Mapping[str, Any]:
        """Measure switch latencies and driver call times on the chosen GPUs, which must be idle."""
        return self.options.calibrate()

    def rehearse(self, arm: Arm, *, num_iterations: int) -> None:
        """Let the arm's policy make a plan, so that the planner is compiled and the profile known in every block."""
        self.run_block(arm, num_iterations=num_iterations)

    def run_block(self, arm: Arm, *, num_iterations: int) -> Block:
        """Wait until enough iterations have run under the arm's plan.

        Raises:
            ProofError: the job ended, made no plan in time, or a meter cannot be read.
        """
        sampler = PowerSampler(self.options.meters)
        before = self._num_iterations(arm, self._job(self.options.status()))
        begun_at_s = time.time()
        if arm.name == BASELINE_ARM:
            self._order({"is_paused": True})
        else:
            ratio = self.options.max_slowdown_ratio
            self._order({"is_paused": False, "policy": arm.policy, "max_slowdown_ratio": ratio})
        until_s = time.monotonic() + self.options.block_limit_s
        while True:
            status = self.options.status()
            job = self._job(status)
            sampler.sample(status, job)
            done = self._num_iterations(arm, job) - before
            if done >= num_iterations + _BEGUN_BEFORE and self._has_energies(arm, done, num_iterations):
                break
            if arm.name != BASELINE_ARM:
                check_is_tuned(job, arm, num_iterations)
            if time.monotonic() > until_s:
                limit_s = self.options.block_limit_s
                raise ProofError(f"arm {arm.name!r}: too few iterations within {limit_s:g} s: {job['phase_reason']}")
            time.sleep(POLL_S)
        ended_at_s = time.time()
        return Block(
            arm=arm.name,
            begun_at_s=begun_at_s,
            ended_at_s=ended_at_s,
            iterations=self._iterations(arm, num_iterations, begun_at_s, ended_at_s),
            gpu_power=tuple(sampler.gpu_power),
            meter_power=tuple(sampler.meter_power),
        )

    def _has_energies(self, arm: Arm, done: int, num_iterations: int) -> bool:
        if done >= LONGEST_RATIO * num_iterations + _BEGUN_BEFORE:
            return True
        with self.options.history() as history:
            return has_energies(rows_of_arm(history, self._job_id, arm), num_iterations)

    def _iterations(
        self, arm: Arm, num_iterations: int, begun_at_s: float, ended_at_s: float
    ) -> tuple[IterationSample, ...]:
        """Return the last `num_iterations` iterations of a block, once the daemon has stored them."""
        until_s = time.monotonic() + HISTORY_LIMIT_S
        while True:
            with self.options.history() as history:
                stored = samples_of(rows_of_arm(history, self._job_id, arm))
            found = [s for s in stored if s.begun_at_s >= begun_at_s and s.begun_at_s + s.time_s <= ended_at_s]
            if len(found) >= num_iterations:
                return tuple(found[-num_iterations:])
            if time.monotonic() > until_s:
                raise ProofError(
                    f"arm {arm.name!r}: the history has {len(found)} of {count_text(num_iterations, 'iteration')}"
                )
            time.sleep(POLL_S)

    def _order(self, change: Mapping[str, Any]) -> None:
        path = f"/v1/jobs/{quote(self._job_id, safe='')}"
        try:
            self.options.asked(lambda: self.options.client.patch(path, dict(change)))
        except ProtocolError:
            until_s = time.monotonic() + _LISTED_LIMIT_S
            while time.monotonic() < until_s:  # the job may have ended since it was last seen
                self._job(self.options.status())
                time.sleep(POLL_S)
            raise

    def _job(self, status: Mapping[str, Any]) -> Mapping[str, Any]:
        jobs: list[dict[str, Any]] = status["jobs"]
        found = next((job for job in jobs if job["job_id"] == self._job_id), None)
        if found is None:
            raise ProofError(f"job {self.job_name!r} has ended; a proof needs it until the last block")
        return found

    @staticmethod
    def _num_iterations(arm: Arm, job: Mapping[str, Any]) -> int:
        """Return the number of the job's undisturbed iterations at full speed, or under tuned plans."""
        return int(job["num_baseline_iterations" if arm.name == BASELINE_ARM else "num_tuned_iterations"] or 0)
