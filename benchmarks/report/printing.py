"""Prints the figures of a benchmark: lines to read, and one line of JSON, from which the page is made."""

import json
from collections.abc import Mapping
from typing import Any


def print_figures(figures: Mapping[str, Any], *, is_json: bool, left_out: str = "") -> None:
    """Print figures as JSON and, unless `is_json`, one line each; `left_out` names a long list that lines leave out."""
    if not is_json:
        for name, value in figures.items():
            if name != left_out:
                print(f"{name}: {value}")
    print(json.dumps(figures))
