"""Runs a benchmark within its time limit and parses its output."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report.results import Attempt, Result, circumstances, utc_text, with_failure
from benchmarks.report.runs import Run
from docs.site.house_map import PYTHON_PATH

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
GRACE_S = 20.0
"""How long an interrupted benchmark may take to stop its daemons, which restore clocks."""
_ROW = re.compile(r"^\|(.*)\|\s*$")


@dataclass(frozen=True, slots=True)
class Output:
    """The exit status and output of a benchmark."""

    status: int
    """The exit status, negative after a signal."""
    stdout: str
    stderr: str
    is_out_of_time: bool


def measured(run: Run, last: Result, *, is_short: bool, limit_s: float) -> Result:
    """Run a benchmark; return its figures, or the last ones with the reason for the failure."""
    begun_at = datetime.now(tz=UTC)
    missing = [name for name in run.data if not (DATA / name).is_dir()]
    if missing:
        return with_failure(
            last, Attempt(utc_text(begun_at), f"shared/data/{missing[0]} is missing beside the checkout")
        )
    command = run.command(is_short=is_short)
    load_before, begun_s = round(os.getloadavg()[0], 1), time.monotonic()
    output = run_program([sys.executable, *command], limit_s)
    duration_s = time.monotonic() - begun_s
    figures = None if output.is_out_of_time else figures_in(output.stdout)
    if figures is None:
        reason = f"not finished within {limit_s:.0f} s" if output.is_out_of_time else failure_reason(output)
        return with_failure(last, Attempt(utc_text(begun_at), reason))
    given = circumstances(f"python {' '.join(command)}", begun_at, duration_s, load_before)
    return Result(run.name, figures, given, is_met=output.status == 0)


def run_program(
    command: Sequence[str],
    limit_s: float,
    *,
    folder: Path = ROOT,
    environ: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
) -> Output:
    """Run a program; interrupt it after the time limit and kill it with its descendants `grace_s` later.

    Remaining processes never block the caller: output goes to files, and the process group is killed with the program.
    Without `environ`, Python imports the packages of the checkout.
    """
    if environ is None:
        environ = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stdout,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,
        subprocess.Popen(
            command, cwd=folder, env=environ, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        is_out_of_time = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_out_of_time = True
        finally:
            _end(process, grace_s)
        stdout.seek(0)
        stderr.seek(0)
        return Output(process.returncode, stdout.read(), stderr.read(), is_out_of_time=is_out_of_time)


def _end(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Interrupt a program if it still runs, wait, then kill it, its process group and other descendants."""
    with ExitStack() as stack:
        family = []
        if process.poll() is None:
            for pid in descendants(process.pid):
                with suppress(ProcessLookupError):
                    family.append(os.pidfd_open(pid))
                    stack.callback(os.close, family[-1])
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pidfd in family:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        process.wait()


def descendants(pid: int) -> list[int]:
    """Return the PIDs of the living descendants of a process."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def figures_in(text: str) -> Any:
    """Return the printed JSON (one value, or a list of one per line), else the tables by heading, else None."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        values = [value for line in text.splitlines() if (value := _json_or_none(line)) is not None]
    if values:
        return values if len(values) > 1 else values[0]
    return tables_in(text) or None


def _json_or_none(line: str) -> Any:
    if not line.startswith(("{", "[")):
        return None
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def tables_in(text: str) -> Mapping[str, Any]:
    """Return Markdown tables as {heading: {columns, rows}}."""
    tables: dict[str, Any] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip()
        elif found := _ROW.match(line):
            cells = [cell.strip() for cell in found[1].split("|")]
            if heading not in tables:
                tables[heading] = {"columns": cells, "rows": []}
            elif not all(set(cell) <= {"-", ":"} and cell != "-" for cell in cells):
                tables[heading]["rows"].append(cells)
    return {name: table for name, table in tables.items() if table["rows"]}


def failure_reason(output: Output) -> str:
    """Return the last line of output of a benchmark that gave no figures."""
    lines = [line.strip() for line in (output.stderr + "\n" + output.stdout).splitlines() if line.strip()]
    return f"{lines[-1] if lines else 'no output'} (exit status {output.status})"
