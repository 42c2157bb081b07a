"""Executes the commands of a job's state machine, each with the function for its type."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gpuenergyd.core.job.messages import Command

Actions = Mapping[type[Command], Callable[[Any], Awaitable[None] | None]]
"""For each type of state machine command, the function that executes it."""


async def execute(actions: Actions, command: Command) -> None:
    """Execute one command; the next one must wait until it is done."""
    done = actions[type(command)](command)
    if done is not None:
        await done
