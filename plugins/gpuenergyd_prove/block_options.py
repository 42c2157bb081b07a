"""What all kinds of a proof's blocks share: their options, calibration, and sampling of power."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.core.job.issued_plans import PROOF_PLAN_ID
from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.errors import DaemonNotRunningError
from gpuenergyd.store import History, IterationRow, open_history
from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.meters import Meter
from gpuenergyd_prove.proof.measurements import IterationSample, PowerSample
from gpuenergyd_prove.proof.registration import BASELINE_ARM, Arm

POLL_S = 0.5
HISTORY_LIMIT_S = 60.0
"""Longest wait for iterations to appear in the history, which the daemon writes in batches."""
_SILENCE_LIMIT_S = 60.0
_LONG_AT_FULL_SPEED = 30
"""Iterations at full speed after which a policy is assumed to keep the job there."""
_MEASURED_RATIO = 0.75
"""Share of a block's last iterations that need a measured energy; above `min_measured_ratio`, as some are left out."""
LONGEST_RATIO = 4
"""A block whose iterations lack energies continues up to this multiple of its length, and is then void."""
_LEAST_STEP_S = 0.25
"""Least time between two readings of the energy counters, whose differences give the sampled power."""


@dataclass(slots=True)
class BlockOptions:
    """Where and under which conditions blocks run."""

    client: DaemonClient
    socket_path: str
    max_slowdown_ratio: float = 0.0
    block_limit_s: float = 3600.0
    meters: Sequence[Meter] = ()
    calibrated_gpus: Sequence[str] = ()
    """GPUs to calibrate before the pilot; one of each model is enough."""
    check: Callable[[], None] | None = None
    """Called while waiting; raises if a process started by the proof has ended."""
    _has_answered: bool = False

    def calibrate(self) -> Mapping[str, Any]:
        """Run `gpuenergyd calibrate` on the chosen GPUs, and return its result; without GPUs, return that none ran.

        Raises:
            ProofError: the calibration failed.
        """
        if not self.calibrated_gpus:
            return {"calibrated": False}
        arguments = ["calibrate", *self.calibrated_gpus, "--changes", "5", "--json", "--socket", self.socket_path]
        done = subprocess.run(
            [sys.executable, "-m", "gpuenergyd.cli.main", *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ProofError(f"calibration failed: {done.stderr.strip().rpartition(chr(10))[2] or done.returncode}")
        found: dict[str, Any] = json.loads(done.stdout)
        return {"calibrated": True, **found}

    def status(self) -> dict[str, Any]:
        """Return the daemon's status, after checking that no process started by the proof has ended."""
        found: dict[str, Any] = self.asked(self.client.get_status)
        return found

    def asked(self, request: Callable[[], Any]) -> Any:
        """Return the daemon's reply; if it has answered before, wait for it while the host is busy or it restarts.

        Raises:
            DaemonNotRunningError: it has never answered, or not for a minute.
        """
        until_s = time.monotonic() + _SILENCE_LIMIT_S
        while True:
            if self.check is not None:
                self.check()
            try:
                reply = request()
            except DaemonNotRunningError:
                if not self._has_answered or time.monotonic() > until_s:
                    raise
                time.sleep(POLL_S)
            else:
                self._has_answered = True
                return reply

    def history(self) -> History:
        """Open the daemon's history.

        Raises:
            ProofError: it is not a local file.
        """
        path = self.status()["files"]["history_path"]
        if path is None:
            raise ProofError("the daemon's history is not a local file; a proof reads iterations from it")
        return open_history(str(path))


@dataclass(slots=True)
class PowerSampler:
    """Samples the power of a job's GPUs and of external meters during one block."""

    meters: Sequence[Meter]
    gpu_power: list[PowerSample] = field(default_factory=list)
    meter_power: list[PowerSample] = field(default_factory=list)
    _counted: tuple[float, float] | None = None
    """Time and sum of the last reading of the energy counters."""

    def sample(self, status: Mapping[str, Any], job: Mapping[str, Any]) -> None:
        """Take a sample.

        Raises:
            ProofError: a meter cannot be read.
        """
        own = {rank["gpu_uuid"] for rank in job["ranks"]}
        gpus = [gpu for gpu in status["gpus"] if gpu["gpu_uuid"] in own]
        if gpus and all(gpu["total_energy_j"] is not None for gpu in gpus):
            at_s = time.time() - max(gpu["reading_age_s"] for gpu in gpus)
            total_j = sum(gpu["total_energy_j"] for gpu in gpus)
            if self._counted is not None and at_s - self._counted[0] >= _LEAST_STEP_S:
                since_s, before_j = self._counted
                middle_s, power_w = (since_s + at_s) / 2, (total_j - before_j) / (at_s - since_s)
                self.gpu_power.append(PowerSample(round(middle_s, 4), round(power_w, 3)))
            if self._counted is None or at_s - self._counted[0] >= _LEAST_STEP_S:
                self._counted = (at_s, total_j)
        for meter in self.meters:
            reading = meter.read()
            if reading is not None and (not self.meter_power or reading.at_s > self.meter_power[-1].at_s):
                self.meter_power.append(reading)


def check_is_tuned(job: Mapping[str, Any], arm: Arm, num_iterations: int) -> None:
    """Check that a job under a policy may still be tuned; otherwise a block would wait for it in vain.

    Raises:
        ProofError: its plans have failed too often, its clocks may not be set, or its policy has kept it at full speed
            for long, for instance because its time account cannot pay for a plan.
    """
    is_kept = (
        job["phase"] == JobPhase.TUNED
        and job["plan_purpose"] in {PlanPurpose.BASELINE, PlanPurpose.PREDICTED}
        and job["plan_id"] != PROOF_PLAN_ID
        and job["num_iterations_of_plan"] >= max(_LONG_AT_FULL_SPEED, 2 * num_iterations)
    )
    if job["is_given_up"] or is_kept:
        raise ProofError(f"arm {arm.name!r}: the job stays at full speed: {job['phase_reason']}")


def has_energies(rows: Sequence[IterationRow], num_iterations: int) -> bool:
    """Return whether most of a block's last stored iterations have a measured energy; True while none is stored.

    On a busy host, some counters are read too late to date their updates; a longer block contains other iterations.
    """
    last = rows[-num_iterations:]
    return sum(row.energy_j is not None for row in last) >= _MEASURED_RATIO * len(last)


def rows_of_arm(history: History, job_id: str, arm: Arm) -> list[IterationRow]:
    """Return, in order, the undisturbed iterations that ran under an arm's plan."""
    purpose = PlanPurpose.BASELINE if arm.name == BASELINE_ARM else PlanPurpose.TUNED
    return [row for row in history.iterations(job_id) if row.is_regular and row.plan_purpose is purpose]


def samples_of(rows: Sequence[IterationRow]) -> tuple[IterationSample, ...]:
    """Return stored iterations as raw data of a proof."""
    return tuple(
        IterationSample(row.iteration_index, row.started_at.timestamp(), row.iteration_time_s, row.energy_j)
        for row in rows
    )
