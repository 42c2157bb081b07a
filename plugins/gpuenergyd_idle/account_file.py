"""Accounts of lost time on disk: a restarted daemon grants no second allowance for the same day."""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from gpuenergyd.atomic_file import replace_file
from gpuenergyd_idle.rules.lost_time import LostTimeAccount

log = logging.getLogger(__name__)

SavedAccount = tuple[float, float, float]
"""Time lost, time worked, and time for which daemons have kept the account, in s."""


def read_accounts(path: Path) -> dict[str, SavedAccount]:
    """Return the saved accounts by GPU; none where the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
        found = {str(uuid): (float(row[0]), float(row[1]), float(row[2])) for uuid, row in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        log.warning("%s cannot be used, accounts of lost time begin anew: %s", path, error)
        return {}
    return {uuid: row for uuid, row in found.items() if all(math.isfinite(value) and value >= 0 for value in row)}


def save_accounts(path: Path, accounts: Mapping[str, SavedAccount]) -> None:
    try:
        replace_file(path, json.dumps({uuid: list(account) for uuid, account in accounts.items()}).encode())
    except OSError as error:
        log.warning("accounts of lost time cannot be saved: %s", error)


def opened_account(saved: SavedAccount | None, slow_ratio: float, now_s: float) -> LostTimeAccount:
    """Return a GPU's account, continued from a saved one."""
    lost_s, working_s, age_s = saved or (0.0, 0.0, 0.0)
    return LostTimeAccount(slow_ratio, now_s - age_s, working_s=working_s, lost_s=lost_s)
