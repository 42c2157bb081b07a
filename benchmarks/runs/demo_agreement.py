"""Whether the demo shows one result everywhere: its last sentence, `status`, the live page, report JSON and HTML.

    python benchmarks/runs/demo_agreement.py [--demos 10] [--load 2] [--json]

Runs `gpuenergyd demo --hold` several times while busy processes load the host. After each training, and before the
daemon ends, it reads `gpuenergyd status` and the live page; after the demo, the two reports. Exit status 1 if a
headline is outside its interval, two places disagree, a demo fails, or one prints nothing new for more than five
seconds.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuenergyd.core.job.result_text import saving_span_text, saving_text, slowdown_span_text, slowdown_text

MAX_SILENCE_S = 5.0
HELD = "press Enter"
"""In the line that the demo prints once the training has ended and its daemon still answers."""
DEMO_LIMIT_S = 900.0
COMMAND_LIMIT_S = 120.0
GPUENERGYD = (sys.executable, "-m", "gpuenergyd.cli.main")
NUMBERS = ("saving_ratio", "slowdown_ratio", "saving_interval", "slowdown_interval")
_SAME_SPEED = "at the same speed"
_SENTENCE = re.compile(
    r"with (?P<saving>[\d.]+ % (?:less|more) energy) per iteration \(95 % confidence interval: (?P<span>[^)]*)\),"
    rf" (?P<speed>[\d.]+ % (?:slower|faster)|{_SAME_SPEED})(?: than at full speed)?\.$"
)


@dataclass(slots=True)
class Demo:
    """What one demo showed, and where two places disagree."""

    longest_silence_s: float = 0.0
    silent_after: str = ""
    """The line before the longest silence."""
    duration_s: float = 0.0
    sentence: str = ""
    shown: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Saving, slowdown and intervals by the place that shows them as numbers."""
    disagreements: list[str] = field(default_factory=list)
    failure: str = ""

    @property
    def is_headline_inside(self) -> bool:
        """Whether the saving in the last sentence is inside the interval in the same sentence."""
        found = _SENTENCE.search(self.sentence)
        if found is None:
            return False
        low, high = sorted(signed_percents(found["span"]))
        return low <= signed_percents(found["saving"])[0] <= high


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--demos", type=int, default=10, metavar="N")
    parser.add_argument("--load", type=int, default=2, metavar="N", help="busy processes beside the demo")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    demos = []
    with busy_processes(options.load):
        for number in range(1, options.demos + 1):
            demos.append(run_demo())
            print(f"demo {number} of {options.demos}: {demos[-1].failure or demos[-1].sentence}", file=sys.stderr)
    found = figures(demos, num_busy=options.load)
    print(json.dumps(found) if options.json else "\n".join(f"{name:<26}{value}" for name, value in found.items()))
    is_met = found["headline_inside_interval"] == found["agreements"] == found["demos"] and not found["failures"]
    return 0 if is_met and found["longest_silence_s"] <= MAX_SILENCE_S else 1


def figures(demos: Sequence[Demo], *, num_busy: int) -> dict[str, Any]:
    """Return the counts over all demos and the range of their results."""
    numbers = [demo.shown["report JSON"] for demo in demos if "report JSON" in demo.shown]
    quietest = max(demos, key=lambda demo: demo.longest_silence_s)
    savings, slowdowns = ([each[name] for each in numbers] for name in ("saving_ratio", "slowdown_ratio"))
    return {
        "demos": len(demos),
        "busy_processes": num_busy,
        "headline_inside_interval": sum(demo.is_headline_inside for demo in demos),
        "agreements": sum(not demo.failure and not demo.disagreements for demo in demos),
        "longest_silence_s": round(quietest.longest_silence_s, 2),
        "silent_after": quietest.silent_after.strip(),
        "failures": [demo.failure for demo in demos if demo.failure],
        "disagreements": [text for demo in demos for text in demo.disagreements],
        "saving_ratios": [round(value, 4) for value in savings],
        "slowdown_ratios": [round(value, 4) for value in slowdowns],
        "median_duration_s": round(statistics.median(demo.duration_s for demo in demos), 1),
    }


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep some processes busy for the duration of the block."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def run_demo() -> Demo:
    """Run one demo and read its result in every place that shows it."""
    found = Demo()
    with tempfile.TemporaryDirectory(prefix="agree-") as folder:
        begun_s = time.monotonic()
        try:
            _run_and_compare(Path(folder), found)
        except (OSError, ValueError, KeyError, IndexError, subprocess.SubprocessError) as error:
            found.failure = f"{type(error).__name__}: {error}"
        found.duration_s = time.monotonic() - begun_s
    return found


def _run_and_compare(folder: Path, found: Demo) -> None:
    kept, out = folder / "demo", folder / "report.html"
    command = [*GPUENERGYD, "demo", "--hold", "--keep", str(kept), "--out", str(out)]
    log = folder / "errors.txt"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as demo,
    ):  # fmt: skip
        assert demo.stdin is not None
        assert demo.stdout is not None
        try:
            lines: list[str] = []
            printed_s = time.monotonic()
            for line in demo.stdout:
                now_s = time.monotonic()
                if not lines or line != lines[-1]:
                    if now_s - printed_s > found.longest_silence_s:
                        found.longest_silence_s, found.silent_after = now_s - printed_s, lines[-1] if lines else "start"
                    printed_s = now_s
                lines.append(line)
                if HELD in line and "status" not in found.shown:
                    live_page = _read_while_held(kept, found)
                    demo.stdin.write("\n")
                    demo.stdin.flush()
                    printed_s = time.monotonic()
            if demo.wait(DEMO_LIMIT_S) != 0:
                last = log.read_text().strip().splitlines() or lines
                raise ValueError(f"the demo exited with {demo.returncode}: {last[-1] if last else ''}".strip())
        finally:
            demo.kill()
    found.sentence = lines[-1].strip()
    history = f"sqlite:///{kept / 'state' / 'history.sqlite3'}"
    report = _command("report", "--format", "json", "--database", history)
    found.shown["report JSON"] = _numbers(json.loads(report)["jobs"][0])
    _compare(found, {"live page": live_page, "report HTML": out.read_text(encoding="utf-8")}, "".join(lines))


def _read_while_held(kept: Path, found: Demo) -> str:
    """Read the status and the live page of the demo's daemon; return the page."""
    socket = str(kept / "run" / "gpuenergyd.sock")
    status = json.loads(_command("status", "--json", "--socket", socket))
    found.shown["status"] = _numbers(status["ended_jobs"][0])
    with subprocess.Popen(
        [*GPUENERGYD, "dashboard", "--port", "0", "--socket", socket],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split()[2].rstrip(";")
            with urllib.request.urlopen(f"{url}status.json", timeout=COMMAND_LIMIT_S) as reply:
                found.shown["live page, status"] = _numbers(json.load(reply)["ended_jobs"][0])
            with urllib.request.urlopen(url, timeout=COMMAND_LIMIT_S) as reply:
                return str(reply.read().decode())
        finally:
            server.kill()


def _command(*arguments: str) -> str:
    return subprocess.run(
        [*GPUENERGYD, *arguments], check=True, capture_output=True, text=True, timeout=COMMAND_LIMIT_S
    ).stdout


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return saving, slowdown and intervals; reports have the ends of an interval as fields of their own."""
    found = {name: values[name] for name in NUMBERS[:2]}
    for name in NUMBERS[2:]:
        stem = name.removesuffix("_interval")
        ends = values[name] if name in values else [values[f"{stem}_low_ratio"], values[f"{stem}_high_ratio"]]
        found[name] = list(ends)
    return found


def _compare(found: Demo, pages: Mapping[str, str], printed: str) -> None:
    """Compare all numbers with those of the status, and all texts with the texts of these numbers."""
    first = found.shown["status"]
    for place, numbers in found.shown.items():
        if numbers != first:
            found.disagreements.append(f"{place}: {numbers}; status: {first}")
    saving, slowdown = saving_text(first["saving_ratio"]), first["slowdown_ratio"]
    speed = _SAME_SPEED if abs(slowdown) < 0.0005 else slowdown_text(slowdown)
    span, speed_span = saving_span_text(first["saving_interval"]), slowdown_span_text(first["slowdown_interval"])
    sentence = _SENTENCE.search(found.sentence)
    reported = (sentence["saving"], sentence["span"], sentence["speed"]) if sentence else found.sentence
    if reported != (saving, span, speed):
        found.disagreements.append(f"last sentence: {reported}; status: {(saving, span, speed)}")
    for place, page in pages.items():
        found.disagreements += [
            f"{place}: no {text!r}" for text in (saving, span, speed, speed_span) if text not in page
        ]
    for name, ratio in (("energy per iteration", -first["saving_ratio"]), ("iteration time", slowdown)):
        change = f"{round(100 * ratio, 1) + 0.0:+.1f} %"
        if not re.search(rf"^ *{name} .* {re.escape(change)} *$", printed, re.MULTILINE):
            found.disagreements.append(f"table: no row {name!r} with {change}")


def signed_percents(text: str) -> list[float]:
    """Return the percentages of a text as savings: those of "more" energy are negative."""
    parts = re.findall(r"([\d.]+) %(?: (less|more))?", text)
    default = parts[-1][1]
    return [float(number) * (-1 if (word or default) == "more" else 1) for number, word in parts]


if __name__ == "__main__":
    sys.exit(main())
