"""Applies mutants to a copy of the source tree and runs tests on them; the checkout is never changed."""

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from benchmarks.report.running import ROOT, run_program
from gpuenergyd_policies.planning.compiled import kernel_files
from tools.quality import impatience
from tools.quality.mutation.sample import Mutant
from tools.quality.twin import make_twin

KERNEL_FILES = tuple(path.name for path in kernel_files())
"""Mutants of these files are tested as plain Python: compiling all kernels again takes longer than most tests. A
separate test checks that compiled and plain kernels agree."""
PLUGINS = ("-p", "tools.quality.mutation.watching", "-p", "tools.quality.impatience")
PLAIN_LIMIT_S = 8.0
"""CPU time limit of a test whose kernels are not compiled."""
QUIET = ("-q", "--no-header", "--tb=line", "-p", "no:cacheprovider")
WATCH_LIMIT_S = 3000.0
START_S = 60.0
"""Time to start Python and pytest on a loaded machine."""
PATIENCE = 6.0
"""A mutant hangs if its tests take this many times their usual time, or one test this many times its usual CPU time
plus SPIN_S. Only the first limit ends a compiled loop."""
SPIN_S = 5.0


class Verdict(StrEnum):
    """Result of running the tests on a mutant."""

    DETECTED = "detected"
    HUNG = "hung"
    """Counts as detected: the tests did not finish."""
    SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class Watched:
    """Behaviour of the tests on the original code."""

    tests_of_line: Mapping[str, Mapping[int, Collection[str]]]
    """Test names by file path and line."""
    seconds: Mapping[str, float]

    def tests_for(self, mutant: Mutant, budget_s: float) -> list[str]:
        """Return the tests to run, fastest first: those that run the statement, then the others of their files.

        The others are included because a fixture or cache may run the statement in one test and be checked in another.
        A statement that runs on import concerns every test that runs any line of the file.
        """
        lines = self.tests_of_line.get(mutant.path, {})
        asked = range(mutant.first_line, mutant.last_line + 1) if mutant.first_line else list(lines)
        reaching = {test for line in asked for test in lines.get(line, ())}
        if not reaching and not mutant.first_line:
            reaching = set(self.seconds)
        files = {test.partition("::")[0] for test in reaching}
        nearby = {test for test in self.seconds if test.partition("::")[0] in files} - reaching
        chosen: list[str] = []
        total_s = 0.0
        for group in (reaching, nearby):
            for test in sorted(group, key=lambda test: (self.seconds[test], test)):
                total_s += self.seconds[test]
                if total_s > budget_s and chosen:
                    return chosen
                chosen.append(test)
        return chosen

    def seconds_of(self, tests: Iterable[str]) -> dict[str, float]:
        """Return the durations of these tests."""
        return {test: self.seconds[test] for test in tests}


class Workbench:
    """A copy of the tree and an environment in which it is installed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tree = folder / "tree"
        shutil.rmtree(self.tree, ignore_errors=True)
        copy_tree(ROOT, self.tree)
        shared = folder / "shared"
        if not shared.is_symlink() and (ROOT.parent / "shared").is_dir():
            shared.symlink_to(ROOT.parent / "shared")
        self._python = make_twin(folder / "environment", self.tree)
        self._age_s = int(time.time())

    def watch(self, tests: str, sources: Sequence[str], kept: Path, *, is_compiled: bool) -> Watched:
        """Run a folder of tests on the original code, or load the record if nothing has changed since.

        Tests that fail on the original code are not used.

        Raises:
            RuntimeError: the tests cannot be run.
        """
        key = digest_of(
            self.tree, ("gpuenergyd", "plugins", "policies", "tests/support", tests), f"{is_compiled} {sources}"
        )
        data, seconds, settings = (kept / f"{key}.{ending}" for ending in ("sqlite", "json", "ini"))
        kept.mkdir(parents=True, exist_ok=True)
        if not seconds.exists():
            data.unlink(missing_ok=True)
            includes = "\n    ".join(str(self.tree / source / "*") for source in sources)
            settings.write_text(f"[run]\ndata_file = {data}\ninclude =\n    {includes}\n", encoding="utf-8")
            python = make_twin(self._folder / "watching", self.tree, ["coverage"])
            command = [str(python), "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", *QUIET, *PLUGINS]
            environ = {"TEST_SECONDS": f"{seconds}.new", "NUMBA_DISABLE_JIT": "0" if is_compiled else "1"}
            environ["TEST_CPU_S"] = "0" if is_compiled else f"{PLAIN_LIMIT_S}"
            status, printed = self._run([*command, tests], WATCH_LIMIT_S, environ)
            if status not in {0, 1}:
                raise RuntimeError(f"{tests} cannot be run on the original code:\n{printed[-4000:]}")
            Path(environ["TEST_SECONDS"]).replace(seconds)
        took_s: dict[str, float] = json.loads(seconds.read_text(encoding="utf-8"))
        return Watched(lines_run(data, took_s), took_s)

    def test(self, mutant: Mutant, text: str, usual_s: Mapping[str, float]) -> tuple[Verdict, str]:
        """Run tests on a mutant in this order; return the verdict and the name of the test that detected it."""
        path = self.tree / mutant.path
        original, times_ns = path.read_text(encoding="utf-8"), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        self._age_s += 2
        try:
            path.write_text(text, encoding="utf-8")
            # Python's bytecode cache compares whole seconds and file size, which a mutant may leave unchanged.
            os.utime(path, (self._age_s, self._age_s))
            command = [str(self._python), "-m", "pytest", "-x", *QUIET, *PLUGINS, *usual_s]
            limits = self._folder / "limits.json"
            limits.write_text(json.dumps({test: SPIN_S + PATIENCE * s for test, s in usual_s.items()}))
            environ = {"NUMBA_DISABLE_JIT": "1" if path.name in KERNEL_FILES else "0", "TEST_LIMITS": str(limits)}
            status, printed = self._run(command, START_S + PATIENCE * sum(usual_s.values()), environ)
        finally:
            path.write_text(original, encoding="utf-8")
            os.utime(path, ns=times_ns)
        match status:
            case None | impatience.SPINS:
                return Verdict.HUNG, ""
            case 0:
                return Verdict.SURVIVED, ""
            case _:
                return Verdict.DETECTED, detecting_test(printed)

    def _run(self, command: Sequence[str], limit_s: float, environ: Mapping[str, str]) -> tuple[int | None, str]:
        """Run a program in the tree; return its status, None if it was killed at the time limit, and its output."""
        given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        output = run_program(command, limit_s, folder=self.tree, environ={**given, **environ}, grace_s=0.0)
        return None if output.is_out_of_time else output.status, output.stdout + output.stderr


def copy_tree(source: Path, target: Path) -> None:
    """Copy all tracked and untracked files that git does not ignore."""
    command = ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, names)):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def digest_of(tree: Path, folders: Sequence[str], salt: str) -> str:
    """Return a digest of the sources in some folders."""
    digest = hashlib.sha256(salt.encode())
    for folder in folders:
        for path in [tree / folder] if folder.endswith(".py") else sorted((tree / folder).rglob("*.py")):
            digest.update(str(path.relative_to(tree)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def merged_records(parts: Sequence[Watched]) -> Watched:
    """Merge the records of several test folders."""
    tests_of_line: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for part in parts:
        for path, lines in part.tests_of_line.items():
            for line, tests in lines.items():
                tests_of_line[path][line].update(tests)
    return Watched(tests_of_line, {test: s for part in parts for test, s in part.seconds.items()})


def lines_run(data: Path, tests: Collection[str]) -> dict[str, dict[int, set[str]]]:
    """Return the tests that run each line, from coverage's database."""
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    query = (
        "select path, context, numbits from line_bits"
        " join file on file.id = file_id join context on context.id = context_id"
    )
    with sqlite3.connect(data) as database:
        for path, context, bits in database.execute(query):
            if context not in tests:
                continue
            lines = found[path.rpartition("/tree/")[2]]
            for index, byte in enumerate(bits):
                for bit in range(8):
                    if byte >> bit & 1:
                        lines[8 * index + bit].add(context)
    database.close()
    return found


def detecting_test(printed: str) -> str:
    """Return the name of the failed test, or pytest's last line."""
    lines = [line for line in printed.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return (failed or lines or [""])[-1].removeprefix("FAILED ").partition(" - ")[0]
