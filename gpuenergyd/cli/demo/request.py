"""The parsed options of `gpuenergyd demo`, and what they must fulfil before anything starts."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from gpuenergyd.cli.demo.grid import DEFAULT_BUDGET_RATIO, DemoGrid
from gpuenergyd.errors import GpuEnergyError, UsageError

_SLOWEST_STAGE_S = 0.18
"""Upper bound on the time of one microbatch on the slowest stage, forward and backward, with 2 to 8 stages."""


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
    grid: DemoGrid | None = None
    """Grid to follow; the demo then runs for the length of the job."""
    is_held: bool = False
    """Whether the daemon is kept after the training until the user presses Enter."""

    @property
    def gpus(self) -> str:
        """The GPUs in words."""
        model = f"{self.gpu_model} " if self.driver == "simulated" else ""
        return f"{self.num_gpus} simulated {model}GPUs"

    @property
    def iteration_time_s(self) -> float:
        """Approximate iteration time at full speed, an upper bound on an idle host."""
        return (self.num_microbatches + self.num_gpus - 1) * _SLOWEST_STAGE_S


def check_request(request: DemoRequest, out: Path) -> None:
    """Check the options before anything starts.

    Raises:
        UsageError: an option is invalid, or options contradict each other.
        GpuEnergyError: a package is missing, or the GPU model is unknown.
    """
    from gpuenergyd.daemon.processes.plugins import check_policy_name  # noqa: PLC0415  start fast
    from gpuenergyd.gpu.drivers.device_parameters import device_parameters  # noqa: PLC0415
    from gpuenergyd.gpu.drivers.opening import DRIVERS  # noqa: PLC0415

    check_policy_name(request.policy)
    for module in ("torch", "gpuenergyd_trainers"):
        if importlib.util.find_spec(module) is None:
            raise GpuEnergyError(f"the demo needs {module}: pip install 'gpuenergyd[daemon,trainers]'")
    if request.num_microbatches < request.num_gpus:
        raise UsageError(
            f"--microbatches {request.num_microbatches}: torch's 1F1B needs at least one per GPU, {request.num_gpus}"
        )
    if not out.parent.is_dir():
        raise UsageError(f"cannot write {out}: no folder {out.parent}")
    if request.driver not in DRIVERS:
        raise UsageError(f"--driver {request.driver!r}: must be one of {', '.join(DRIVERS)}")
    if request.driver == "simulated":
        device_parameters(request.gpu_model)  # refuses an unknown model
    if request.grid is not None:
        request.grid.check_length(
            iteration_time_s=request.iteration_time_s,
            baseline_iterations=request.baseline_iterations,
            budget_ratio=request.max_slowdown_ratio or DEFAULT_BUDGET_RATIO,
        )
