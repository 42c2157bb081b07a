"""Python API reference: public names of the public modules, read from the sources."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path

from docs.site.markdown import block, page

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = {
    "gpuenergyd": ROOT,
    "gpuenergyd_policies": ROOT / "policies",
    "gpuenergyd_trainers": ROOT / "trainers",
    "gpuenergyd_carbon": ROOT / "plugins",
    "gpuenergyd_sim": ROOT / "plugins",
}
PUBLIC_MODULES = {
    "For training programs": (
        "gpuenergyd.client.loop",
        "gpuenergyd.client.figures",
        "gpuenergyd.energy_windows.window",
        "gpuenergyd.history",
        "gpuenergyd_trainers.torch_pipelining",
        "gpuenergyd_trainers.torch_inflight",
        "gpuenergyd_trainers.deepspeed",
        "gpuenergyd_trainers.megatron",
        "gpuenergyd_trainers.lightning",
        "gpuenergyd_trainers.huggingface",
        "gpuenergyd_trainers.loop",
        "gpuenergyd_trainers.joining.handle",
    ),
    "For policies": (
        "gpuenergyd.core.policy_api.policy",
        "gpuenergyd.core.policy_api.target_policy",
        "gpuenergyd.core.policy_api.prior_policy",
        "gpuenergyd.core.policy_api.power",
        "gpuenergyd.core.policy_api.testing",
        "gpuenergyd.core.pipeline.plan",
        "gpuenergyd.core.pipeline.graph",
        "gpuenergyd.core.pipeline.schedules",
        "gpuenergyd.core.policy_api.target",
        "gpuenergyd.core.measurement.observation",
        "gpuenergyd.core.pipeline.profile",
        "gpuenergyd.core.pipeline.timeline",
        "gpuenergyd.core.pipeline.switching",
        "gpuenergyd.core.carbon.intensity",
    ),
    "For plugins": (
        "gpuenergyd.cli.command_entry",
        "gpuenergyd.cli.output",
        "gpuenergyd.client.exchanges",
        "gpuenergyd.daemon.api.plugin_routes",
        "gpuenergyd.daemon.host_services",
        "gpuenergyd.report.plugin_formats",
        "gpuenergyd.report.plugin_groups",
        "gpuenergyd.store.plugin_tables",
    ),
    "For GPU drivers": ("gpuenergyd.gpu.device",),
    "For carbon sources": ("gpuenergyd_carbon.sources.source",),
    "For experiments on simulated GPUs": (
        "gpuenergyd_sim.training.simulated_stage",
        "gpuenergyd_sim.training.timers",
        "gpuenergyd_sim.driver.host",
        "gpuenergyd_sim.virtual_training.training",
        "gpuenergyd_sim.virtual_training.work",
        "gpuenergyd_sim.virtual_training.random_jobs",
    ),
    "For tools": ("gpuenergyd.client.connection", "gpuenergyd.errors"),
}
"""Public modules by audience; all others may change without notice."""

_SECTIONS = ("Args:", "Returns:", "Raises:", "Yields:", "Attributes:")
_HIDDEN_DECORATORS = ("overload",)


@dataclass(frozen=True, slots=True)
class PublicName:
    """A public class, function, method, field or constant."""

    name: str
    signature: str
    docstring: str
    members: tuple["PublicName", ...] = ()


@dataclass(frozen=True, slots=True)
class PublicModule:
    """A public module."""

    name: str
    docstring: str
    names: tuple[PublicName, ...]


def public_modules() -> dict[str, tuple[PublicModule, ...]]:
    """Return the public modules by audience."""
    return {title: tuple(map(_module, names)) for title, names in PUBLIC_MODULES.items()}


def python_api_page() -> str:
    """Return the page with all public names, their signatures and docstrings."""
    parts = ["Modules that other programs may import. All others may change without notice."]
    for title, modules in public_modules().items():
        parts.append(f"## {title}")
        for module in modules:
            parts += [f"### {module.name}", docstring_text(module.docstring)]
            for name in module.names:
                parts += [f"#### {name.name}", block(name.signature, "text"), docstring_text(name.docstring)]
                parts += [_member(member) for member in name.members]
    return page("Python API", *parts)


def _member(member: PublicName) -> str:
    text = docstring_text(member.docstring).replace("\n", "\n  ").rstrip()
    return f"- `{member.signature}`" + (f"\n\n  {text}\n" if text else "")


def docstring_text(docstring: str) -> str:
    """Return a docstring as Markdown: sections become lists, drawings and tables become code blocks."""
    out = []
    for paragraph in docstring.split("\n\n"):
        first, *rest = paragraph.splitlines() or [""]
        if first in _SECTIONS:
            out.append(f"*{first.removesuffix(':')}*\n\n" + _items(rest))
        elif any("  " in line.strip() or line.startswith(" ") for line in (first, *rest)):
            out.append(block(paragraph, "text"))
        else:
            out.append(paragraph)
    return "\n\n".join(out)


def _items(lines: list[str]) -> str:
    """Return the lines of a Google section (`name: text`, continuation lines indented further) as a list."""
    items: list[str] = []
    for line in lines:
        name, colon, text = line.strip().partition(": ")
        if line.startswith("     ") and items:
            items[-1] += " " + line.strip()
        else:
            items.append(f"- `{name}`: {text}" if colon else f"- {line.strip()}")
    return "\n".join(items)


def _module(name: str) -> PublicModule:
    package, *rest = name.split(".")
    path = _PACKAGES[package] / Path(*[package, *rest])
    tree = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))
    return PublicModule(name, ast.get_docstring(tree) or "", tuple(_names(tree.body)))


def _names(body: list[ast.stmt]) -> Iterator[PublicName]:
    for index, node in enumerate(body):
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                bases = ", ".join(ast.unparse(base) for base in node.bases)
                signature = f"class {name}({bases})" if bases else f"class {name}"
                yield PublicName(name, signature, ast.get_docstring(node) or "", tuple(_members(node.body)))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if not name.startswith("_"):
                yield PublicName(name, _signature(node), _documented(node))
            case ast.Assign(targets=[ast.Name(id=name)]) if name.isupper() and _text_below(body, index):
                yield PublicName(name, ast.unparse(node), _text_below(body, index))
            case _:
                pass


def _members(body: list[ast.stmt]) -> Iterator[PublicName]:
    """Yield public fields and methods; a property counts as a field."""
    for index, node in enumerate(body):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) if not name.startswith("_"):
                yield PublicName(name, ast.unparse(node), _text_below(body, index))
            case ast.Assign(targets=[ast.Name(id=name)]) if not name.startswith("_"):
                yield PublicName(name, ast.unparse(node), _text_below(body, index))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if not name.startswith("_"):
                decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
                if not decorators & set(_HIDDEN_DECORATORS):
                    is_property = not {"property", "cached_property"}.isdisjoint(decorators)
                    signature = f"{name}: {_returned(node)}" if is_property else _signature(node)
                    yield PublicName(name, signature, _documented(node))
            case _:
                pass


def _documented(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the docstring of a public function.

    Raises:
        ValueError: it has none, which is for names that say everything, inside only.
    """
    if not (text := ast.get_docstring(node)):
        raise ValueError(f"{node.name} is in the public interface and has no docstring")
    return text


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return f"{node.name}({ast.unparse(node.args)}) -> {_returned(node)}"


def _returned(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return ast.unparse(node.returns) if node.returns is not None else "None"


def _text_below(body: list[ast.stmt], index: int) -> str:
    """Return the string below a field, its documentation."""
    match body[index + 1 : index + 2]:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return cleandoc(text)
        case _:
            return ""
