"""The parsed options of `gpuenergyd demo`, and their checks before anything starts."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd_sim.demo.grid import DEFAULT_BUDGET_RATIO, DemoGrid
from gpuenergyd_sim.driver.world_kinds import WorldKind

DEFAULT_POLICY = "bubble-aware"
_DRIVERS = ("simulated", "nvml")

_SLOWEST_STAGE_S = 0.18
"""Upper bound on the time of one microbatch on the slowest stage, forward and backward, with 2 to 8 stages."""

_MAX_CORRECTIONS_RATIO = 2
"""Stop after this many times the requested planned iterations, even if the last plan is still new."""

_MAX_PLANNING_ITERATIONS = 8
"""Upper bound on the iterations between the policy's first reply and its first plan."""


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """Parsed options of `gpuenergyd demo`."""

    driver: str
    num_gpus: int
    gpu_model: str
    num_microbatches: int
    baseline_iterations: int
    tuned_iterations: int
    policy: str
    max_slowdown_ratio: float
    seed: int
    time_limit_s: float
    simulation: WorldKind = WorldKind.UNKIND
    """Behavior of the simulated GPUs; not used for GPUs behind a fake NVML library."""
    grid: DemoGrid | None = None
    """Grid to follow; the demo then runs for the length of the job."""
    is_held: bool = False
    """Whether the daemon is kept after the result until the user presses Enter."""
    is_in_virtual_time: bool = True
    """Whether everything runs in virtual time, which does not depend on the load of this host."""
    kills_worker_after_s: float | None = None
    """Time from the job's registration to killing the GPU worker; None for never."""

    @property
    def gpus(self) -> str:
        if self.driver != "simulated":
            return count_text(self.num_gpus, "simulated GPU")
        if self.simulation is WorldKind.KIND:
            return f"{self.num_gpus} ideal simulated {self.gpu_model} GPUs"
        return f"{self.num_gpus} simulated {self.gpu_model} GPUs (late clocks, slow reads, stalls)"

    @property
    def run_ahead_options(self) -> tuple[str, ...]:
        """Options that make the training launch work ahead of its GPUs, as programs do on real GPUs."""
        is_unkind = self.driver == "simulated" and self.simulation is WorldKind.UNKIND
        return ("--run-ahead", "1") if is_unkind else ()

    @property
    def iteration_time_s(self) -> float:
        """Approximate iteration time at full speed; an upper bound on an idle host."""
        return (self.num_microbatches + self.num_gpus - 1) * _SLOWEST_STAGE_S

    def is_finished(self, job: Mapping[str, Any]) -> bool:
        """Return whether the current plan has run long enough, or waiting for that is pointless.

        Waiting is pointless if corrections have taken too many iterations, or if a busy host made plans slow so often
        that the policy tries settings again, which in a running job is spread over hundreds of iterations.
        """
        if self.grid is not None:
            return self.grid.is_over(job)
        num_tuned = job["num_tuned_iterations"] or 0
        tries_again = job["phase"] == "trial" and job["saving_ratio"] is not None
        is_settled = job["plan_purpose"] == "tuned" and job["num_iterations_of_plan"] > self.tuned_iterations
        return (
            is_settled
            or num_tuned >= _MAX_CORRECTIONS_RATIO * self.tuned_iterations
            or (tries_again and num_tuned >= self.tuned_iterations)
        )

    def reason_for_no_plan(self, job: Mapping[str, Any]) -> str | None:
        """Return why the job will not reach a plan; None while it may."""
        failed = f"policy {job['policy']} failed: "
        reason = str(job["phase_reason"])
        # A policy that was only too slow is asked again.
        if job["phase"] == "fallback" and reason.startswith(failed) and "did not answer within" not in reason:
            return f"policy {self.policy!r} failed: {reason.removeprefix(failed)}"
        if job["is_given_up"]:
            return f"the job stays at full speed: {reason}"
        if self._has_no_plan(job):
            return (
                f"policy {self.policy!r} made no plan: {reason if job['phase'] == 'fallback' else job['plan_reason']}"
            )
        return None

    def _has_no_plan(self, job: Mapping[str, Any]) -> bool:
        """Return whether the policy runs the job at full speed although it has replied and had enough iterations.

        A first reply that takes long on a busy host, while the training continues, is not a refusal to plan.
        """
        if self.grid is not None:
            return False  # the next hours may permit one
        is_at_full_speed = job["phase"] in {"tuned", "fallback"} and job["plan_purpose"] in {"baseline", "predicted"}
        enough = self.baseline_iterations + self.tuned_iterations + _MAX_PLANNING_ITERATIONS
        return (
            is_at_full_speed
            and not job["num_tuned_iterations"]
            and job["num_iterations_of_plan"] >= _MAX_PLANNING_ITERATIONS
            and (job["num_baseline_iterations"] or 0) >= enough
        )


def check_request(request: DemoRequest, out: Path) -> None:
    """Check the options before anything starts.

    Raises:
        UsageError: an option is invalid, or options contradict each other.
        GpuEnergyError: a package is missing, or the GPU model is unknown.
    """
    from gpuenergyd.daemon.processes.plugins import check_policy_name  # noqa: PLC0415  start fast
    from gpuenergyd_sim.driver.device_parameters import device_parameters  # noqa: PLC0415

    check_policy_name(request.policy)
    for module in ("torch", "gpuenergyd_trainers", *(("greenlet",) if request.is_in_virtual_time else ())):
        if importlib.util.find_spec(module) is None:
            raise GpuEnergyError(f"the demo needs {module}: pip install 'gpuenergyd[daemon,demo]'")
    if request.num_microbatches < request.num_gpus:
        raise UsageError(
            f"--microbatches {request.num_microbatches}: torch's 1F1B needs at least one per GPU, {request.num_gpus}"
        )
    if not out.parent.is_dir():
        raise UsageError(f"cannot write {out}: no folder {out.parent}")
    if request.driver not in _DRIVERS:
        raise UsageError(f"--driver {request.driver!r}: must be one of {', '.join(_DRIVERS)}")
    if request.driver == "simulated":
        device_parameters(request.gpu_model)  # refuses an unknown model
    if request.grid is not None:
        request.grid.check_length(
            iteration_time_s=request.iteration_time_s,
            baseline_iterations=request.baseline_iterations,
            budget_ratio=request.max_slowdown_ratio or DEFAULT_BUDGET_RATIO,
        )
