"""A job that ran out of memory in another order tries none again: not in its next run, nor under the next daemon."""

import os
from dataclasses import replace

from gpuenergyd.core.policy_api.previous_run import PreviousRun
from gpuenergyd.daemon.jobs.previous_runs import unpacked
from gpuenergyd.store.records import PreviousRunRecord
from gpuenergyd.wire.messages import RankRelease
from tests.support.job_stage import ME, FakeHistory, Stage, play, registration, settle

REASON = "a GPU ran out of memory in another order than 1F1B"


class Memory:
    """What a history database holds of earlier runs."""

    def __init__(self, history: FakeHistory) -> None:
        self._history = history

    async def recall(self, signature: str) -> PreviousRun | None:
        """Return the last run with a signature."""
        own = [r for r in self._history.records if isinstance(r, PreviousRunRecord) and r.signature == signature]
        return unpacked(own[-1].model) if own else None


def run(history: FakeHistory, *, refusal: str = "", allow: bool = True, name: str = "gpt") -> str:
    """Run a job under a daemon of its own; return why its order may not change."""
    found: list[str] = []

    async def scenario() -> None:
        stage = Stage()
        stage.jobs.services = replace(stage.jobs.services, history=history, previous_runs=Memory(history))
        for pp_rank in range(2):
            own = replace(registration(pp_rank), allow_reorder=allow, reorder_refusal="", job_name=name)
            stage.tokens.append(stage.jobs.register(own, ME, os.pidfd_open(os.getpid())).rank_token)
        await settle()
        (runner,) = stage.jobs
        found.append(runner.job.knowledge.reordering.view(2, 1).refusal)
        stage.jobs.release(RankRelease(stage.tokens[0], reorder_refusal=refusal), ME)
        await settle()
        await stage.jobs.close("test over")

    play(scenario)
    return found[0]


def test_no_later_run_of_the_job_tries_another_order() -> None:
    history = FakeHistory()
    assert run(history) == ""
    assert run(history, refusal=REASON) == ""
    assert run(history, refusal="").startswith(f"{REASON} (in job ")
    assert run(history).startswith(REASON)
    assert run(history, name="another") == ""
    assert run(history, allow=False) == ""


def run_member(history: FakeHistory, *, refusal: str = "", stage_order: int = 0) -> str:
    """Run a member of a pipeline across hosts under a daemon of its own; return why its order may not change."""
    found: list[str] = []

    async def scenario() -> None:
        stage = Stage()
        stage.jobs.services = replace(stage.jobs.services, history=history, previous_runs=Memory(history))
        own = replace(
            registration(stage_order), pp_rank=0, num_pp_ranks=1, is_pipeline_member=True, allow_reorder=True,
            reorder_refusal="",
        )  # fmt: skip
        token = stage.jobs.register(own, ME, os.pidfd_open(os.getpid())).rank_token
        await settle()
        (runner,) = stage.jobs
        found.append(runner.job.knowledge.reordering.barred)
        stage.jobs.release(RankRelease(token, reorder_refusal=refusal), ME)
        await settle()
        await stage.jobs.close("test over")

    play(scenario)
    return found[0]


def test_a_member_of_a_pipeline_across_hosts_remembers_for_its_leader() -> None:
    history = FakeHistory()
    assert run_member(history, refusal=REASON) == ""
    assert run_member(history).startswith(f"{REASON} (in job ")
    assert run_member(history, stage_order=1) == "", "another stage is another job"
