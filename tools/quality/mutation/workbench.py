"""A copy of the tree in which mutants are made and tests are asked; the checkout itself is never changed."""

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
from tools.quality import impatience
from tools.quality.mutation.sample import Mutant
from tools.quality.twin import make_twin

KERNEL_FILES = ("network.py", "refinement.py", "rounding.py", "segments.py", "sweep.py", "compiled.py")
"""Whoever changes one of them makes every kernel compile again, for longer than most tests take: these mutants are
tried as the plain Python that the kernels are without numba. One test holds that both do the same."""
PLUGINS = ("-p", "tools.quality.mutation.watching", "-p", "tools.quality.impatience")
PLAIN_LIMIT_S = 8.0
"""Of processor time for a test whose kernels are not compiled: some would take hours."""
QUIET = ("-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist")
WATCH_LIMIT_S = 3000.0
START_S = 60.0
"""For starting Python and pytest, on a busy machine."""
PATIENCE = 6.0
"""A mutant that takes so many times as long as its tests without it hangs; so does one that keeps the processor busy in
one test for so many times as long as that takes, and SPIN_S more. Compiled loops only the first of them ends."""
SPIN_S = 5.0


class Verdict(StrEnum):
    """What the tests said to a mutant."""

    NOTICED = "noticed"
    HUNG = "hung"
    """Noticed too: no test suite passes that does not end."""
    SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class Watched:
    """What the tests do while nothing is wrong."""

    tests_of_line: Mapping[str, Mapping[int, Collection[str]]]
    """By path from the root and line."""
    seconds: Mapping[str, float]

    def tests_for(self, mutant: Mutant, budget_s: float) -> list[str]:
        """Return the tests to ask, quickest first: those that run the statement, then the others of their files.

        The others, because what a fixture or a cache sets up once runs in one test only and is judged in many. What
        importing the file runs concerns every test that runs anything of it, or any test where nothing in it runs.
        """
        lines = self.tests_of_line.get(mutant.path, {})
        asked = range(mutant.first_line, mutant.last_line + 1) if mutant.first_line else list(lines)
        meet_it = {test for line in asked for test in lines.get(line, ())}
        if not meet_it and not mutant.first_line:
            meet_it = set(self.seconds)
        files = {test.partition("::")[0] for test in meet_it}
        beside = {test for test in self.seconds if test.partition("::")[0] in files} - meet_it
        chosen: list[str] = []
        total_s = 0.0
        for group in (meet_it, beside):
            for test in sorted(group, key=lambda test: (self.seconds[test], test)):
                total_s += self.seconds[test]
                if total_s > budget_s and chosen:
                    return chosen
                chosen.append(test)
        return chosen

    def seconds_of(self, tests: Iterable[str]) -> dict[str, float]:
        """Return how long each of these tests takes."""
        return {test: self.seconds[test] for test in tests}


class Workbench:
    """One copy of the tree and an environment in which it is installed."""

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
        """Run a folder of tests once and see what they do, or recall it where nothing has changed since.

        A test that fails while nothing is wrong is not asked later.

        Raises:
            RuntimeError: they cannot be run.
        """
        key = digest_of(self.tree, ("gpuenergyd", "policies", "tests/support", tests), f"{is_compiled} {sources}")
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
            status, said = self._run([*command, tests], WATCH_LIMIT_S, environ)
            if status not in {0, 1}:
                raise RuntimeError(f"{tests} cannot be run, though nothing is wrong:\n{said[-4000:]}")
            Path(environ["TEST_SECONDS"]).replace(seconds)
        took_s: dict[str, float] = json.loads(seconds.read_text(encoding="utf-8"))
        return Watched(lines_run(data, took_s), took_s)

    def ask(self, mutant: Mutant, text: str, usual_s: Mapping[str, float]) -> tuple[Verdict, str]:
        """Return what tests say to a mutant, in this order, and the last words of the one that noticed it."""
        path = self.tree / mutant.path
        original, times_ns = path.read_text(encoding="utf-8"), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        self._age_s += 2
        try:
            path.write_text(text, encoding="utf-8")
            # Python compares whole seconds and size, and mutants may keep both.
            os.utime(path, (self._age_s, self._age_s))
            command = [str(self._python), "-m", "pytest", "-x", *QUIET, *PLUGINS, *usual_s]
            limits = self._folder / "limits.json"
            limits.write_text(json.dumps({test: SPIN_S + PATIENCE * s for test, s in usual_s.items()}))
            environ = {"NUMBA_DISABLE_JIT": "1" if path.name in KERNEL_FILES else "0", "TEST_LIMITS": str(limits)}
            status, said = self._run(command, START_S + PATIENCE * sum(usual_s.values()), environ)
        finally:
            path.write_text(original, encoding="utf-8")
            os.utime(path, ns=times_ns)
        match status:
            case None | impatience.SPINS:
                return Verdict.HUNG, ""
            case 0:
                return Verdict.SURVIVED, ""
            case _:
                return Verdict.NOTICED, noticing_test(said)

    def _run(self, command: Sequence[str], limit_s: float, environ: Mapping[str, str]) -> tuple[int | None, str]:
        """Run a program in the tree; its status is None where it did not end and was ended, with all it started."""
        given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        output = run_program(command, limit_s, folder=self.tree, environ={**given, **environ}, grace_s=0.0)
        return None if output.is_out_of_time else output.status, output.stdout + output.stderr


def copy_tree(source: Path, target: Path) -> None:
    """Copy what git knows or would take."""
    command = ["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, names)):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def digest_of(tree: Path, folders: Sequence[str], told: str) -> str:
    """Return a digest of the sources in some folders."""
    digest = hashlib.sha256(told.encode())
    for folder in folders:
        for path in [tree / folder] if folder.endswith(".py") else sorted((tree / folder).rglob("*.py")):
            digest.update(str(path.relative_to(tree)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def together(parts: Sequence[Watched]) -> Watched:
    """Return what several folders of tests do."""
    tests_of_line: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for part in parts:
        for path, lines in part.tests_of_line.items():
            for line, tests in lines.items():
                tests_of_line[path][line].update(tests)
    return Watched(tests_of_line, {test: s for part in parts for test, s in part.seconds.items()})


def lines_run(data: Path, tests: Collection[str]) -> dict[str, dict[int, set[str]]]:
    """Return what coverage has recorded: path, line, the tests that run it."""
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


def noticing_test(said: str) -> str:
    """Return the name of the test that failed, or pytest's last line."""
    lines = [line for line in said.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return (failed or lines or [""])[-1].removeprefix("FAILED ").partition(" - ")[0]
