"""A job whose iterations are told as seen elsewhere: times are exact, nothing runs, and the first one has index 0."""

from collections.abc import Sequence

from gpuenergyd.core.job.description import JobDescription
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import (
    AskPolicy,
    Command,
    Event,
    MergedIterationObserved,
    PlanDecided,
    RankJoined,
    RecordIteration,
    RecordPhase,
    SendPlan,
)
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.story import Story
from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import InstructionKind, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPrediction, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_sim.virtual_training.work import A100Work

SCHEDULE = one_forward_one_backward(2, 4)
CLOCKS = tuple(range(1410, 209, -15))


def new_job(**overrides: object) -> Job:
    fields: dict[str, object] = {
        "job_id": "j",
        "job_name": "gpt",
        "num_pp_ranks": 2,
        "schedule_name": "1f1b",
        "num_microbatches": 4,
        "num_chunks": 1,
        "policy": "p",
        "target": PerformanceTarget(),
    }
    return Job(JobDescription(**{**fields, **overrides}))  # type: ignore[arg-type]


def joined(rank: int, **overrides: object) -> RankJoined:
    fields: dict[str, object] = {
        "pp_rank": rank,
        "order": SCHEDULE.orders[min(rank, 1)],
        "gpu": GpuView(f"GPU-{rank}", "A100", CLOCKS, 0.01),
    }
    return RankJoined(**{**fields, **overrides})  # type: ignore[arg-type]


WORK = {
    (rank, kind): A100Work(0.01, 0.04, 0.25) for rank in range(2) for kind in (InstructionKind.F, InstructionKind.B)
}
UUIDS = ("GPU-0", "GPU-1")
FIRST_ASKED = 11
"""Two iterations warm the job up, ten are the baseline."""
APPLIED = FIRST_ASKED + 3
"""What is decided then is followed three iterations later."""


def plan(
    name: str = "tuned", purpose: PlanPurpose = PlanPurpose.TUNED, clock: int = 1200, expected_s: float | None = None
) -> ClockPlan:
    ranks = tuple(
        RankClocks(r, (clock,) * len(order), constant_clock_changes(order, clock))
        for r, order in enumerate(SCHEDULE.orders)
    )
    predicted = None if expected_s is None else PlanPrediction(expected_s, 100.0)
    return ClockPlan(name, purpose, ranks, predicted, reason=f"why {name}", figures=(("own", 7.0),))


TRIAL = PlanPurpose.TRIAL


class JobRun:
    """A job whose ranks follow what is sent, iteration by iteration."""

    def __init__(self, rules: JobRules | None = None, target: PerformanceTarget | None = None) -> None:
        self.job: Job = new_job(target=target or PerformanceTarget())
        if rules is not None:
            self.job = Job(self.job.description, rules)
        self.story = Story()
        self.sent: list[SendPlan] = []
        self.records: list[RecordIteration] = []
        self.phases: list[RecordPhase] = []
        self.index = 0
        for rank in range(2):
            self.feed(joined(rank))

    def feed(self, event: Event) -> tuple[Command, ...]:
        """Give the job an event, note which plans are sent, and leave out that the iteration is recorded."""
        commands = self.job.handle(event)
        self.story.add(event, commands)
        self.records += [command for command in commands if isinstance(command, RecordIteration)]
        self.phases += [command for command in commands if isinstance(command, RecordPhase)]
        reply = tuple(command for command in commands if not isinstance(command, RecordIteration))
        self.sent += [command for command in reply if isinstance(command, SendPlan)]
        return reply

    @property
    def epoch(self) -> int:
        """The epoch that the ranks follow in the next iteration."""
        return max((one.plan_epoch for one in self.sent if one.apply_at_iteration <= self.index), default=0)

    @property
    def is_at_full_speed(self) -> bool:
        """Whether the ranks run the next iteration at full speed."""
        followed = [one for one in self.sent if one.apply_at_iteration <= self.index]
        return not followed or followed[-1].plan.purpose is PlanPurpose.BASELINE

    def pass_one(
        self, time_s: float = 1.0, *, energy_j: float | None = None, is_regular: bool = True
    ) -> tuple[Command, ...]:
        """Let the ranks run one more iteration."""
        ranks = (RankEnergy(0, time_s, energy_j, ()),)
        observation = IterationObservation(self.index, None, time_s, (), ranks, is_regular=is_regular)
        reply = self.feed(MergedIterationObserved(observation, self.epoch))
        self.index += 1
        return reply

    def pass_until(self, index: int, time_s: float = 1.0) -> None:
        """Pass iterations before `index`, of which none may make the job say anything but ask."""
        while self.index < index:
            reply = self.pass_one(time_s)
            assert all(isinstance(one, AskPolicy) for one in reply), (self.index - 1, reply)

    def first(self, kind: type[Command], limit: int = 200, time_s: float = 1.0) -> int:
        """Pass iterations until the job commands something of a kind; return which iteration made it."""
        for _ in range(limit):
            if any(isinstance(one, kind) for one in self.pass_one(time_s)):
                return self.index - 1
        raise AssertionError(f"no {kind.__name__} in {limit} iterations")

    def asked(self) -> "JobRun":
        """Return it at the moment at which the policy has been asked first."""
        assert self.first(AskPolicy) == FIRST_ASKED
        return self

    def following(self, own: ClockPlan) -> "JobRun":
        """Return it just before the first iteration under a plan."""
        self.asked().decide(own)
        while self.index < APPLIED:
            self.pass_one()
            self.decide(own)
        return self

    def decide(self, own: ClockPlan) -> tuple[Command, ...]:
        """Answer for the policy."""
        return self.feed(PlanDecided(own))

    def answered_late(self) -> "JobRun":
        """Return it after the answer to a question that was open when it fell back, which counts for nothing."""
        if self.job.control.question.is_open:
            assert self.decide(plan("late")) == ()
        return self

    def fall(self) -> tuple[Command, ...]:
        """Run slowly twice, which no plan survives."""
        self.pass_one(1.2)
        return self.pass_one(1.2)


def kinds(commands: Sequence[Command]) -> list[str]:
    return [type(one).__name__ for one in commands]


def sends(commands: Sequence[Command]) -> list[SendPlan]:
    return [one for one in commands if isinstance(one, SendPlan)]


def asked_view(commands: Sequence[Command]) -> AskPolicy:
    return next(one for one in commands if isinstance(one, AskPolicy))
