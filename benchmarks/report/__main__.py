"""Run benchmarks and render docs/reference/benchmarks.md.

    python -m benchmarks.report [--only NAME ...] [--render] [--short] [--minutes 58]

Each benchmark has its own time limit and is skipped if it takes longer on an idle machine than the remaining time. If
it fails, lacks its data or is skipped, its last figures are kept with their date. Benchmarks of CPU time run first, two
at a time and the longest first; benchmarks of wall time run alone, the longest last. With --short all of them run in
minutes with results in build/bench/, and the page is not changed.
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
from docs.site.generated import write_generated_files
from gpuenergyd.errors import UsageError

SHORT = ROOT / "build" / "bench"
LEAST_USEFUL_S = 10.0
"""The minimum remaining time to start a short run."""


class Bench:
    """One execution of `make bench`."""

    def __init__(self, folder: Path, minutes: float, *, is_short: bool) -> None:
        self._folder, self._is_short = folder, is_short
        self._until_s = time.monotonic() + 60 * minutes
        self.failed: list[str] = []

    def run_all(self, runs: Sequence[Run]) -> None:
        """Run benchmarks of CPU time two at a time, then the others one after the other."""
        lanes = 2 if (os.cpu_count() or 1) > 1 else 1
        with ThreadPoolExecutor(lanes) as pool:
            list(pool.map(self.run, [run for run in runs if run.kind is Kind.COMPUTED]))
        for run in runs:
            if run.kind is Kind.TIMED:
                self.run(run)

    def run(self, run: Run) -> None:
        """Run one benchmark and store its result."""
        last = read_result(run.name, self._folder)
        left_s = self._until_s - time.monotonic()
        needed_s = LEAST_USEFUL_S if self._is_short else run.quiet_s
        if left_s < needed_s:
            reason = f"not enough time: it takes {needed_s:.0f} s, {max(0.0, left_s):.0f} s were left"
            result = with_failure(last, Attempt(utc_text(datetime.now(tz=UTC)), reason))
        else:
            try:
                result = measured(run, last, is_short=self._is_short, limit_s=min(run.limit_s, left_s))
            except OSError as error:  # no memory or disk space; the other benchmarks may still run
                result = with_failure(last, Attempt(utc_text(datetime.now(tz=UTC)), f"cannot be run: {error}"))
        write_result(result, self._folder)
        print_result(result)
        if result.failed is not None:
            self.failed.append(run.name)


def print_result(result: Result) -> None:
    """Print one line on a finished run."""
    if result.failed is not None:
        print(f"{result.name:<20} failed: {result.failed.reason}", flush=True)
    elif result.circumstances is not None:
        verdict = "" if result.is_met else ", a target was missed"
        print(f"{result.name:<20} {result.circumstances.duration_s:6.0f} s{verdict}", flush=True)


def main() -> int:
    """Run the benchmarks and render the page; a failed benchmark is reported but is not an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help=f"run only these: {', '.join(run.name for run in RUNS)}")
    parser.add_argument("--render", action="store_true", help="only render the page from the stored results")
    parser.add_argument("--short", action="store_true", help="run everything briefly, with results in build/bench/")
    parser.add_argument(
        "--minutes", type=float, help="time limit for all benchmarks; default: 58, unlimited with --only"
    )
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
            print(f"failed: {', '.join(bench.failed)}", file=sys.stderr)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(rendered_page(folder), encoding="utf-8")
    print("wrote", page)
    if not options.short:
        write_generated_files()
        print("wrote the figures of README.md and docs/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
