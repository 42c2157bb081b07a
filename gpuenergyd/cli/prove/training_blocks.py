"""Blocks of a proof as runs of a training program under a daemon: one job per block, with the arm's policy."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuenergyd.cli.prove.meters import Meter
from gpuenergyd.client.connection import DaemonClient
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.proof.measurements import Block, IterationSample, PowerSample
from gpuenergyd.core.proof.registration import BASELINE_ARM, Arm
from gpuenergyd.errors import ProofError
from gpuenergyd.store import IterationRow, open_history

_POLL_S = 0.5
_LEAST_STEP_S = 0.25
"""Between readings of the energy counters, whose differences are the power beside the iterations."""
_END_TIMEOUT_S = 60.0
_TAIL_LINES = 12


@dataclass(slots=True)
class TrainingBlocks:
    """Starts the program anew for each block, watches its job, and reads its iterations from the daemon's history.

    The last iterations under the arm's plan count. Runs at full speed are as long as the longest tuned one before, so
    that GPUs are equally warm.
    """

    client: DaemonClient
    socket_path: str
    command: Sequence[str]
    folder: Path
    """For logs of the program and of the calibration."""
    max_slowdown_ratio: float = 0.0
    block_limit_s: float = 3600.0
    meters: Sequence[Meter] = ()
    losses_path: Path | None = None
    """The file to which the program writes one loss per line."""
    calibrated_gpus: Sequence[str] = ()
    """GPUs to calibrate before the pilot; one of each model is enough."""
    check: Callable[[], None] | None = None
    """Called while waiting; raises if a process of the proof's own has ended."""
    job_name: str = field(default_factory=lambda: f"proof-{secrets.token_hex(4)}")
    _job_ids: set[str] = field(default_factory=set)
    """Jobs that ran when the block began."""
    _counted: tuple[float, float] | None = None
    """Instant and sum of the last reading of the energy counters."""
    _longest: int = 0
    """Iterations of the longest tuned run."""

    def calibrate(self) -> Mapping[str, Any]:
        """Run `gpuenergyd calibrate` on the chosen GPUs, or say that none was asked for."""
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

    def run_block(self, arm: Arm, *, num_iterations: int) -> Block:
        """Run the program until enough iterations have run as the arm plans them.

        Raises:
            ProofError: the program ended before, made no plan in time, or a meter cannot be read.
        """
        if self.losses_path is not None:
            self.losses_path.unlink(missing_ok=True)
        gpu_power: list[PowerSample] = []
        meter_power: list[PowerSample] = []
        self._counted = None
        self._job_ids = {str(job["job_id"]) for job in self.client.get_status()["jobs"]}
        begun_at_s = time.time()
        with self._program(arm) as process:
            job_id = self._watch(arm, process, num_iterations, gpu_power, meter_power)
        ended_at_s = time.time()
        rows = self._rows(job_id, arm)[-num_iterations:]
        if len(rows) < num_iterations:
            raise ProofError(f"arm {arm.name!r}: the history has {len(rows)} of {num_iterations} iterations")
        return Block(
            arm=arm.name,
            begun_at_s=begun_at_s,
            ended_at_s=ended_at_s,
            iterations=tuple(
                IterationSample(row.iteration_index, row.started_at.timestamp(), row.iteration_time_s, row.energy_j)
                for row in rows
            ),
            gpu_power=tuple(gpu_power),
            meter_power=tuple(meter_power),
            losses=self._losses(),
        )

    @contextmanager
    def _program(self, arm: Arm) -> Iterator["subprocess.Popen[bytes]"]:
        """Run the program in a session of its own, and end all of it."""
        arguments = ["--job", self.job_name, "--policy", arm.policy, "--max-slowdown", str(self.max_slowdown_ratio)]
        run = [sys.executable, "-m", "gpuenergyd.cli.main", "run", "--socket", self.socket_path, *arguments, "--"]
        with (self.folder / "training.log").open("wb") as log:
            process = subprocess.Popen(
                [*run, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_TIMEOUT_S / 4)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _watch(
        self,
        arm: Arm,
        process: "subprocess.Popen[bytes]",
        num_iterations: int,
        gpu_power: list[PowerSample],
        meter_power: list[PowerSample],
    ) -> str:
        """Sample power until the job has enough iterations; return its ID."""
        until_s = time.monotonic() + self.block_limit_s
        before = frozenset(self._job_ids)
        while True:
            if self.check is not None:
                self.check()
            status = self.client.get_status()
            job = self._own_job(status, arm, before)
            if job is not None:
                self._sample(status, job, gpu_power, meter_power)
                if self._is_enough(arm, job, num_iterations):
                    return str(job["job_id"])
            if process.poll() is not None:
                raise ProofError(f"arm {arm.name!r}: the program ended too early: {self._log_tail()}")
            if time.monotonic() > until_s:
                reason = job["phase_reason"] if job else "no job registered"
                raise ProofError(f"arm {arm.name!r}: too few iterations within {self.block_limit_s:g} s: {reason}")
            time.sleep(_POLL_S)

    def _own_job(self, status: Mapping[str, Any], arm: Arm, before: frozenset[str]) -> Mapping[str, Any] | None:
        """Return the job that has registered since the program was started."""
        new = [job for job in status["jobs"] if job["job_id"] not in before]
        if len(new) > 1:
            raise ProofError(f"{len(new)} jobs began at once; a proof needs the host for itself")
        if new and new[0]["policy"] != arm.policy:
            raise ProofError(f"arm {arm.name!r}: the program chose policy {new[0]['policy']!r}, not {arm.policy!r}")
        return new[0] if new else None

    def _is_enough(self, arm: Arm, job: Mapping[str, Any], num_iterations: int) -> bool:
        if arm.name == BASELINE_ARM:
            return int(job["num_iterations"]) >= max(num_iterations + 2, self._longest)
        if job["is_given_up"]:
            raise ProofError(f"arm {arm.name!r}: the job stays at full speed: {job['phase_reason']}")
        is_enough = int(job["num_tuned_iterations"] or 0) >= num_iterations
        if is_enough:
            self._longest = max(self._longest, int(job["num_iterations"]))
        return is_enough

    def _sample(
        self,
        status: Mapping[str, Any],
        job: Mapping[str, Any],
        gpu_power: list[PowerSample],
        meter_power: list[PowerSample],
    ) -> None:
        own = {rank["gpu_uuid"] for rank in job["ranks"]}
        gpus = [gpu for gpu in status["gpus"] if gpu["gpu_uuid"] in own]
        if gpus and all(gpu["total_energy_j"] is not None for gpu in gpus):
            at_s = time.time() - max(gpu["reading_age_s"] for gpu in gpus)
            total_j = sum(gpu["total_energy_j"] for gpu in gpus)
            if self._counted is not None and at_s - self._counted[0] >= _LEAST_STEP_S:
                since_s, before_j = self._counted
                middle_s, power_w = (since_s + at_s) / 2, (total_j - before_j) / (at_s - since_s)
                gpu_power.append(PowerSample(round(middle_s, 4), round(power_w, 3)))
            if self._counted is None or at_s - self._counted[0] >= _LEAST_STEP_S:
                self._counted = (at_s, total_j)
        for meter in self.meters:
            reading = meter.read()
            if reading is not None and (not meter_power or reading.at_s > meter_power[-1].at_s):
                meter_power.append(reading)

    def _rows(self, job_id: str, arm: Arm) -> list[IterationRow]:
        """Return the iterations that ran as the arm plans them, once the daemon has stored them all."""
        history_path = self.client.get_status()["files"]["history_path"]
        if history_path is None:
            raise ProofError("the daemon's history is not a local file; a proof reads iterations from it")
        purpose = PlanPurpose.BASELINE if arm.name == BASELINE_ARM else PlanPurpose.TUNED
        until_s = time.monotonic() + _END_TIMEOUT_S
        while True:
            with open_history(str(history_path)) as history:
                ended = any(job.job_id == job_id and job.ended_at for job in history.job_summaries(job=job_id))
                rows = [row for row in history.iterations(job_id) if row.is_regular and row.plan_purpose is purpose]
            if ended:
                return rows
            if time.monotonic() > until_s:
                raise ProofError(f"the daemon did not record the end of job {self.job_name!r}")
            time.sleep(_POLL_S)

    def _losses(self) -> tuple[float, ...]:
        if self.losses_path is None:
            return ()
        try:
            lines = self.losses_path.read_text(encoding="utf-8").split()
            return tuple(float.fromhex(line) if "x" in line else float(line) for line in lines)
        except (OSError, ValueError) as error:
            raise ProofError(f"losses in {self.losses_path} cannot be read: {error}") from None

    def _log_tail(self) -> str:
        lines = (self.folder / "training.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-_TAIL_LINES:]) or "it printed nothing"
