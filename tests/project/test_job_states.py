"""docs/reference/job-states.md agrees with the state machine."""

from docs.site.job_states import BEGIN, END, PAGE, generated_part, transitions
from gpuenergyd.core.job.messages import JobPhase


def test_the_page_shows_the_phases_and_transitions_of_the_state_machine() -> None:
    shown = PAGE.read_text().split(BEGIN)[1].split(END)[0]

    assert shown == generated_part(), "run `python -m docs.site.generated`"


def test_every_phase_is_reached_and_only_the_end_is_final() -> None:
    found = transitions()

    assert {after for _, after in found} == set(JobPhase) - {JobPhase.JOINING}
    assert {before for before, _ in found} == set(JobPhase) - {JobPhase.ENDED}
