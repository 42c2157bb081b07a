"""The prior as people read it: what a job on a GPU model would start from, given the past jobs of its user."""

import math
from collections.abc import Sequence

import numpy as np

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.prior_policy import PriorCurve, PriorPoint, PriorView
from gpuenergyd_policies.learning.curves import CurveModel, Evidence, Posterior
from gpuenergyd_policies.learning.deviations import POWER, TIME
from gpuenergyd_policies.learning.past_jobs import OwnEvidence, posteriors, same_work
from gpuenergyd_policies.learning.published import prior_for
from gpuenergyd_policies.learning.seen import ClassAtFullSpeed, points_of

CLOCK_RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6)


def prior_view(gpu_model_name: str, past_jobs: Sequence[PastJob]) -> PriorView:
    """Return the prior of a job on a GPU model that is like the newest of the past jobs on it."""
    own = [job for job in past_jobs if job.learned.gpu_model_name == gpu_model_name]
    classes = _classes_like(own[0]) if own else _assumed_classes()
    gpu_uuids = own[0].gpu_uuids if own else ()
    past = same_work(own, classes, gpu_model_name, own[0].learned.power_w, gpu_uuids) if own else ()
    prior = prior_for(gpu_model_name)
    wanted = points_of(classes, [(k, clock) for k, of_class in enumerate(classes) for clock in of_class.clocks_mhz])
    nothing = points_of(classes, []), Evidence(np.zeros((0, 0)), np.zeros(0), np.zeros((0, 0)))
    alone = (OwnEvidence(CurveModel(*of_kind), *nothing) for of_kind in ((prior.time, TIME), (prior.power, POWER)))
    used, time, power = posteriors(wanted, past, classes, *alone)
    curves = []
    for k, of_class in enumerate(classes):
        first = k * len(CLOCK_RATIOS)
        points = [_point(time, power, first + j, ratio) for j, ratio in enumerate(CLOCK_RATIOS)]
        curves.append(PriorCurve(of_class.key.kind, tuple(points)))
    return PriorView(gpu_model_name, prior.basis, 0 if used is None else 1, tuple(curves))


def _classes_like(job: PastJob) -> list[ClassAtFullSpeed]:
    top = job.learned.max_sm_clock_mhz
    clocks = tuple(round(ratio * top) for ratio in CLOCK_RATIOS)
    return [
        ClassAtFullSpeed(InstructionClass(0, curve.kind), clocks, curve.time_s, curve.full_speed_mhz)
        for curve in sorted(job.learned.curves, key=lambda own: own.kind)
    ]


def _assumed_classes() -> list[ClassAtFullSpeed]:
    # Any maximum clock will do where no past job names it: the prior only knows clocks relative to it.
    clocks = tuple(round(1000 * ratio) for ratio in CLOCK_RATIOS)
    kinds = (InstructionKind.B, InstructionKind.F)
    return [ClassAtFullSpeed(InstructionClass(0, kind), clocks, 1.0, float(clocks[0])) for kind in kinds]


def _point(time: Posterior, power: Posterior, k: int, clock_ratio: float) -> PriorPoint:
    return PriorPoint(
        clock_ratio,
        math.exp(float(time.mean[k])),
        float(time.sigma[k]),
        math.exp(float(power.mean[k])),
        float(power.sigma[k]),
    )
