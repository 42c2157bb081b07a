"""How many small wrong changes to core/ and planning/ do the tests notice? A seeded sample of mutants.

    python benchmarks/runs/mutation.py --sample 200 --seed 1 [--minutes 30] [--again build/mutation/last.json]
        [--below gpuenergyd/core/job] [--tests tests/core/job] [--json]

Each mutant (one operator, number, comparison, condition, loop or truth value changed by cosmic-ray's operators) is put
into a copy of the tree, and the tests that run its lines are asked, quickest first, until one fails. A mutant that no
asked test notices has survived: a rule that nobody tests, a change that makes no difference, or work for tests that are
not asked here (those of daemon and command line). The result is kept in build/mutation/last.json; `--again` asks only
the survivors of such a file, after tests have been added. Needs the checkout, and PyPI for cosmic-ray and coverage.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report.running import ROOT
from tools.quality.mutation.equivalent import reason_for
from tools.quality.mutation.sample import Mutant, interval, shuffled_places
from tools.quality.mutation.workbench import KERNEL_FILES, Verdict, Watched, Workbench, merged_records
from tools.quality.twin import install

SOURCES = {"core": "gpuenergyd/core", "planning": "policies/gpuenergyd_policies/planning"}
TESTS = ("tests/core", "tests/policies", "tests/plugins/carbon", "tests/report", "tests/wire")
PLAIN_TESTS = (
    "tests/policies/planning/test_compiled.py",
    "tests/policies/planning/test_known_plans.py",
    "tests/policies/planning/exact/test_network.py",
    "tests/policies/planning/discrete/test_refinement.py",
    "tests/policies/planning/discrete/test_rounding.py",
    "tests/policies/planning/switching/test_segment_kernels.py",
    "tests/policies/planning/exact/test_sweep.py",
)
"""What is asked about kernels, which run uncompiled then: the others take minutes."""
FOLDER = ROOT / "build" / "mutation"
BUDGET_S = 40.0
"""Of tests asked about one mutant, by their usual time."""
COSMIC_RAY = "cosmic-ray"
REQUIRED_SCORE = 0.8


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=200, help="mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="begin no mutant after that")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", type=Path, help="ask about the survivors of this result only")
    parser.add_argument("--only", choices=sorted(SOURCES), help="mutants of one package")
    parser.add_argument("--below", nargs="+", default=[""], help="mutants of files below these paths only")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders of tests to ask")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    until_s = time.monotonic() + 60 * options.minutes
    FOLDER.mkdir(parents=True, exist_ok=True)
    maker = mutant_maker()
    if options.again:
        before = json.loads(options.again.read_text(encoding="utf-8"))
        asked = [one for one in before["mutants"] if one["verdict"] == Verdict.SURVIVED]
    else:
        before = None
        chosen = shuffled_places(all_mutants(maker, options.only, options.below), options.seed)
        asked = list(first_valid(maker, chosen, options.sample))
    print(f"{len(asked)} mutants; watching the tests first", file=sys.stderr)
    tested = ask_all(maker, asked, options.tests, options.workers, until_s)
    result = summary(merged(before, tested), options.seed, commits(before), options.tests)
    (FOLDER / "last.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.json:
        tested = [one for one in result["mutants"] if one["verdict"] not in {Verdict.DETECTED, Verdict.HUNG}]
        print(json.dumps({**result, "mutants": tested}))
    else:
        show(result)
    return 0 if all(part["score"] >= REQUIRED_SCORE for part in result["scores"].values()) else 1


def mutant_maker() -> Path:
    """Return the interpreter of an environment that has cosmic-ray and nothing else."""
    python = FOLDER / "cosmic-ray" / "bin" / "python"
    if not (python.parent.parent / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(python.parents[1])], check=True)
        install(python, [COSMIC_RAY])
        (python.parent.parent / "complete").touch()
    return python


def all_mutants(maker: Path, only: str | None, below: Sequence[str]) -> list[Mutant]:
    """Return every mutant of what is mutated, or of one package or some paths of it."""
    folders = [folder for name, folder in SOURCES.items() if only in (None, name)]
    paths = (str(path.relative_to(ROOT)) for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    files = [path for path in paths if path.startswith(tuple(below))]
    lines = run_maker(maker, files, "")
    return [as_mutant(line) for line in lines]


def first_valid(maker: Path, mutants: Iterator[Mutant], num: int) -> Iterator[dict[str, Any]]:
    """Yield the first mutants that are other programs, with how they look, until there are as many as wanted."""
    left = num
    while left:
        batch = [mutant for mutant, _ in zip(mutants, range(left), strict=False)]
        if not batch:
            return
        for line in made(maker, batch):
            if line["text"] is not None:
                left -= 1
                yield {name: value for name, value in line.items() if name != "text"}


def made(maker: Path, mutants: Sequence[Mutant | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return mutants with the text of their files."""
    given = "".join(json.dumps(one if isinstance(one, Mapping) else fields(one)) + "\n" for one in mutants)
    return run_maker(maker, ["--mutate"], given)


def run_maker(maker: Path, arguments: Sequence[str], given: str) -> list[dict[str, Any]]:
    command = [str(maker), "-m", "tools.quality.mutation.places", *arguments]
    done = subprocess.run(command, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def fields(mutant: Mutant) -> dict[str, Any]:
    return {name: getattr(mutant, name) for name in Mutant.__slots__}


def as_mutant(line: Mapping[str, Any]) -> Mutant:
    given = {name: line[name] for name in Mutant.__slots__}
    return Mutant(**{**given, "start": tuple(given["start"]), "end": tuple(given["end"])})


def ask_all(
    maker: Path, lines: Sequence[dict[str, Any]], tests: Sequence[str], num_workers: int, until_s: float
) -> list[dict[str, Any]]:
    """Return each mutant with what the tests said, those left out without a verdict as long as time lasts."""
    to_ask = [line for line in lines if reason_for(line["path"], line["before"], line["after"]) is None]
    benches = [Workbench(FOLDER / str(index)) for index in range(num_workers)]
    has_kernels = any(Path(line["path"]).name in KERNEL_FILES for line in to_ask)
    compiled, plain = watched(benches, tests, PLAIN_TESTS if has_kernels else ())
    free: SimpleQueue[Workbench] = SimpleQueue()
    for bench in benches:
        free.put(bench)

    def ask(line: dict[str, Any], text: str) -> dict[str, Any] | None:
        if time.monotonic() > until_s:
            return None
        bench = free.get()
        try:
            return asked(bench, line, text, plain if Path(line["path"]).name in KERNEL_FILES else compiled)
        finally:
            free.put(bench)

    with ThreadPoolExecutor(num_workers) as pool:
        pending: list[Future[dict[str, Any] | None]] = [
            pool.submit(ask, line, one["text"]) for line, one in zip(to_ask, made(maker, to_ask), strict=True)
        ]
        tested = [one for one in (future.result() for future in pending) if one is not None]
    left_out = [line for line in lines if line not in to_ask]
    return tested + [
        {**line, "verdict": "equivalent", "reason": reason_for(line["path"], line["before"], line["after"])}
        for line in left_out
    ]


def watched(benches: Sequence[Workbench], tests: Sequence[str], plain_tests: Sequence[str]) -> tuple[Watched, Watched]:
    """Return what all tests do, and what some of the planner's do while kernels are not compiled."""
    free: SimpleQueue[Workbench] = SimpleQueue()
    for bench in benches:
        free.put(bench)

    def watch(part: tuple[str, bool]) -> Watched:
        bench = free.get()
        try:
            folder, is_compiled = part
            return bench.watch(folder, list(SOURCES.values()), FOLDER / "watched", is_compiled=is_compiled)
        finally:
            free.put(bench)

    parts = [*((one, False) for one in plain_tests), *((folder, True) for folder in tests)]
    with ThreadPoolExecutor(len(benches)) as pool:
        known = list(pool.map(watch, parts))
    return merged_records(known[len(plain_tests) :]), merged_records(known[: len(plain_tests)])


def asked(bench: Workbench, line: dict[str, Any], text: str, known: Watched) -> dict[str, Any]:
    """Ask the tests about one mutant and say what came of it."""
    mutant = as_mutant(line)
    tests = known.tests_for(mutant, BUDGET_S)
    begun_s = time.monotonic()
    if tests:
        verdict, by = bench.test(mutant, text, known.seconds_of(tests))
    else:
        verdict, by = Verdict.SURVIVED, "no test runs it"
    took_s = time.monotonic() - begun_s
    where = f"{mutant.path}:{mutant.start[0]}"
    print(
        f"{verdict:<9}{took_s:6.1f} s {len(tests):5} tests  {where}  {line['after']}  [{by}]",
        file=sys.stderr,
        flush=True,
    )
    return {**line, "verdict": str(verdict), "by": by, "num_tests": len(tests)}


def merged(before: Mapping[str, Any] | None, tested: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put new verdicts into an earlier result."""
    if before is None:
        return list(tested)
    new = {place_of(one): one for one in tested}
    earlier: list[dict[str, Any]] = before["mutants"]
    return [new.get(place_of(one), one) for one in earlier]


def place_of(line: Mapping[str, Any]) -> tuple[object, ...]:
    return line["path"], line["operator"], line["occurrence"]


def commits(before: Mapping[str, Any] | None) -> list[str]:
    """Return of which commits the mutants and tests are: of more than one where survivors were asked again."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
    is_changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode != 0
    now = commit.stdout.strip() + (" and changes" if is_changed else "")
    return [*(before["commits"] if before else []), now]


def summary(
    mutants: Sequence[dict[str, Any]], seed: int, of_commits: Sequence[str], tests: Sequence[str]
) -> dict[str, Any]:
    """Return the score of all and of each package, with what is left out, and every mutant."""
    counted = [one for one in mutants if one["verdict"] != "equivalent"]
    groups = {"all": counted} | {
        name: [one for one in counted if one["path"].startswith(folder)] for name, folder in SOURCES.items()
    }
    return {
        "seed": seed,
        "commits": list(of_commits),
        "tests": list(tests),
        "score": score(counted)["score"],
        "scores": {name: score(group) for name, group in groups.items()},
        "kinds": {
            kind: score([one for one in counted if one["kind"] == kind])
            for kind in sorted({m["kind"] for m in counted})
        },
        "num_equivalent": len(mutants) - len(counted),
        "mutants": list(mutants),
    }


def score(mutants: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what share of mutants the tests notice, with Wilson's 95 % interval."""
    verdicts = Counter(one["verdict"] for one in mutants)
    detected = verdicts[Verdict.DETECTED] + verdicts[Verdict.HUNG]
    low, high = interval(detected, len(mutants))
    return {
        "num": len(mutants), "num_detected": detected, "num_hung": verdicts[Verdict.HUNG],
        "score": detected / len(mutants) if mutants else 0.0, "low": low, "high": high,
    }  # fmt: skip


def show(result: Mapping[str, Any]) -> None:
    for one in result["mutants"]:
        if one["verdict"] in {Verdict.SURVIVED, "equivalent"}:
            print(f"{one['verdict']}: {one['path']}:{one['start'][0]}\n  - {one['before']}\n  + {one['after']}")
    for name, part in result["scores"].items():
        print(
            f"{name:<10}{100 * part['score']:5.1f} % of {part['num']} mutants detected,"
            f" 95 % interval {100 * part['low']:.1f} to {100 * part['high']:.1f} %"
        )


if __name__ == "__main__":
    sys.exit(main())
