"""The frequency-file policy: runs a plan of Zeus's pipeline optimizer (Perseus), or evaluates a folder of them.

`freqs_pipeline_00010.py` is a Python literal: a list with one list per rank of pairs like `("forward", 1410)`, in
program order; Kareus writes the same. What the optimizer's server has served is a list of `rank` and `frequencies`.
"""

import ast
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from gpuenergyd.core.pipeline.fitted import with_clocks
from gpuenergyd.core.pipeline.graph import Instruction, InstructionClass, dependency_graph
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, baseline_plan
from gpuenergyd.core.pipeline.profile import KIND_OF_WORD
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.core.policy_api.policy import FrontierPoint, JobView, OfflinePlan, OfflineRequest
from gpuenergyd.errors import ProfileError, TargetError, UsageError
from gpuenergyd_policies.planning.offline_requests import unproven_plan
from gpuenergyd_policies.planning.plan_evaluation import PlanEvaluation, baseline, evaluate_clocks, rank_orders
from gpuenergyd_policies.planning.switching.requests import clock_changes

_FILES = "freqs_pipeline_*.py"
_INVALID = (ArithmeticError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError)


class FrequencyFile:
    """Gives each instruction the clock that a file names, or the next higher one that its GPU supports."""

    def __init__(self, path: str = "") -> None:
        """Read the file; its text is parsed, not executed, and no message quotes it, since it may be private.

        Raises:
            UsageError: it cannot be read.
            ProfileError: it is no frequency file.
        """
        self._path = _path(path)
        try:
            ranks = ast.literal_eval(self._path.read_text(encoding="utf-8"))
            if isinstance(ranks[0], dict):
                ranks = [rank["frequencies"] for rank in sorted(ranks, key=lambda rank: rank["rank"])]
            self._ranks = [[(KIND_OF_WORD[word], _whole(mhz)) for word, mhz in rank] for rank in ranks]
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
        except _INVALID:
            words = ", ".join(KIND_OF_WORD)
            raise ProfileError(
                f"{path}: not a frequency file: a list per rank of pairs of a word ({words}) and a clock in MHz"
            ) from None

    def clocks_mhz(self, orders: Sequence[Sequence[Instruction]]) -> dict[Instruction, int]:
        """Return the clock of each instruction.

        Raises:
            ProfileError: the file is for another pipeline or another order.
        """
        kinds = [[kind for kind, _ in row] for row in self._ranks]
        if kinds != [[instruction.kind for instruction in order] for order in orders]:
            raise ProfileError(f"{self._path.name}: is for another order of instructions, or another number of ranks")
        rows = zip(orders, self._ranks, strict=True)
        return {i: mhz for order, row in rows for i, (_, mhz) in zip(order, row, strict=True)}

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return the file's plan once every instruction has been timed at full speed.

        Until a plan has run, the times under it are unknown. Clocks are requested as if all instructions took as long
        as at full speed, so that a higher clock comes early rather than late.
        """
        plan_id = view.plan_id("frequency-file")
        if issued := [plan for plan in view.issued_plans if plan.plan_id == plan_id]:
            return issued[-1]
        times_s: dict[InstructionClass, list[float]] = {}
        for sample in (sample for seen in view.observations for sample in seen.instruction_samples):
            times_s.setdefault(sample.instruction_class, []).append(sample.time_s)
        graph = dependency_graph(
            view.schedule, communication_latency_s=view.communication_latency_s, launch_gap_s=view.launch_gap_s
        )
        if not view.can_set_clocks or not set(graph.classes) <= times_s.keys():
            return baseline_plan(reason="at full speed: clocks may not be set, or an instruction was not measured yet")
        try:
            wanted_mhz = self.clocks_mhz(view.schedule.orders)
        except ProfileError as error:
            return baseline_plan(reason=str(error))
        offered_mhz = [gpu.supported_sm_clocks_mhz for gpu in view.gpus]
        clocks_mhz = {
            i: min((clock for clock in offered_mhz[i.pp_rank] if clock >= mhz), default=max(offered_mhz[i.pp_rank]))
            for i, mhz in wanted_mhz.items()
        }
        planned = timeline(graph, [median(times_s[i.instruction_class]) for i in graph.instructions])
        changes = clock_changes(planned, clocks_mhz, latency=view.switch_latencies)
        ranks = (
            RankClocks(rank, tuple(clocks_mhz[i] for i in order), changes[rank])
            for rank, order in enumerate(view.schedule.orders)
        )
        return ClockPlan(plan_id, PlanPurpose.TUNED, tuple(ranks), reason=f"clocks of {self._path.name}, as given")


def plan_offline(request: OfflineRequest) -> OfflinePlan:
    """Return the plan of a file, or of a folder the one of least energy within the target; all are the frontier.

    Raises:
        ProfileError: a file is for another pipeline, or no frequency file.
        TargetError: all plans are slower than the target.
        UsageError: no file can be read.
    """
    began_cpu_s = time.process_time()
    path = _path(request.options.get("path", ""))
    evaluated = [_evaluated(request, file) for file in (sorted(path.glob(_FILES)) if path.is_dir() else [path])]
    if not evaluated:
        raise UsageError(f"{path}: no {_FILES} in this folder")
    target_s = request.target.iteration_time_s(baseline(request.baseline_graph, request.profile).iteration_time_s)
    in_time = [plan for plan in evaluated if plan.iteration_time_s <= target_s]
    if not in_time:
        fastest_s = min(plan.iteration_time_s for plan in evaluated)
        raise TargetError(f"target {target_s:.6g} s: the fastest plan of {path} takes {fastest_s:.6g} s")
    best = min(in_time, key=lambda plan: plan.energy_j)
    points = sorted((plan.iteration_time_s, plan.energy_j) for plan in evaluated) if request.want_frontier else []
    plan = unproven_plan(request, best, solve_cpu_s=time.process_time() - began_cpu_s)
    return replace(plan, frontier=tuple(FrontierPoint(*point, None) for point in points))


def _evaluated(request: OfflineRequest, file: Path) -> PlanEvaluation:
    """Return time and energy of a file's plan; clocks between measured ones are interpolated."""
    clocks_mhz = FrequencyFile(str(file)).clocks_mhz(rank_orders(request.graph))
    profile = with_clocks(request.profile, clocks_mhz)
    return evaluate_clocks(request.graph, profile, [clocks_mhz[i] for i in request.graph.instructions])


def _whole(sm_clock_mhz: object) -> int:
    if not isinstance(sm_clock_mhz, int) or sm_clock_mhz <= 0:
        raise ValueError(sm_clock_mhz)
    return sm_clock_mhz


def _path(path: str) -> Path:
    if not path:
        raise UsageError(f"policy frequency-file: path is missing, e.g. frequency-file:path=/plans/{_FILES}")
    return Path(path)
