"""Clock request: the SM clock that a GPU should run at, now or from a later instant on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClockRequest:
    """A request for one GPU's SM clock; 0 MHz requests no change. Instants are host monotonic ns.

    A request states clocks, never differences, so the next one makes up for a lost one. The later clock lets a
    sender raise a clock ahead of need without waking up: the GPU worker waits for the instant.
    """

    sm_clock_mhz: int
    sent_mono_ns: int
    later_sm_clock_mhz: int = 0
    later_at_mono_ns: int = 0
    plan_epoch: int = 0
    """Epoch of the plan that the clocks belong to; 0 without a plan."""

    @property
    def first_sm_clock_mhz(self) -> int:
        """The clock requested first: the one for now, otherwise the later one."""
        return self.sm_clock_mhz or self.later_sm_clock_mhz

    def later_request(self) -> "ClockRequest":
        """Return the later clock as a request of its own, sent at its instant."""
        return ClockRequest(self.later_sm_clock_mhz, self.later_at_mono_ns, plan_epoch=self.plan_epoch)
