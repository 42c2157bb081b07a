"""Installed policies: list them and load one by name, through entry points only."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from gpuenergyd.core.policy_api.policy import ClockPolicy, TargetPolicy
from gpuenergyd.errors import UnknownPolicyError

POLICY_GROUP = "gpuenergyd.policies"
TARGET_GROUP = "gpuenergyd.targets"
_OWN_DISTRIBUTION = "gpuenergyd"


@dataclass(frozen=True, slots=True)
class InstalledPolicy:
    """A policy that an installed distribution provides; `error` is the reason if it cannot be loaded."""

    name: str
    group: str
    distribution: str
    version: str
    error: str | None = None


def policy_names(group: str = POLICY_GROUP) -> tuple[str, ...]:
    """Return the names of the installed policies, sorted, without importing them."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def installed_policies(group: str = POLICY_GROUP) -> tuple[InstalledPolicy, ...]:
    """Return the installed policies, sorted by name; imports each one to find out whether it loads."""
    found = []
    for point in sorted(entry_points(group=group), key=lambda p: (p.name, _distribution(p))):
        error = _ambiguity(point)
        if error is None:
            try:
                point.load()
            except Exception as failure:  # noqa: BLE001  a plugin's import may fail in any way, and is reported
                error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        version = point.dist.version if point.dist is not None else ""
        found.append(InstalledPolicy(point.name, group, _distribution(point), version, error))
    return tuple(found)


def check_policy_name(name: str, group: str = POLICY_GROUP) -> None:
    """Check that a policy is installed, without importing it.

    Raises:
        UnknownPolicyError: it is not installed; the message lists the installed ones.
    """
    names = policy_names(group)
    if name not in names:
        kind = "target policy" if group == TARGET_GROUP else "policy"
        raise UnknownPolicyError(f"no {kind} {name!r}; installed: {', '.join(names) or 'none'}")


def is_shipped(name: str) -> bool:
    """Return whether a policy comes with this project, and only with it."""
    return {_distribution(point) for point in entry_points(group=POLICY_GROUP, name=name)} == {_OWN_DISTRIBUTION}


def load_policy(name: str) -> ClockPolicy:
    """Return a new instance of the policy with this name.

    Raises:
        UnknownPolicyError: not installed, provided twice, or not a policy.
    """
    policy: ClockPolicy = _loaded(name, POLICY_GROUP, "next_plan")
    return policy


def load_target_policy(name: str) -> TargetPolicy:
    """Return a new instance of the target policy with this name.

    Raises:
        UnknownPolicyError: not installed, provided twice, or not a target policy.
    """
    policy: TargetPolicy = _loaded(name, TARGET_GROUP, "next_target")
    return policy


def _loaded(name: str, group: str, method: str) -> Any:
    check_policy_name(name, group)
    point = next(iter(entry_points(group=group, name=name)))
    if (error := _ambiguity(point)) is not None:
        raise UnknownPolicyError(error)
    policy = point.load()()
    if not callable(getattr(policy, method, None)):
        raise UnknownPolicyError(f"policy {name!r} ({point.value}) has no method {method}()")
    return policy


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def _ambiguity(point: EntryPoint) -> str | None:
    providers = {(p.value, _distribution(p)) for p in entry_points(group=point.group, name=point.name)}
    if len(providers) == 1:
        return None
    by = ", ".join(sorted(f"{value} ({distribution or 'no distribution'})" for value, distribution in providers))
    return f"policy {point.name!r} is provided more than once: {by}; uninstall all but one"
