"""GPU settings as read back from the driver, and who changed each: this daemon or another program."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields

from gpuenergyd.core.job.operator_orders import value_text
from gpuenergyd.gpu.device import GpuDetails
from gpuenergyd.gpu.link.messages import GpuSettingsRead

OURS, FOREIGN = "gpuenergyd", "another program"
_CONSTANT = frozenset({"min_power_limit_w", "max_power_limit_w", "max_memory_clock_mhz", "pci_address"})
_FIRST_SEEN = frozenset({"memory_clock_mhz"})
"""Settings that can be read only while a GPU computes, so that their first value is not a change."""
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
    our_power_profile: int | None = None
    """The workload power profile that the GPU worker has added."""

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

    @property
    def foreign_power_profiles(self) -> tuple[int, ...]:
        """The workload power profiles that other programs have requested."""
        requested = _numbers(None if self.details is None else self.details.requested_power_profiles)
        return tuple(number for number in sorted(requested) if number != self.our_power_profile)

    def update(self, read: GpuSettingsRead) -> tuple[KnobChange, ...]:
        """Replace the settings; return what has changed since they were last read."""
        before, was_ours, profile_before = self.details, self.is_our_power_limit, self.our_power_profile
        self.details, self.is_our_power_limit = read.details, read.is_our_power_limit
        self.our_power_profile = read.our_power_profile
        our_profiles = {profile_before, read.our_power_profile}
        changes = tuple(self._changes(before, was_ours=was_ours, our_profiles=our_profiles)) if before else ()
        if not read.is_our_power_limit:
            self.foreign_power_limit_w = read.details.power_limit_w
        return changes

    def _changes(
        self, before: GpuDetails, *, was_ours: bool, our_profiles: AbstractSet[int | None]
    ) -> Iterator[KnobChange]:
        now = self.details
        assert now is not None
        changed = _numbers(before.requested_power_profiles) ^ _numbers(now.requested_power_profiles)
        are_our_profiles = bool(changed) and changed <= our_profiles
        for field in fields(GpuDetails):
            old, new = getattr(before, field.name), getattr(now, field.name)
            if old == new or field.name in _CONSTANT or (old is None and field.name in _FIRST_SEEN):
                continue
            is_ours = "power_limit" in field.name and (self.is_our_power_limit or (was_ours and self._is_restored))
            is_ours = is_ours or ("power_profiles" in field.name and are_our_profiles)
            was, became = (value_text(value, none="not reported", yes="on", no="off") for value in (old, new))
            yield KnobChange(field.name, was, became, OURS if is_ours else FOREIGN)

    @property
    def _is_restored(self) -> bool:
        """Whether the power limit is what it was before this daemon set one."""
        limit_w = self.details.power_limit_w if self.details is not None else None
        known_w = self.foreign_power_limit_w if self.foreign_power_limit_w is not None else self.default_power_limit_w
        return limit_w is not None and known_w is not None and abs(limit_w - known_w) <= _SAME_LIMIT_W


def _numbers(text: str | None) -> frozenset[int]:
    return frozenset(int(number) for number in (text or "").split(",") if number)
