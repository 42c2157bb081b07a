"""Selects the mutants worth testing, and the lines that a test must run to detect one.

Excluded: annotations, decorators, `assert` statements (invariants for the reader and the type checker), `raise` with
its message, bodies of `if TYPE_CHECKING`, Protocols (their bodies never run), type aliases, and changes that any test
detects (`+` to `<<`), which would only raise the score.
"""

import ast

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
    """Return what kind of change an operator makes; None if its mutants are excluded."""
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


def excluded_spans(tree: ast.Module) -> list[tuple[int, int, int, int]]:
    """Return the excluded spans: first line, column, last line, column."""
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
            case ast.ClassDef(bases=[ast.Name(id="Protocol"), *_]):
                nodes.append(node)
            case ast.ClassDef():
                nodes += [*node.decorator_list, *node.bases]
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                nodes.append(node)
            case ast.Assign(targets=[ast.Name() as target]) if is_alias(target.id, node.value):
                nodes.append(node)
    return [(n.lineno, n.col_offset, n.end_lineno or 0, n.end_col_offset or 0) for n in nodes]  # type: ignore[attr-defined]  # every node has a position


def is_alias(name: str, value: ast.expr) -> bool:
    """Whether an assignment names a type or lists names: `Order = F | B`, `__all__`."""
    return name == "__all__" or (
        name[:1].isupper() and not name.isupper() and isinstance(value, ast.BinOp | ast.Subscript)
    )


def statement_lines(tree: ast.Module, line: int) -> tuple[int, int]:
    """Return first and last line of the innermost statement; (0, 0) for a statement that runs on import."""
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
