"""Request for the SM clock of one GPU, now and at later instants; and the ceiling of a GPU's clock and power."""

from dataclasses import dataclass

MAX_LATER_CLOCKS = 64
"""Maximum number of later clocks in a request: more than a plan's clock segments on one GPU in an iteration."""


@dataclass(frozen=True, slots=True)
class TimedClock:
    """An SM clock from an instant on, in host monotonic ns."""

    sm_clock_mhz: int
    at_mono_ns: int


@dataclass(frozen=True, slots=True)
class ClockRequest:
    """A request for one GPU's SM clock; 0 MHz requests no change now. Instants are host monotonic ns.

    A request states clocks, never differences, so the next request makes up for a lost one. Later clocks let a sender
    change the clock without waking up for it, for example while it replays a captured CUDA graph: the GPU worker sets
    them at their instants.
    """

    sm_clock_mhz: int
    sent_mono_ns: int
    later: tuple[TimedClock, ...] = ()
    """Later clocks, sorted by instant; at most `MAX_LATER_CLOCKS`."""
    plan_epoch: int = 0
    """Epoch of the plan that the clocks belong to; 0 without a plan."""

    @property
    def first_sm_clock_mhz(self) -> int:
        """The clock requested for now, otherwise the first later clock; 0 without any."""
        return self.sm_clock_mhz or (self.later[0].sm_clock_mhz if self.later else 0)

    def later_requests(self) -> "tuple[ClockRequest, ...]":
        """Return each later clock as a request of its own, sent at its instant."""
        return tuple(ClockRequest(c.sm_clock_mhz, c.at_mono_ns, plan_epoch=self.plan_epoch) for c in self.later)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Upper limits of a GPU: an SM clock, a power limit, or both."""

    sm_clock_mhz: int | None = None
    power_limit_w: float | None = None
