"""A running job continues under the next daemon: same plan, same tokens, same numbers."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.daemon.handover.file import HandoverFile, consume_hand_over, write_hand_over
from gpuenergyd.daemon.handover.jobs import hand_over_jobs, take_over_job
from gpuenergyd.daemon.jobs.figures import JobTotals
from gpuenergyd.errors import GpuEnergyError
from tests.support.job_stage import Stage, plan, settle


async def handed_over(before: Stage, folder: Path) -> HandoverFile:
    """Hand the jobs over, end their sessions, and return what the next daemon reads."""
    write_hand_over(folder / "handover", "token", await hand_over_jobs(before.jobs))
    for session in before.jobs.sessions:
        before.jobs.sessions.remove(session)
    handed = consume_hand_over(folder / "handover")
    assert handed is not None
    return handed


async def test_a_handed_over_job_continues_with_its_plan_and_its_numbers(tmp_path: Path) -> None:
    before, after = Stage(plan("tuned-1", 1200)), Stage()
    job_id = before.join()
    await before.iterate(times=4)
    (old,) = before.jobs
    old.recorder.figures.totals = JobTotals(4, 1.5, 300.0, 64, 200.0)
    snapshot = old.job.snapshot()

    handed = await handed_over(before, tmp_path)
    assert handed.worker_token == "token"
    take_over_job(after.jobs, handed.jobs[0], holds_leases=True)

    (new,) = after.jobs
    assert new.job_id == job_id
    assert new.job.snapshot() == snapshot
    assert new.recorder.figures.totals == JobTotals(4, 1.5, 300.0, 64, 200.0)
    assert new.recorder.figures.at(1).iteration_energy_j is None  # none since the last figures
    assert new.job.phase is JobPhase.TUNED
    assert new.leases.accept(new.delivery.last_epoch)
    after.tokens, after.next_index = before.tokens, before.next_index
    await after.iterate(plan_epoch=1)
    assert new.job.num_iterations == old.job.num_iterations + 1


async def test_without_its_leases_a_continued_job_falls_back(tmp_path: Path) -> None:
    before, after = Stage(plan("tuned-1", 1200)), Stage()
    before.join()
    await before.iterate(times=4)
    handed = await handed_over(before, tmp_path)
    take_over_job(after.jobs, handed.jobs[0], holds_leases=False)

    (runner,) = after.jobs
    assert runner.job.phase is JobPhase.FALLBACK
    assert "restored while the daemon was away" in runner.job.phase_reason


@pytest.mark.parametrize(
    ("levers", "is_observing", "phase"),
    [
        ({Lever.CLOCKS}, False, JobPhase.TUNED),
        ({Lever.POWER_LIMITS}, False, JobPhase.FALLBACK),
        (set(Lever), True, JobPhase.FALLBACK),
    ],
)
async def test_a_plan_that_sets_what_the_settings_do_not_permit_any_more_ends(
    tmp_path: Path,
    levers: set[Lever],
    is_observing: bool,  # noqa: FBT001
    phase: JobPhase,
) -> None:
    before, after = Stage(plan("tuned-1", 1200)), Stage(is_observing=is_observing)
    after.jobs.services = replace(after.jobs.services, levers=frozenset(levers))
    before.join()
    await before.iterate(times=4)
    handed = await handed_over(before, tmp_path)
    take_over_job(after.jobs, handed.jobs[0], holds_leases=True)

    (runner,) = after.jobs
    assert runner.job.phase is phase
    await settle()
    assert after.worker.calls == ([] if phase is JobPhase.TUNED else [("restore", ("GPU-0", "GPU-1"))])


def test_a_hand_over_file_is_used_once_and_refused_when_others_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "handover"
    write_hand_over(path, "token", ())

    assert consume_hand_over(path) is not None
    assert consume_hand_over(path) is None
    write_hand_over(path, "token", ())
    path.chmod(0o644)
    with pytest.raises(GpuEnergyError, match="must belong to this user alone"):
        consume_hand_over(path)


def test_a_hand_over_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "handover"
    write_hand_over(path, "token", ())
    path.write_text(path.read_text().replace('"version":3', '"version":2'))

    with pytest.raises(GpuEnergyError, match="version 2; this program reads 3"):
        consume_hand_over(path)
