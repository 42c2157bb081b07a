"""Messages of the routes of the plugin."""

from dataclasses import dataclass

LIFT_PATH = "/v1/idle/lift"
PROGRAM_HOLD_S = 60.0
"""Longest time for which a program that is about to start, or any user, may keep GPUs at full clocks."""


@dataclass(frozen=True, slots=True)
class IdleLiftRequest:
    """Lift idle GPUs, all without UUIDs, and do not lower them again for `hold_s`."""

    gpu_uuids: tuple[str, ...] = ()
    hold_s: float = PROGRAM_HOLD_S


@dataclass(frozen=True, slots=True)
class IdleLiftReply:
    """The GPUs that were lowered."""

    gpu_uuids: tuple[str, ...]
