"""Waits inside an iteration at lower clocks: a GPU that waits for its peers draws less at a lower clock.

The last step of planning (see `planning.switching.waits`): the clocks of instructions stay, and where a wait is long
enough to lower the clock and to raise it again in time, two more changes are requested. Waits vary, so the clock falls
a little after the planned begin and is back a little before the planned end.
"""

from gpuenergyd.core.pipeline.profile import PipelineProfile, with_waiting_power
from gpuenergyd_policies.bubble_aware.candidates import ON_TIME_RATIO, Candidate, candidate_of
from gpuenergyd_policies.bubble_aware.model import PipelineModel
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.planning.large import TOO_LARGE
from gpuenergyd_policies.planning.switching.simulation import simulate_switching
from gpuenergyd_policies.planning.switching.waits import WaitRules, with_lowered_waits


def with_cheaper_waits(
    model: PipelineModel, cautious: PipelineProfile, chosen: Candidate, *, margin_s: float
) -> Candidate:
    """Return the candidate with its waits lowered; as it is where that saves hardly anything or costs time.

    The plan must be on time with the cautious profile that clocks were chosen with, too. `margin_s` is how long after
    its planned begin a wait is lowered, and how long before its planned end, beyond the latency of the raise, the clock
    is requested back.
    """
    power = model.waiting_power
    if power is None or len(model.graph.instructions) > TOO_LARGE:
        return chosen
    likely, late = with_waiting_power(model.profile, power), with_waiting_power(cautious, power)

    def simulated(profile: PipelineProfile, candidate: Candidate) -> tuple[float, float]:
        found = simulate_switching(model.graph, profile, candidate.changes, latency=model.latencies)
        return found.iteration_time_s, found.energy_j

    likely_s, energy_j = simulated(likely, chosen)
    late_s, _ = simulated(late, chosen)
    # A call in a wait stops nothing as planned; where ranks are a little late or early, it may stop the critical path.
    stalls_s = 2 * max(latency.stall_s for latency in model.latencies)
    least_saved_j = TUNING.least_saving_of_wait * energy_j + stalls_s * energy_j / likely_s
    changes, _ = with_lowered_waits(
        chosen.planned,
        chosen.changes,
        power,
        latency=model.latencies,
        rules=WaitRules(margin_s=margin_s, least_saved_j=least_saved_j, of_running_job=True),
    )
    lowered = candidate_of(model, chosen.clock_of, changes, chosen.planned)
    lowered_s, lowered_j = simulated(likely, lowered)
    price_j = TUNING.price_of_lateness * energy_j / likely_s * max(0.0, lowered.late_s - chosen.late_s)
    is_on_time = (
        lowered_s <= (1 + ON_TIME_RATIO) * likely_s and simulated(late, lowered)[0] <= (1 + ON_TIME_RATIO) * late_s
    )
    is_better = energy_j - lowered_j - price_j >= TUNING.least_saving_of_waits * energy_j
    is_permitted = lowered.excess_of_calls <= max(1.0, chosen.excess_of_calls)
    return lowered if is_on_time and is_better and is_permitted else chosen
