"""Lists all mutants of source files as JSON lines: `python -m tools.quality.mutation.places FILE ...`.

With `--mutate` it reads such lines and adds the mutated source text. It uses cosmic-ray's operators and runs in the
virtual environment in which cosmic-ray is installed.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.operators.provider import OperatorProvider

from tools.quality.mutation.choice import excluded_spans, kind_of, statement_lines


def mutants(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each mutant of a file: its position, the lines that must run to detect it, and the operator."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    spans = excluded_spans(tree)
    nodes = list(ast_nodes(get_ast(source)))
    provider = OperatorProvider()
    for name in provider:
        kind = kind_of(name)
        if kind is None:
            continue
        operator = provider[name]()
        found = (span for node in nodes for span in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(found):
            if any((a, b) <= start and end <= (c, d) for a, b, c, d in spans):
                continue
            first, last = statement_lines(tree, start[0])
            yield {
                "path": str(path), "kind": kind, "operator": name, "occurrence": occurrence,
                "start": start, "end": end, "first_line": first, "last_line": last,
            }  # fmt: skip


def mutate(mutant: dict[str, Any]) -> dict[str, Any]:
    """Return a mutant with the mutated text and the changed line before and after; text is None if nothing changes."""
    source = Path(mutant["path"]).read_text(encoding="utf-8")
    operator = OperatorProvider()[mutant["operator"]]()
    text = MutationVisitor.mutate_code(source, operator, mutant["occurrence"])
    if text is None or not is_another_program(text, source):
        return {**mutant, "text": None}
    before, after = source.splitlines(), text.splitlines()
    changed = [i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new]
    first, last = changed[0], (changed[-1] if len(before) == len(after) else changed[0])
    changed_lines = (" ".join(line.strip() for line in lines[first : last + 1]) for lines in (before, after))
    return {**mutant, "text": text, **dict(zip(("before", "after"), changed_lines, strict=True))}


def is_another_program(text: str, source: str) -> bool:
    """Whether the mutant is valid Python and differs from the original."""
    try:
        return ast.dump(ast.parse(text)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def main() -> None:
    """Print mutants, or with --mutate their source text."""
    if sys.argv[1:] == ["--mutate"]:
        for line in sys.stdin:
            sys.stdout.write(json.dumps(mutate(json.loads(line))) + "\n")
        return
    for name in sys.argv[1:]:
        for mutant in mutants(Path(name)):
            sys.stdout.write(json.dumps(mutant) + "\n")


if __name__ == "__main__":
    main()
