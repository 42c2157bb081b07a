"""Fixtures of the daemon's tests: an installed distribution of hostile policies."""

import sys
from pathlib import Path

import pytest

from tests.support.installed_distribution import install_distribution

HOSTILE_POLICIES = '''
"""Policies that fail in every way a plugin can."""

import os
import sys
import time

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan


class Polite:
    def __init__(self):
        self.num_asked = 0

    def next_plan(self, view):
        self.num_asked += 1
        return baseline_plan(f"polite-{view.job_id}-{self.num_asked}")


class Raises:
    def next_plan(self, view):
        raise RuntimeError("no idea\\nsecond line")


class Computes:
    """Needs 0.3 s of CPU time."""

    def next_plan(self, view):
        until_s = time.process_time() + 0.3
        while time.process_time() < until_s:
            pass
        return baseline_plan("computed")


class Sleeps:
    def next_plan(self, view):
        time.sleep(3600.0)


class Loops:
    def next_plan(self, view):
        while True:
            pass


class Prints:
    def next_plan(self, view):
        print("{}")
        sys.stdout.write("not a plan\\n")
        sys.stdout.flush()
        os.write(1, b"not a plan either\\n")
        sys.stdin.read()
        return baseline_plan("printed")


class Garbage:
    def next_plan(self, view):
        return {"plan_id": "a dictionary"}


class Unsendable:
    def next_plan(self, view):
        return ClockPlan(object(), PlanPurpose.TUNED)


class Mistyped:
    def next_plan(self, view):
        return ClockPlan(17, PlanPurpose.TUNED)


class Exits:
    def next_plan(self, view):
        os._exit(3)


class Leaks:
    def next_plan(self, view):
        hoard = []
        while True:
            hoard.append(bytes(1 << 24))  # address space, but no pages


class Prepares:
    def prepare(self, announce):
        announce("compiling something, once")
        open(os.environ["MAY_PREPARE"]).close()
        return "no folder is writable; make one"

    def next_plan(self, view):
        return baseline_plan("prepared")


class NoPolicy:
    pass
'''
ENTRY_POINTS = {
    "polite": "hostile_policies:Polite",
    "raises": "hostile_policies:Raises",
    "computes": "hostile_policies:Computes",
    "sleeps": "hostile_policies:Sleeps",
    "loops": "hostile_policies:Loops",
    "prints": "hostile_policies:Prints",
    "garbage": "hostile_policies:Garbage",
    "unsendable": "hostile_policies:Unsendable",
    "mistyped": "hostile_policies:Mistyped",
    "exits": "hostile_policies:Exits",
    "leaks": "hostile_policies:Leaks",
    "prepares": "hostile_policies:Prepares",
    "no-policy": "hostile_policies:NoPolicy",
    "broken-import": "hostile_policies_that_are_not_there:Nothing",
}


@pytest.fixture(scope="session")
def hostile_distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory that is an installed distribution of hostile policies when on sys.path."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile_policies.py").write_text(HOSTILE_POLICIES)
    install_distribution(folder, "hostile-policies", "gpuenergyd.policies", ENTRY_POINTS, version="6.6.6")
    return folder


@pytest.fixture
def host_command(hostile_distribution: Path) -> tuple[str, ...]:
    """Return a policy host command that also finds the hostile policies."""
    program = (
        f"import sys; sys.path.insert(0, {str(hostile_distribution)!r});"
        " from gpuenergyd.daemon.processes.policy_host import main; main()"
    )
    return (sys.executable, "-I", "-c", program)
