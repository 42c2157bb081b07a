"""Lets a benchmark run within its time and reads what it printed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evidence.results import Attempt, Result, circumstances, utc_text, with_failure
from evidence.runs import Run

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
GRACE_S = 20.0
"""For a benchmark that is told to end: its daemons give their clocks back."""
_ROW = re.compile(r"^\|(.*)\|\s*$")


@dataclass(frozen=True, slots=True)
class Output:
    """What a benchmark left behind."""

    status: int
    """Negative when it was killed."""
    stdout: str
    stderr: str
    is_out_of_time: bool


def measured(run: Run, last: Result, *, is_short: bool, limit_s: float) -> Result:
    """Run a benchmark; return its figures, or the last ones with the reason why there are no new ones."""
    begun_at = datetime.now(tz=UTC)
    missing = [name for name in run.data if not (DATA / name).is_dir()]
    if missing:
        return with_failure(last, Attempt(utc_text(begun_at), f"no shared/data/{missing[0]} beside the checkout"))
    command = run.command(is_short=is_short)
    load_before, begun_s = round(os.getloadavg()[0], 1), time.monotonic()
    output = run_program([sys.executable, *command], limit_s)
    duration_s = time.monotonic() - begun_s
    figures = None if output.is_out_of_time else figures_in(output.stdout)
    if figures is None:
        reason = f"not done within {limit_s:.0f} s" if output.is_out_of_time else last_words(output)
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
    """Run a program; after its time tell it to end, and `grace_s` later end it and what it started.

    Without an `environ` its Python finds the checkout's own packages.
    """
    if environ is None:
        paths = os.pathsep.join(str(ROOT / name) for name in ("", "policies", "trainers"))
        environ = {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
            return Output(process.returncode, stdout, stderr, is_out_of_time=False)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                stdout, stderr = process.communicate(timeout=grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                stdout, stderr = process.communicate()
            return Output(process.returncode, stdout, stderr, is_out_of_time=True)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise


def figures_in(text: str) -> Any:
    """Return the JSON that was printed, one value or a list of one a line, else the tables by heading, else None."""
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


def last_words(output: Output) -> str:
    """Return why a benchmark gave no figures, in its own last line."""
    lines = [line.strip() for line in (output.stderr + "\n" + output.stdout).splitlines() if line.strip()]
    return f"{lines[-1] if lines else 'it said nothing'} (exit status {output.status})"
