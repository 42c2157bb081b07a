"""The iterations that savings are computed from stay, and give what all iterations would give."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.job.measurements.knowledge import ComparedIterations
from gpuenergyd.core.job.measurements.savings import measured_saving
from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.plan import PlanPurpose

PURPOSES: dict[str | None, PlanPurpose] = {
    "baseline": PlanPurpose.BASELINE, "proof": PlanPurpose.BASELINE, "tuned": PlanPurpose.TUNED,
    "probe": PlanPurpose.TRIAL,
}  # fmt: skip


def iteration(index: int, plan_id: str, *, waited_s: float = 0.0, is_forced: bool = False) -> IterationObservation:
    draw = random.Random(index)
    energy_j = (88.0 if plan_id == "tuned" else 100.0) * (1 + draw.gauss(0, 0.01))
    return IterationObservation(
        index, plan_id, 1.0 + draw.gauss(0, 0.01), (), (RankEnergy(0, 1.0, energy_j, ()),),
        waited_s=waited_s, is_at_straggler_pace=is_forced,
    )  # fmt: skip


def compared(*iterations: IterationObservation) -> ComparedIterations:
    made = ComparedIterations()
    made.restore(iterations, PURPOSES)
    return made


def test_iterations_at_another_pace_and_under_experiments_count_nothing() -> None:
    saving = compared(
        *(
            iteration(
                index, "proof" if 4 <= index < 8 or 14 <= index < 18 else "tuned" if index < 30 else "probe",
                waited_s=0.5 if index == 7 else 0.0, is_forced=index in {13, 23},
            )
            for index in range(40)
        )
    ).saving()  # fmt: skip

    assert saving is not None
    assert (saving.num_full_speed, saving.num_tuned) == (5, 20), "nor does the first one of a block"


@given(st.lists(st.tuples(st.integers(3, 22), st.integers(1, 80)), min_size=2, max_size=8))
def test_they_give_the_saving_of_all_iterations(runs: list[tuple[int, int]]) -> None:
    everything: list[IterationObservation] = []
    for num_full_speed, num_tuned in runs:
        for plan_id, number in (("proof", num_full_speed), ("tuned", num_tuned)):
            everything += [iteration(k, plan_id) for k in range(len(everything), len(everything) + number)]
    tuned = [o for o in everything if o.plan_id == "tuned"]
    full_speed = [
        now for before, now in zip([None, *everything], everything, strict=False)
        if now.plan_id == "proof" and before is not None and before.plan_id == "proof"
    ]  # fmt: skip
    expected, found = measured_saving(full_speed, tuned), compared(*everything).saving()

    assert (found is None) is (expected is None)
    if found is not None and expected is not None:
        assert found.saving_ratio == expected.saving_ratio
        assert found.slowdown_ratio == expected.slowdown_ratio


def test_many_brackets_of_a_long_job_are_kept() -> None:
    """Blocks 400 iterations apart: of twelve thousand iterations, those beside thirty blocks count."""
    made = ComparedIterations()
    for index in range(12_000):
        made.add(iteration(index, "proof" if index % 400 < 4 else "tuned"), PURPOSES)
    saving = made.saving()

    assert saving is not None
    assert saving.saving_ratio is not None
    assert saving.num_full_speed == 30 * 3
    assert saving.saving_ratio.estimate == pytest.approx(0.12, abs=0.005)
    assert saving.saving_ratio.high - saving.saving_ratio.low < 0.01


def test_what_is_dropped_is_in_no_bracket_any_more() -> None:
    made = compared(*(iteration(k, "proof" if k % 12 < 4 else "tuned") for k in range(100)))
    assert made.saving() is not None
    made.keep(lambda own: own.iteration_index >= 84)
    assert made.saving() is None
