"""`ENVIRONMENT/bin/python places.py FILE ...`: every mutant of these files by cosmic-ray's operators, as JSON lines.

With `--mutate` it reads such lines and adds what each file says then. Runs in an environment of its own, which has
cosmic-ray, and imports nothing of this project.

Left alone: annotations, `assert` (it states what the reader and the type checker may rely on), `raise` and its message,
the bodies of `if TYPE_CHECKING`, constants that only name an interface (`__all__`), and changes that no number survives
(`+` to `<<`), which any test would notice: they would raise the score and tell nothing.
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

ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod"})
BITS = frozenset({"BitOr", "BitAnd", "BitXor"})
IDENTITY = frozenset({"Is", "IsNot"})
KINDS = {
    "AddNot": "condition",
    "ReplaceTrueWithFalse": "truth",
    "ReplaceFalseWithTrue": "truth",
    "ReplaceAndWithOr": "connective",
    "ReplaceOrWithAnd": "connective",
    "ReplaceBreakWithContinue": "loop",
    "ReplaceContinueWithBreak": "loop",
    "ZeroIterationForLoop": "loop",
    "ExceptionReplacer": "exception",
    "NumberReplacer": "number",
}
PREFIXES = {
    "ReplaceBinaryOperator": "arithmetic",
    "ReplaceComparisonOperator": "comparison",
    "ReplaceUnaryOperator": "sign",
}


def kind_of(operator: str) -> str | None:
    """Return what an operator changes, None where it is not asked."""
    if operator in KINDS:
        return KINDS[operator]
    prefix, _, change = operator.partition("_")
    if prefix not in PREFIXES:
        return None
    old, _, new = change.partition("_")
    if prefix == "ReplaceBinaryOperator" and not any({old, new} <= group for group in (ARITHMETIC, BITS)):
        return None
    if prefix == "ReplaceComparisonOperator" and (old in IDENTITY) != (new in IDENTITY):
        return None
    if prefix == "ReplaceUnaryOperator" and "Invert" in {old, new}:
        return None
    return PREFIXES[prefix]


def left_alone(tree: ast.Module) -> list[tuple[int, int, int, int]]:
    """Return the spans that are not mutated: first line, column, last line, column."""
    nodes: list[ast.AST] = []
    for node in ast.walk(tree):
        match node:
            case ast.Assert() | ast.Raise():
                nodes.append(node)
            case ast.AnnAssign():
                nodes.append(node.annotation)
            case ast.arg(annotation=ast.expr() as annotation):
                nodes.append(annotation)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                nodes += [*node.decorator_list, *([node.returns] if node.returns else [])]
            case ast.ClassDef():
                nodes += [*node.decorator_list, *node.bases]
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                nodes.append(node)
            case ast.Assign(targets=[ast.Name() as target]) if is_alias(target.id, node.value):
                nodes.append(node)
    return [(n.lineno, n.col_offset, n.end_lineno or 0, n.end_col_offset or 0) for n in nodes]  # type: ignore[attr-defined]  # each has a place


def is_alias(name: str, value: ast.expr) -> bool:
    """Whether an assignment names a type or lists names: `Order = F | B`, `__all__`."""
    return name == "__all__" or (
        name[:1].isupper() and not name.isupper() and isinstance(value, ast.BinOp | ast.Subscript)
    )


def statement_lines(tree: ast.Module, line: int) -> tuple[int, int]:
    """Return the first and last line of the innermost statement's own text; (0, 0) where importing the file runs it."""
    best: ast.stmt | None = None
    depth_of_function = False
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            if best is None or node.lineno > best.lineno:
                best = node
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.body[0].lineno <= line:
                depth_of_function = True
    if best is None or not depth_of_function:
        return 0, 0
    body = getattr(best, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) and body and line < body[0].lineno else best.end_lineno or line
    return best.lineno, max(last, line)


def mutants(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each mutant of a file: where it is, which lines must run to meet it, and how to make it."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    spans = left_alone(tree)
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
    """Return a mutant with its file's text and the line before and after; text is None where nothing changes."""
    source = Path(mutant["path"]).read_text(encoding="utf-8")
    operator = OperatorProvider()[mutant["operator"]]()
    text = MutationVisitor.mutate_code(source, operator, mutant["occurrence"])
    if text is None or not is_another_program(text, source):
        return {**mutant, "text": None}
    before, after = source.splitlines(), text.splitlines()
    changed = [i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new]
    first, last = changed[0], (changed[-1] if len(before) == len(after) else changed[0])
    told = (" ".join(line.strip() for line in lines[first : last + 1]) for lines in (before, after))
    return {**mutant, "text": text, **dict(zip(("before", "after"), told, strict=True))}


def is_another_program(text: str, source: str) -> bool:
    """Whether a mutant is a program, and not the one it was made of."""
    try:
        return ast.dump(ast.parse(text)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def main() -> None:
    """Print mutants, or what they look like."""
    if sys.argv[1:] == ["--mutate"]:
        for line in sys.stdin:
            sys.stdout.write(json.dumps(mutate(json.loads(line))) + "\n")
        return
    for name in sys.argv[1:]:
        for mutant in mutants(Path(name)):
            sys.stdout.write(json.dumps(mutant) + "\n")


if __name__ == "__main__":
    main()
