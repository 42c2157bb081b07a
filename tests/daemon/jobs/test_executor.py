"""Each command of a job goes through its own port, and past jobs are looked up at warm-up."""

import asyncio
from dataclasses import dataclass, field

from gpuenergyd.core.job.messages import (
    AskPolicy,
    Command,
    EndJob,
    JobPhase,
    LeaseGpus,
    ObserveIteration,
    RecordIteration,
    RecordNotice,
    RecordPhase,
    RestoreGpus,
    SendPlan,
    StoreCurves,
    StoreOrderRefusal,
)
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.learned_curves import LearnedCurves
from gpuenergyd.core.pipeline.plan import baseline_plan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.daemon.jobs.executor import CommandExecutor
from tests.support.job_run import JobRun


@dataclass
class _Ports:
    """Every port at once; keeps the name of each call and its argument."""

    calls: list[tuple[str, object]] = field(default_factory=list)

    def observe(self, command: ObserveIteration) -> None:
        self.calls.append(("observe", command))

    def ask(self, view: JobView) -> None:
        self.calls.append(("ask", view))

    def send(self, command: SendPlan) -> None:
        self.calls.append(("send", command))

    async def lease(self, command: LeaseGpus) -> None:
        self.calls.append(("lease", command))

    async def restore(self, command: RestoreGpus) -> None:
        self.calls.append(("restore", command))

    def record(self, command: RecordIteration) -> None:
        self.calls.append(("record", command))

    def record_phase(self, command: RecordPhase) -> None:
        self.calls.append(("record_phase", command))

    def record_notice(self, command: RecordNotice) -> None:
        self.calls.append(("record_notice", command))

    async def recall(self) -> None:
        self.calls.append(("recall", None))

    def store_curves(self, command: StoreCurves) -> None:
        self.calls.append(("store_curves", command))

    def store_refusal(self, command: StoreOrderRefusal) -> None:
        self.calls.append(("store_refusal", command))

    async def end(self, command: EndJob) -> None:
        self.calls.append(("end", command))


def executed(*commands: Command) -> list[tuple[str, object]]:
    ports = _Ports()
    executor = CommandExecutor(
        observations=ports,
        plans=ports,
        delivery=ports,
        leases=ports,
        iterations=ports,
        audit=ports,
        runs=ports,
        end=ports,
    )

    async def execute() -> None:
        for command in commands:
            await executor.execute(command)

    asyncio.run(execute())
    return ports.calls


def test_each_command_goes_through_its_own_port() -> None:
    view = JobRun().asked().job.view()
    assert view is not None
    commands: dict[str, Command] = {
        "observe": ObserveIteration((), None, is_regular=True),
        "send": SendPlan(baseline_plan(), 1, 3),
        "lease": LeaseGpus(("GPU-0",)),
        "restore": RestoreGpus(("GPU-0",), "why"),
        "record": RecordIteration(IterationObservation(0, None, 1.0, (), ()), None, 0, ()),
        "record_phase": RecordPhase(JobPhase.TUNED, "why"),
        "record_notice": RecordNotice("why"),
        "store_refusal": StoreOrderRefusal("why"),
        "store_curves": StoreCurves(LearnedCurves("A100", 1410, 4, 300.0, ())),
        "end": EndJob("why"),
    }

    assert executed(*commands.values()) == list(commands.items())
    assert executed(AskPolicy(view)) == [("ask", view)]


def test_past_jobs_are_looked_up_when_the_warm_up_begins() -> None:
    command = RecordPhase(JobPhase.WARMUP, "all ranks joined")

    assert executed(command) == [("record_phase", command), ("recall", None)]
