"""Settings of a GPU that are read back, and who changed each: this daemon, or another program."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from gpuenergyd.gpu.device import GpuDetails
from gpuenergyd.gpu.link.messages import GpuSettingsRead

OURS, FOREIGN = "gpuenergyd", "another program"
_CONSTANT = frozenset({"min_power_limit_w", "max_power_limit_w", "max_memory_clock_mhz", "pci_address"})
_FIRST_SEEN = frozenset({"memory_clock_mhz"})
"""Settings that can be read only while a GPU computes: their first value is no change."""
_SAME_LIMIT_W = 1.0


@dataclass(frozen=True, slots=True)
class KnobChange:
    """One setting that has changed."""

    name: str
    before: str
    after: str
    actor: str


@dataclass(slots=True)
class Knobs:
    """The settings of one GPU as last read."""

    default_power_limit_w: float | None = None
    details: GpuDetails | None = None
    is_our_power_limit: bool = False
    foreign_power_limit_w: float | None = None
    """The last power limit that this daemon did not set; a restore returns to it."""

    @property
    def power_limit_owner(self) -> str | None:
        """Who set the power limit; None at the default, or while it is unknown."""
        limit_w = self.details.power_limit_w if self.details is not None else None
        if limit_w is None:
            return None
        if self.is_our_power_limit:
            return OURS
        default_w = self.default_power_limit_w
        return None if default_w is None or abs(limit_w - default_w) <= _SAME_LIMIT_W else FOREIGN

    def update(self, read: GpuSettingsRead) -> tuple[KnobChange, ...]:
        """Replace the settings; return what has changed since they were last read."""
        before, was_ours = self.details, self.is_our_power_limit
        self.details, self.is_our_power_limit = read.details, read.is_our_power_limit
        changes = tuple(self._changes(before, was_ours=was_ours)) if before is not None else ()
        if not read.is_our_power_limit:
            self.foreign_power_limit_w = read.details.power_limit_w
        return changes

    def _changes(self, before: GpuDetails, *, was_ours: bool) -> Iterator[KnobChange]:
        now = self.details
        for one in fields(GpuDetails):
            old, new = getattr(before, one.name), getattr(now, one.name)
            if old == new or one.name in _CONSTANT or (old is None and one.name in _FIRST_SEEN):
                continue
            is_ours = "power_limit" in one.name and (self.is_our_power_limit or (was_ours and self._is_restored))
            yield KnobChange(one.name, _text(old), _text(new), OURS if is_ours else FOREIGN)

    @property
    def _is_restored(self) -> bool:
        """Whether the power limit is the one from before ours."""
        limit_w = self.details.power_limit_w if self.details is not None else None
        known_w = self.foreign_power_limit_w if self.foreign_power_limit_w is not None else self.default_power_limit_w
        return limit_w is not None and known_w is not None and abs(limit_w - known_w) <= _SAME_LIMIT_W


def _text(value: object) -> str:
    match value:
        case None:
            return "not reported"
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:g}"
        case _:
            return str(value)
