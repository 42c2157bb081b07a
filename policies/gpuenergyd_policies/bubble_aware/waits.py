"""Recent lengths of the phases in which a plain loop waits for data or for other ranks, which plans use."""

from dataclasses import replace

import numpy as np

from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.core.pipeline.profile import InstructionProfile, PipelineProfile
from gpuenergyd.core.policy_api.policy import JobView

_RECENT = 16
"""Iterations whose waits count."""
_QUANTILE = 0.25
"""Waits for other ranks come on top of the usual time, and the clock must be high again before a wait ends."""


def is_flat(key: InstructionClass, profile: InstructionProfile) -> bool:
    """Return whether a phase is a wait that takes the same time at every clock."""
    return key.kind.is_wait and len({option.time_s for option in profile.options}) == 1


def with_recent_waits(profile: PipelineProfile, view: JobView) -> PipelineProfile:
    """Return a profile whose waits take as long as in the last iterations, at the same power."""
    waits = {key: own for key, own in profile.classes.items() if is_flat(key, own)}
    if not waits:
        return profile
    recent = [observation for observation in view.observations if observation.is_regular][-_RECENT:]
    classes = dict(profile.classes)
    for key, own in waits.items():
        seen_s = [
            sample.time_s
            for observation in recent
            for sample in observation.instruction_samples
            if sample.instruction_class == key
        ]
        if seen_s:
            time_s = float(np.quantile(seen_s, _QUANTILE))
            ratio = time_s / own.at_max_clock.time_s
            options = (replace(o, time_s=time_s, energy_j=o.energy_j * ratio) for o in own.options)
            classes[key] = InstructionProfile(tuple(options))
    return PipelineProfile(classes, profile.blocking_power_w)
