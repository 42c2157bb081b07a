"""The documented phases and transitions of a job are those that its state machine reaches."""

from docs.site.job_states import transitions
from gpuenergyd.core.job.messages import JobPhase


def test_every_phase_is_reached_and_only_the_end_is_final() -> None:
    found = transitions()

    assert {after for _, after in found} == set(JobPhase) - {JobPhase.JOINING}
    assert {before for before, _ in found} == set(JobPhase) - {JobPhase.ENDED}
