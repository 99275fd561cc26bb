"""Who may import whom: the table of the design, held by reading every import statement of the package."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "tracer"

LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "format": {"errors"},
    "record": {"errors", "format"},
    "hosts": {"errors", "format", "record"},
    "read": {"errors", "format"},
    "scores": {"errors", "format"},
    "sessions": {"errors", "format", "read", "scores"},
    "reports": {"errors", "format", "read", "scores", "sessions"},
    "cli": {"errors", "format", "record", "hosts", "read", "scores", "sessions", "reports", "facade"},
    "facade": {"errors", "format", "record", "hosts", "read", "scores", "sessions"},
    "__main__": {"cli"},
}
"""Layer -> layers it may import, besides itself. ``facade`` is ``tracer/__init__``, ``__main__`` is ``python -m tracer``."""

NUMERIC = {"numpy", "msgspec", "safetensors", "xxhash"}
PACKAGES: dict[str, set[str]] = {
    "errors": set(),
    "format": NUMERIC,
    "record": NUMERIC | {"torch", "yaml", "einops"},
    "hosts": NUMERIC | {"torch", "einops", "transformers", "megatron", "vllm"},
    "read": NUMERIC,
    "scores": NUMERIC,
    "sessions": NUMERIC | {"yaml"},
    "reports": NUMERIC | {"rich", "jinja2", "markupsafe", "plotly"},
    "cli": NUMERIC | {"rich", "typer"},
    "facade": {"torch"},
    "__main__": set(),
}
"""Layer -> packages outside the standard library it may import. Reading layers have no torch in theirs."""

FRAMEWORKS = ("transformers", "vllm", "megatron", "sglang")
ALLOWED_NAMES = {
    "__init__.py": {
        "vllm_options",
        "tracer.hosts.vllm_driver",
        "collect_sglang",
        "tracer.hosts.sglang_scores",
        "collect_vllm",
        "tracer.hosts.vllm_scores",
    }
}
"""Module -> names that may speak of a framework: what the facade exports of a host, and where from."""
FORBIDDEN_MODULE_NAMES = {"bisect", "trace", "types", "token", "json", "copy", "utils", "misc", "common", "helpers"}

MODULES = sorted(PACKAGE.rglob("*.py"))
IDS = [str(path.relative_to(PACKAGE)) for path in MODULES]


def layer_of(parts: tuple[str, ...]) -> str:
    """Layer of a module given its dotted parts after ``tracer``."""
    return parts[0] if parts else "facade"


def dotted(path: Path) -> tuple[str, ...]:
    """Dotted parts after ``tracer`` of a file of the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything a file imports, ``TYPE_CHECKING`` and lazy imports too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ("tracer", *(dotted(path) if path.name == "__init__.py" else dotted(path)[:-1]))
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            if base in ("tracer", ""):
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, base
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and isinstance(node.args[0], ast.Constant):
            yield node.lineno, str(node.args[0].value)


def calls_itself_facade(name: str) -> bool:
    """True for ``tracer.trace`` and the like: names of the facade rather than a layer."""
    return not (PACKAGE / name.split(".")[1]).is_dir() and not (PACKAGE / f"{name.split('.')[1]}.py").is_file()


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_imports_go_one_way(path: Path) -> None:
    """A module imports only the layers below its own, type-checking and lazy imports included."""
    layer = layer_of(dotted(path))
    assert layer in LAYERS, f"{path} belongs to no layer; a new folder needs a line in LAYERS and in the design"
    wrong = []
    for line, name in imports(path):
        if name.split(".")[0] != "tracer":
            continue
        parts = tuple(name.split(".")[1:])
        target = "facade" if not parts or calls_itself_facade(name) else layer_of(parts)
        if target != layer and target not in LAYERS[layer]:
            wrong.append(f"line {line}: {layer} imports {name}")
    assert not wrong


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_packages_are_those_of_the_layer(path: Path) -> None:
    """A module imports only the packages its layer may use, so reading never meets torch and recording never meets rich."""
    allowed = PACKAGES[layer_of(dotted(path))]
    found = {(line, name.split(".")[0]) for line, name in imports(path)}
    wrong = [f"line {line}: {name}" for line, name in found if name not in allowed | {"tracer", ""} | set(sys.stdlib_module_names)]
    assert not wrong


@pytest.mark.parametrize("path", [p for p in MODULES if layer_of(dotted(p)) != "hosts"], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_core_names_no_framework(path: Path) -> None:
    """Outside hosts no code names a framework; docstrings and comments may."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    names = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose]
    names += [node.id for node in nodes if isinstance(node, ast.Name)]
    names += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    named = {name for name in names if any(framework in name.lower() for framework in FRAMEWORKS)}
    assert named <= ALLOWED_NAMES.get(str(path.relative_to(PACKAGE)), set())


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_module_names_say_what_they_hold(path: Path) -> None:
    """No module shadows the standard library's names or is a drawer for odds and ends."""
    assert not FORBIDDEN_MODULE_NAMES & set(dotted(path))


@pytest.mark.parametrize("path", [p for p in MODULES if p.name != "__init__.py"], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_export_is_defined_where_it_is_exported(path: Path) -> None:
    """A module lists its public names, and every one of them is there."""
    exported: list[str] | None = None
    defined: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                exported = ast.literal_eval(node.value)
            case ast.Assign():
                defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                defined.add(name)
            case ast.ImportFrom(names=names):
                defined |= {alias.asname or alias.name for alias in names}
            case _:
                pass
    assert exported is not None, "no __all__"
    assert set(exported) <= defined
