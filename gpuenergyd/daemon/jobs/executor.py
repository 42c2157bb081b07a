"""Executes the commands of a job's state machine, each through its own port."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

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
from gpuenergyd.daemon.jobs.plan_settings import JobSettings
from gpuenergyd.daemon.ports import (
    AuditPort,
    DeliveryPort,
    EndPort,
    IterationPort,
    LeasePort,
    ObservationPort,
    PlanSource,
    RunStorePort,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandExecutor:
    """The ports of one job, or of a pipeline across hosts."""

    observations: ObservationPort
    plans: PlanSource
    delivery: DeliveryPort
    leases: LeasePort
    iterations: IterationPort
    audit: AuditPort
    runs: RunStorePort
    end: EndPort
    settings: Sequence[JobSettings] = ()
    """Empty for a pipeline across hosts, whose plans only set clocks."""

    async def execute(self, command: Command) -> None:  # noqa: C901, PLR0912  one case per command
        """Execute one command; the next one must wait until it is done."""
        match command:
            case ObserveIteration():
                self.observations.observe(command)
            case AskPolicy():
                self.plans.ask(command.view)
            case SendPlan():
                self.delivery.send(command)
                for setting in self.settings:
                    setting.send(command)
            case LeaseGpus():
                await self.leases.lease(command)
            case RestoreGpus():
                await self.leases.restore(command)
            case RecordIteration():
                self.iterations.record(command)
            case RecordPhase():
                self.audit.record_phase(command)
                if command.phase is JobPhase.WARMUP:
                    # The first iterations wait to be observed until past jobs are known.
                    await self.runs.recall()
            case RecordNotice():
                self.audit.record_notice(command)
            case StoreOrderRefusal():
                self.runs.store_refusal(command)
            case StoreCurves():
                self.runs.store_curves(command)
            case EndJob():
                await self.end.end(command)
            case _:
                assert_never(command)
