"""The figures that a job's ranks are sent: means of the newest iterations, totals, and the saving with its interval."""

from types import SimpleNamespace
from typing import Any

from gpuenergyd.core.job.measurements.savings import Interval, MeasuredSaving, SavingEstimate
from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.daemon.jobs.figures import FIGURES_EVERY_NS, FiguresOfJob, JobTotals
from gpuenergyd.wire.messages import JobFigures


def iteration(time_s: float, energy_j: float | None, num_tokens: int | None = None) -> IterationObservation:
    return IterationObservation(1, None, time_s, (), (RankEnergy(0, time_s, energy_j, ()),), num_tokens=num_tokens)


def figures_of(*, saving: MeasuredSaving | None = None) -> FiguresOfJob:
    estimate = SavingEstimate(0, 1.0, 100.0, 1.0, 90.0, saving)
    job: Any = SimpleNamespace(phase="tuned", estimate=lambda: estimate, account=None)
    return FiguresOfJob(job)


def test_figures_are_means_since_the_previous_ones_and_totals() -> None:
    figures = figures_of()
    nothing = figures.at(1)
    for energy_j in (100.0, 120.0):
        figures.totals = figures.totals.plus(iteration(0.5, energy_j))
    unchanged, first = figures.at(FIGURES_EVERY_NS), figures.at(1 + FIGURES_EVERY_NS)
    figures.totals = figures.totals.plus(iteration(0.5, 50.0))
    second, idle = (figures.at(1 + n * FIGURES_EVERY_NS) for n in (2, 3))

    assert nothing == JobFigures("tuned")
    assert unchanged is nothing
    assert (first.iteration_energy_j, first.power_w, first.energy_j) == (110.0, 220.0, 220.0)
    assert (second.iteration_energy_j, second.power_w, second.energy_j) == (50.0, 100.0, 270.0)
    assert (idle.iteration_energy_j, idle.power_w) == (50.0, 100.0)


def test_an_iteration_without_energy_is_in_no_figure() -> None:
    assert JobTotals().plus(iteration(1.0, None)) == JobTotals()


def test_tokens_count_in_iterations_that_report_them_and_have_energy() -> None:
    figures = figures_of()
    for energy_j, num_tokens in ((100.0, 4000), (100.0, None), (None, 4000), (60.0, 4000)):
        figures.totals = figures.totals.plus(iteration(0.5, energy_j, num_tokens))
    first = figures.at(1)
    figures.totals = figures.totals.plus(iteration(0.5, 40.0, 4000))
    second = figures.at(1 + FIGURES_EVERY_NS)

    assert (first.num_tokens, first.tokens_per_j) == (8000, 50.0)
    assert (second.num_tokens, second.tokens_per_j) == (12000, 100.0)
    assert figures.totals.tokens_per_j == 60.0


def test_a_saving_has_its_interval() -> None:
    saving = MeasuredSaving(Interval(0.1, 0.08, 0.12), Interval(0.01, 0.0, 0.02), 9, 9)

    found = figures_of(saving=saving).at(1)

    assert (found.saving_ratio, found.saving_low_ratio, found.saving_high_ratio) == (0.1, 0.08, 0.12)
    assert found.slowdown_ratio == 0.01
