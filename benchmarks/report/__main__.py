"""Run benchmarks and write docs/benchmarks.md.

    python -m benchmarks.report [--only NAME ...] [--render] [--short] [--minutes 58]

Each has its own time limit, and none begins that takes longer on a quiet machine than is left of the minutes for all.
What fails, lacks its data or finds no time keeps its last figures, with their date. Computed figures come first, two at
a time and the longest first; what is timed runs alone, the longest last: on a slow machine it is what finds no time.
With --short everything is tried in minutes and written to build/bench/, and the page stays as it is.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.report.page import PAGE, rendered_page
from benchmarks.report.results import RESULTS, Attempt, Result, read_result, utc_text, with_failure, write_result
from benchmarks.report.running import ROOT, measured
from benchmarks.report.runs import RUNS, Kind, Run, chosen_runs
from gpuenergyd.errors import UsageError

SHORT = ROOT / "build" / "bench"
LEAST_USEFUL_S = 10.0
"""For a short run."""


class Bench:
    """One call of `make bench`."""

    def __init__(self, folder: Path, minutes: float, *, is_short: bool) -> None:
        self._folder, self._is_short = folder, is_short
        self._until_s = time.monotonic() + 60 * minutes
        self.failed: list[str] = []

    def run_all(self, runs: Sequence[Run]) -> None:
        """Run what is computed two at a time, then the rest one after the other."""
        lanes = 2 if (os.cpu_count() or 1) > 1 else 1
        with ThreadPoolExecutor(lanes) as pool:
            list(pool.map(self.run, [run for run in runs if run.kind is Kind.COMPUTED]))
        for run in runs:
            if run.kind is Kind.TIMED:
                self.run(run)

    def run(self, run: Run) -> None:
        """Run one and keep what came of it."""
        last = read_result(run.name, self._folder)
        left_s = self._until_s - time.monotonic()
        needed_s = LEAST_USEFUL_S if self._is_short else run.quiet_s
        if left_s < needed_s:
            reason = f"no time was left for it: {max(0.0, left_s):.0f} s, and it takes {needed_s:.0f}"
            result = with_failure(last, Attempt(utc_text(datetime.now(tz=UTC)), reason))
        else:
            try:
                result = measured(run, last, is_short=self._is_short, limit_s=min(run.limit_s, left_s))
            except OSError as error:  # no memory or disk for it: the others may still find some
                result = with_failure(last, Attempt(utc_text(datetime.now(tz=UTC)), f"it cannot be run: {error}"))
        write_result(result, self._folder)
        say(result)
        if result.failed is not None:
            self.failed.append(run.name)


def say(result: Result) -> None:
    """Print one line about a run that has ended."""
    if result.failed is not None:
        print(f"{result.name:<20} no figures: {result.failed.reason}", flush=True)
    elif result.circumstances is not None:
        verdict = "" if result.is_met else ", a target was missed"
        print(f"{result.name:<20} {result.circumstances.duration_s:6.0f} s{verdict}", flush=True)


def main() -> int:
    """Run, render, and say what gave no figures; that alone is no error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help=f"of: {', '.join(run.name for run in RUNS)}")
    parser.add_argument("--render", action="store_true", help="run nothing: write the page from the results kept")
    parser.add_argument("--short", action="store_true", help="try everything, into build/bench/")
    parser.add_argument("--minutes", type=float, help="for all together; 58, or no limit with --only")
    options = parser.parse_args()
    folder = SHORT / "results" if options.short else RESULTS
    page = SHORT / "benchmarks.md" if options.short else PAGE
    if not options.render:
        try:
            runs = list(chosen_runs(options.only))
        except UsageError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        bench = Bench(folder, options.minutes or (24 * 60 if options.only else 58), is_short=options.short)
        bench.run_all(runs)
        if bench.failed:
            print(f"without new figures: {', '.join(bench.failed)}", file=sys.stderr)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(rendered_page(folder), encoding="utf-8")
    print("wrote", page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
