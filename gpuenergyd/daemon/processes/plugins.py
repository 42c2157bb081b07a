"""Installed policies, found through entry points: lists them, and loads one by name."""

import importlib
import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd.core.policy_api.power import PowerTargetPolicy
from gpuenergyd.core.policy_api.target_policy import TargetPolicy
from gpuenergyd.errors import UnknownPolicyError

POLICY_GROUP = "gpuenergyd.policies"
TARGET_GROUP = "gpuenergyd.targets"
POWER_GROUP = "gpuenergyd.power_targets"
_TASK_GROUP = "gpuenergyd.tasks"
_OWN_DISTRIBUTION = "gpuenergyd"
_METHODS = {POLICY_GROUP: "next_plan", TARGET_GROUP: "next_target", POWER_GROUP: "divide"}
_KINDS = {POLICY_GROUP: "policy", TARGET_GROUP: "target policy", POWER_GROUP: "power target policy"}
_SEARCH_PERIOD_S = 5.0


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
                error = _missing_method(point, point.load())
            except Exception as failure:  # noqa: BLE001  a plugin's import may fail in any way, and is reported
                error = f"{type(failure).__name__}: {failure}".splitlines()[0]
        version = point.dist.version if point.dist is not None else ""
        found.append(InstalledPolicy(point.name, group, _distribution(point), version, error))
    return tuple(found)


def check_policy_name(name: str, group: str = POLICY_GROUP) -> None:
    """Check that a policy is installed, without importing it; options may follow its name, see `policy_options`.

    Raises:
        UnknownPolicyError: it is not installed; the message lists the installed ones.
    """
    names = policy_names(group)
    if policy_options(name)[0] not in names:
        raise UnknownPolicyError(f"no {_KINDS[group]} {name!r}; installed: {', '.join(names) or 'none'}")


def policy_options(name: str) -> tuple[str, dict[str, str]]:
    """Return the name of a policy without its options, and the options: `cost:eta=0.7,other=1`.

    Raises:
        UnknownPolicyError: an option has no value, or is given twice.
    """
    plain, _, listed = name.partition(":")
    options = {}
    for item in filter(None, listed.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise UnknownPolicyError(f"policy {name!r}: option {item!r} must be NAME=VALUE, e.g. cost:eta=0.7")
        if key in options:
            raise UnknownPolicyError(f"policy {name!r}: option {key} is given twice")
        options[key] = value
    return plain, options


def with_default_options(name: str, defaults: Mapping[str, Mapping[str, object]]) -> str:
    """Return the name of a policy with its options: those given after the name, else those in `defaults`.

    Raises:
        UnknownPolicyError: the options after the name are malformed.
    """
    plain, own = policy_options(name)
    texts = {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in defaults.get(plain, {}).items()
    }
    options = ",".join(f"{key}={value}" for key, value in {**texts, **own}.items())
    return f"{plain}:{options}" if options else plain


class PolicyNames:
    """Names of the installed policies; an unknown name triggers a new search, at most every five seconds.

    This finds policies that are installed while the daemon runs, without a slow search at every request.
    """

    def __init__(
        self, read: Callable[[], tuple[str, ...]] = policy_names, *, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._now_s = read, now_s
        self._names: tuple[str, ...] = ()
        self._read_mono_s = -math.inf

    def require(self, name: str) -> None:
        """Check that a policy is installed.

        Raises:
            UnknownPolicyError: it is not installed; the message lists the installed ones.
        """
        plain, _ = policy_options(name)
        if plain not in self._names and self._now_s() - self._read_mono_s >= _SEARCH_PERIOD_S:
            self._names, self._read_mono_s = self._read(), self._now_s()
        if plain not in self._names:
            installed = ", ".join(self._names) or "none"
            raise UnknownPolicyError(f"no policy {name!r}; installed: {installed}")


@cache  # a search for packages
def is_shipped(name: str) -> bool:
    """Return whether this project, and no other distribution, provides a policy."""
    plain, _ = policy_options(name)
    return {_distribution(point) for point in entry_points(group=POLICY_GROUP, name=plain)} == {_OWN_DISTRIBUTION}


def load_policy(name: str) -> ClockPolicy:
    """Return a new instance of the policy with this name.

    Raises:
        UnknownPolicyError: not installed, provided twice, or not a policy.
    """
    policy: ClockPolicy = _loaded(name, POLICY_GROUP)
    return policy


def load_target_policy(name: str) -> TargetPolicy:
    """Return a new instance of the target policy with this name.

    Raises:
        UnknownPolicyError: not installed, provided twice, or not a target policy.
    """
    policy: TargetPolicy = _loaded(name, TARGET_GROUP)
    return policy


def load_power_target(name: str) -> PowerTargetPolicy:
    """Return a new instance of the power target policy with this name.

    Raises:
        UnknownPolicyError: not installed, provided twice, or not a power target policy.
    """
    policy: PowerTargetPolicy = _loaded(name, POWER_GROUP)
    return policy


def load_task(name: str) -> Callable[[str], str]:
    """Return the function of a service that the policy host runs for it, from JSON to JSON.

    Raises:
        UnknownPolicyError: no installed package provides it.
    """
    point = next(iter(entry_points(group=_TASK_GROUP, name=name)), None)
    if point is None:
        raise UnknownPolicyError(f"no entry point {name!r} in {_TASK_GROUP}")
    task: Callable[[str], str] = point.load()
    return task


def _loaded(name: str, group: str) -> Any:
    check_policy_name(name, group)
    plain, options = policy_options(name)
    point = next(iter(entry_points(group=group, name=plain)))
    if (error := _ambiguity(point)) is not None:
        raise UnknownPolicyError(error)
    if point.module not in sys.modules:
        importlib.invalidate_caches()  # its package may have been installed while this process ran
    try:
        plugin = point.load()
    except ModuleNotFoundError as failure:
        if not f"{point.module}.".startswith(f"{failure.name}."):
            raise  # the policy imports a missing module
        note = "if its package was installed while the daemon ran, restart the daemon"
        raise ModuleNotFoundError(f"{failure}; {note}", name=failure.name) from None
    if (error := _missing_method(point, plugin)) is not None:
        raise UnknownPolicyError(error)
    try:
        policy = plugin(**options)
    except TypeError as failure:
        if not options:
            raise
        valid = ", ".join(inspect.signature(plugin).parameters) or "none"
        given = ", ".join(options)
        raise UnknownPolicyError(f"policy {plain!r} does not take these options: {given}; valid: {valid}") from failure
    if not callable(getattr(policy, _METHODS[group], None)):
        raise UnknownPolicyError(_without_method(point))
    return policy


def _missing_method(point: EntryPoint, plugin: object) -> str | None:
    """Return the error text if a policy class lacks its method; None for other plugins and for functions."""
    method = _METHODS.get(point.group)
    if method is None or not isinstance(plugin, type) or callable(getattr(plugin, method, None)):
        return None
    return _without_method(point)


def _without_method(point: EntryPoint) -> str:
    return f"policy {point.name!r} ({point.value}) has no method {_METHODS[point.group]}()"


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def _ambiguity(point: EntryPoint) -> str | None:
    providers = {(p.value, _distribution(p)) for p in entry_points(group=point.group, name=point.name)}
    if len(providers) == 1:
        return None
    by = ", ".join(sorted(f"{value} ({distribution or 'no distribution'})" for value, distribution in providers))
    return f"policy {point.name!r} is provided more than once: {by}; uninstall all but one"
