"""Blocks of a proof as runs of a training program under a daemon: one job per block, with the arm's policy."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuenergyd.count_text import count_text
from gpuenergyd.store import IterationRow
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
from gpuenergyd_prove.proof.measurements import Block
from gpuenergyd_prove.proof.registration import BASELINE_ARM, Arm

_END_TIMEOUT_S = 15.0
_TAIL_LINES = 12
_LEAST_REHEARSED = 12
"""Iterations under a plan, with a margin, after which the daemon keeps the profile for the same job's next run."""


@dataclass(slots=True)
class TrainingBlocks:
    """Starts the program for each block, watches its job, and reads its iterations from the daemon's history.

    The last iterations under the arm's plan are evaluated. A run at full speed is as long as the last tuned run, so
    that GPUs are equally warm.
    """

    options: BlockOptions
    command: Sequence[str]
    folder: Path
    """Folder for the program's log, `training.log`."""
    losses_path: Path | None = None
    """The file to which the program writes one loss per line."""
    job_name: str = field(default_factory=lambda: f"proof-{secrets.token_hex(4)}")
    _num_tuned_run: int = 0
    """Number of iterations of the last tuned run."""

    def calibrate(self) -> Mapping[str, Any]:
        return self.options.calibrate()

    def rehearse(self, arm: Arm, *, num_iterations: int) -> None:
        """Run the program once under the arm's policy, so that planner and profile are ready in every block."""
        self.run_block(arm, num_iterations=max(num_iterations, _LEAST_REHEARSED))

    def run_block(self, arm: Arm, *, num_iterations: int) -> Block:
        """Run the program until enough iterations have run under the arm's plan.

        Raises:
            ProofError: the program ended too early, no plan was made in time, or a meter cannot be read.
        """
        if self.losses_path is not None:
            self.losses_path.unlink(missing_ok=True)
        sampler = PowerSampler(self.options.meters)
        before = frozenset(str(job["job_id"]) for job in self.options.status()["jobs"])
        begun_at_s = time.time()
        with self._program(arm) as process:
            job_id = self._watch(arm, process, num_iterations, sampler, before)
        ended_at_s = time.time()
        rows = self._rows(job_id, arm)[-num_iterations:]
        if len(rows) < num_iterations:
            raise ProofError(
                f"arm {arm.name!r}: the history has {len(rows)} of {count_text(num_iterations, 'iteration')}"
            )
        return Block(
            arm=arm.name,
            begun_at_s=begun_at_s,
            ended_at_s=ended_at_s,
            iterations=samples_of(rows),
            gpu_power=tuple(sampler.gpu_power),
            meter_power=tuple(sampler.meter_power),
            losses=self._losses(),
        )

    @contextmanager
    def _program(self, arm: Arm) -> Iterator["subprocess.Popen[bytes]"]:
        """Run the program in its own session, and end the whole session; if the proof is killed, the kernel ends it."""
        ratio = str(self.options.max_slowdown_ratio)
        arguments = ["--job", self.job_name, "--policy", arm.policy, "--max-slowdown", ratio]
        run = ["gpuenergyd.cli.main", "run", "--socket", self.options.socket_path, *arguments, "--"]
        with_parent = [sys.executable, "-m", "gpuenergyd_sim.private_daemon.with_parent", str(os.getpid())]
        with (self.folder / "training.log").open("wb") as log:
            process = subprocess.Popen(
                [*with_parent, *run, *self.command],
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
                    process.wait(_END_TIMEOUT_S)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _watch(
        self,
        arm: Arm,
        process: "subprocess.Popen[bytes]",
        num_iterations: int,
        sampler: PowerSampler,
        before: frozenset[str],
    ) -> str:
        """Sample power until the job has enough iterations; return its id. `before`: ids of jobs that already ran."""
        limit_s = self.options.block_limit_s
        until_s = time.monotonic() + limit_s
        while True:
            status = self.options.status()
            job = _own_job(status, arm, before)
            if job is not None:
                sampler.sample(status, job)
                if self._is_enough(arm, job, num_iterations):
                    return str(job["job_id"])
            if process.poll() is not None:
                raise ProofError(f"arm {arm.name!r}: the program ended too early: {self._log_tail()}")
            if time.monotonic() > until_s:
                reason = job["phase_reason"] if job else "no job registered"
                raise ProofError(f"arm {arm.name!r}: too few iterations within {limit_s:g} s: {reason}")
            time.sleep(POLL_S)

    def _is_enough(self, arm: Arm, job: Mapping[str, Any], num_iterations: int) -> bool:
        total = int(job["num_iterations"])
        if arm.name == BASELINE_ARM:
            return self._is_long_enough(arm, job, total, max(num_iterations + 2, self._num_tuned_run), num_iterations)
        check_is_tuned(job, arm, num_iterations)
        num_tuned = int(job["num_tuned_iterations"] or 0)
        is_enough = self._is_long_enough(arm, job, num_tuned, num_iterations, num_iterations)
        if is_enough:
            self._num_tuned_run = total
        return is_enough

    def _is_long_enough(self, arm: Arm, job: Mapping[str, Any], done: int, wanted: int, num_iterations: int) -> bool:
        """Return whether a block has enough iterations, and most of the last ones have a measured energy."""
        if done < wanted or done >= wanted + (LONGEST_RATIO - 1) * num_iterations:
            return done >= wanted
        with self.options.history() as history:
            return has_energies(rows_of_arm(history, str(job["job_id"]), arm), num_iterations)

    def _rows(self, job_id: str, arm: Arm) -> list[IterationRow]:
        """Return the iterations that ran under the arm's plan, once the daemon has stored them all."""
        until_s = time.monotonic() + HISTORY_LIMIT_S
        while True:
            with self.options.history() as history:
                ended = any(job.job_id == job_id and job.ended_at for job in history.job_summaries(job=job_id))
                rows = rows_of_arm(history, job_id, arm)
            if ended:
                return rows
            if time.monotonic() > until_s:
                raise ProofError(f"the daemon did not record the end of job {self.job_name!r}")
            time.sleep(POLL_S)

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


def _own_job(status: Mapping[str, Any], arm: Arm, before: frozenset[str]) -> Mapping[str, Any] | None:
    """Return the job that has registered since the program was started."""
    new = [job for job in status["jobs"] if job["job_id"] not in before]
    if len(new) > 1:
        raise ProofError(f"{count_text(len(new), 'job')} began at once; a proof needs the host for itself")
    if new and new[0]["policy"] != arm.policy:
        raise ProofError(f"arm {arm.name!r}: the program chose policy {new[0]['policy']!r}, not {arm.policy!r}")
    return new[0] if new else None
