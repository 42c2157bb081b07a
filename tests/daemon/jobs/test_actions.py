"""Each command of a state machine has its action, in the runner of a job and in the leader of a pipeline."""

from typing import get_args, get_type_hints

from gpuenergyd.core.job.messages import Command
from gpuenergyd.daemon.runtime.actions import Actions
from tests.support.job_stage import Stage, play
from tests.support.led_pipeline import LedPipeline


def commands_taken(actions: Actions) -> list[object]:
    """Return the type of command that each action takes; that of its key if the action is a lambda."""
    return [get_type_hints(action).get("command", command) for command, action in actions.items()]


def test_every_command_of_a_job_has_an_action() -> None:
    async def scenario() -> None:
        stage = Stage()
        stage.join()
        (runner,) = stage.jobs

        assert runner.actions.keys() == set(get_args(Command))
        assert commands_taken(runner.actions) == list(runner.actions)
        await stage.jobs.close("test over")

    play(scenario)


def test_every_command_of_a_pipeline_has_an_action() -> None:
    actions = LedPipeline().leader.actions

    assert actions.keys() == set(get_args(Command))
    assert commands_taken(actions) == list(actions)
