"""The uses of what MAX does not document: the tables of docs/notes/new-max.md, and what the code uses."""

import ast
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "notes" / "new-max.md"
FOLDERS = ("python", "graphs", "tests", "benchmarks", "examples", "docs", ".ci")
SERVER = ("Private names of MAX Serve", "Public names of MAX Serve")
"""The tables of names that need the environment of MAX Serve."""

_NAME = re.compile(r"`([\w.]+)(?:\(([\w, ]*)\))?`")
_LINK = re.compile(r"\]\(([^)#]+)")
_IN_TEXT = re.compile(r"\bmax(?:\.\w+)*\._\w+(?:\.\w+)*")
_VARIABLE = re.compile(r"\b(?:MODULAR|MAX_SERVE|MOJO)_[A-Z0-9_]+\b")

OTHERS = {
    *("_exit", "_replace", "_is_owned"),  # Python's own: os, namedtuple, threading.RLock
    *("_sleep", "_C", "_is_amx_tile_supported", "_init_amx"),  # torch's and vLLM's, in benchmarks and GPU tests
    *("_forward_hooks", "_forward_pre_hooks", "_dynamo", "torch._dynamo"),  # torch's, in tests
    *("_PyInterpreterState_GetEvalFrameFunc", "_PyInterpreterState_SetEvalFrameFunc"),  # CPython's, in tests
    "_PyEval_EvalFrameDefault",
    *("_base", "_inference_mode_base"),  # a view's own tensor, of torch and of the test of writes
    # transformers', of the release that `paged_kv.transformers` requires
    *("_attn_implementation", "_can_set_attn_implementation", "_supports_default_dynamic_cache", "_kv_token_views"),
    *("_apply_gate", "_create_batch_processor", "_run_generation_loop", "_cached_continuous_batching_manager"),
    *("_bound_deployment", "_deployment_config", "_selector"),  # Ray's and asyncio's, in tests
}
"""Private names that are neither ours nor MAX's."""


@dataclass(frozen=True)
class PrivateName:
    """A name of MAX, as one row of a table has it."""

    name: str
    """Dotted: modules, then attributes."""
    parameters: tuple[str, ...]
    """Those that are given to it."""
    row: tuple[str, ...]
    """All names of its row."""
    users: tuple[Path, ...]
    """The files that the row names."""


@dataclass(frozen=True)
class Use:
    """A private name in a file of the checkout."""

    name: str
    """Dotted where imports tell it, else the attribute alone."""
    file: Path
    line: int


def private_names(title: str) -> list[PrivateName]:
    """The rows of one table, an entry for each name."""
    _, _, rest = PAGE.read_text().partition(f"\n### {title}\n")
    lines = [line for line in rest.partition("\n### ")[0].splitlines() if line.startswith("| ")]
    found = []
    for line in lines[1:]:
        names, users, _ = line.removeprefix("| ").removesuffix(" |").split(" | ")
        named = _NAME.findall(names)
        files = tuple((PAGE.parent / link).resolve() for link in _LINK.findall(users))
        for name, listed in named:
            given = tuple(filter(None, listed.replace(" ", "").split(",")))
            found.append(PrivateName(name, given, tuple(other for other, _ in named), files))
    return found


def titles() -> list[str]:
    """The names of the tables."""
    return re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)


def find(name: str) -> Any:
    """The object of a dotted name.

    Raises:
        ImportError, AttributeError: it is not there.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        try:
            value = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise  # the module is there, and something that it needs is not
            continue
        for attribute in parts[count:]:
            value = inspect.getattr_static(value, attribute) if inspect.isclass(value) else getattr(value, attribute)
        return value
    raise ImportError(f"no module {parts[0]}")


def takes(value: Any) -> str:
    """The signature of a callable, as text."""
    value = getattr(value, "__func__", value)  # of a classmethod
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):  # of a compiled module: its first line of documentation is the signature
        return str(value.__doc__).partition("\n")[0]


def parsed() -> dict[Path, ast.Module]:
    """The Python files of the checkout."""
    files = (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))
    return {file: ast.parse(file.read_text()) for file in files}


def uses(trees: dict[Path, ast.Module]) -> list[Use]:
    """Private names of others in Python files: what is imported, named in a string, or an attribute that no file makes.

    An attribute that begins with an underscore is ours where some file of ours defines it.
    """
    ours = OTHERS.union(*map(_made, trees.values()))
    found = []
    for file, tree in trees.items():
        modules = _imported(tree)
        for node in ast.walk(tree):
            line = getattr(node, "lineno", 0)
            if isinstance(node, ast.Import | ast.ImportFrom):
                found += [Use(name, file, line) for name in _names(node) if _of_max(name) and _is_private(name)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [Use(name, file, line) for name in _IN_TEXT.findall(node.value)]
            elif isinstance(node, ast.Attribute) and _is_private(node.attr):
                owner = modules.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
                if _of_max(owner) or node.attr not in ours:
                    found.append(Use(f"{owner}.{node.attr}".lstrip("."), file, line))
    return found


def variables(trees: dict[Path, ast.Module]) -> set[str]:
    """MAX's environment variables in strings of Python files."""
    constants = (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {name for node in constants if isinstance(node.value, str) for name in _VARIABLE.findall(node.value)}


def _made(tree: ast.Module) -> set[str]:
    """Names that a file defines: functions, classes, variables, attributes of its own objects."""
    made = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            made.add(node.attr)
    return made


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    base = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module and not node.level else ""
    return [base + alias.name for alias in node.names]


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return what the names of a file that imports make stand for, dotted."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name: name for alias, name in zip(node.names, _names(node), strict=True)}
    return bound


def _of_max(name: str) -> bool:
    return name.partition(".")[0] in ("max", "mojo")


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
