"""Messages of the routes of the plugin."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IdleLiftRequest:
    """Lift idle GPUs, all without UUIDs, and do not lower them again for `hold_s`."""

    gpu_uuids: tuple[str, ...] = ()
    hold_s: float = 60.0


@dataclass(frozen=True, slots=True)
class IdleLiftReply:
    """The GPUs that were lowered."""

    gpu_uuids: tuple[str, ...]
