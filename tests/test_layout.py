"""The rules of the code base that can be checked: who imports whom, what an import starts, sizes, docstrings, names."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from fef.dispatch import DISPATCHERS
from fef.registry import scan
from fef.routing import ROUTERS

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("fef", "experiments", "configs", "scripts", "tests")
MAX_LINES = 550  # 500 is the aim
MAX_FUNCTION_LINES = 80
SHARED = {
    "flags",
    "lab",
    "rows_file",
    "bounds",
    "sheet",
    "grid_sheets",
    "grid_tables",
    "cost_sheets",
    "step_memory",
    "figures",
    "results_page",
}  # by the programs of experiments
# Longer files, each with the reason why it is not cut.
LONG = {"fef/native/handlers.cc": "all that knows XLA's headers: one short handler for each operation, and their table"}


def files(folder, *suffixes):
    return sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes and path.is_file())


def imports(path):
    """Full names of the modules, and of the names in them, that a Python file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_fef_never_imports_programs():
    paths = files("fef", ".py")
    assert len(paths) > 40
    for path in paths:
        for name in imports(path):
            assert name.partition(".")[0] not in ("experiments", "configs", "tests"), f"{path} imports {name}"


def test_programs_do_not_import_each_other():
    """Each is read by itself; what they share runs nothing. Some show what others measured, or have it measured."""
    showing = ("readme_tables.py", "render.py", "reproduce.py")
    for path in files("experiments", ".py"):
        used = {name.split(".")[1] for name in imports(path) if name.startswith("experiments.")}
        assert path.name in showing or used <= SHARED, f"{path} imports {used}"


def test_what_programs_share_is_no_program():
    for name in SHARED:
        source = (ROOT / f"experiments/{name}.py").read_text()
        assert "__main__" not in source, f"experiments/{name}.py is a program"


def test_only_one_file_uses_what_is_private_to_jax():
    users = {
        path.relative_to(ROOT).as_posix()
        for folder in ("fef", "experiments", "configs")
        for path in files(folder, ".py")
        for name in imports(path)
        if name.startswith(("jax._src", "jaxlib._"))
    }
    assert users == {"fef/compat.py"}


IMPORT_ALL = """
import importlib, pkgutil, sys
import fef
for name in fef.__all__:
    getattr(fef, name)
for info in pkgutil.walk_packages(fef.__path__, "fef."):
    importlib.import_module(info.name)
from jax._src import xla_bridge
assert len([name for name in sys.modules if name.startswith("fef.")]) > 40
assert not xla_bridge.backends_are_initialized(), "a backend has been started"
assert "libfef" not in open("/proc/self/maps").read(), "the native library has been loaded"
"""


def test_importing_fef_starts_no_backend_and_loads_no_native_code():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_no_file_is_too_long():
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for folder in ("fef", "experiments", "configs", "scripts")
        for path in files(folder, ".py", ".cc", ".h", ".sh")
    }
    too_long = {path: lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert set(too_long) <= set(LONG), f"cut these by their ideas: {too_long}"


def test_no_function_is_too_long():
    for folder in ("fef", "experiments"):
        for path in files(folder, ".py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    lines = node.end_lineno - node.lineno + 1
                    assert lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {lines} lines"


def test_every_module_and_program_has_a_docstring():
    for folder in ("fef", "experiments", "configs", "scripts"):
        for path in files(folder, ".py"):
            source = path.read_text()
            assert not source.strip() or ast.get_docstring(ast.parse(source)), f"{path} has no docstring"


@pytest.mark.parametrize("package", ["fef.routing", "fef.dispatch"])
def test_every_variant_has_a_docstring(package):
    scan(package)
    registry = ROUTERS if package == "fef.routing" else DISPATCHERS
    for name in registry:
        doc = registry.get(name).__doc__ or ""
        assert len(doc.split()) > 3 and not doc.startswith(f"{registry.get(name).__name__}("), f"{name}: {doc!r}"


def test_every_config_says_what_it_is_for():
    for path in files("configs", ".py"):
        if path.name != "__init__.py":
            doc = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert doc.split("\n")[0].endswith("?") or "?" in doc.split("\n")[0], f"{path}: the question comes first"
            for word in ("Command:", "Hardware:", "Time:", "Expected:"):
                assert re.search(rf"^{word} +\S", doc, re.M), f"{path}: no line {word!r}"
            is_named = path.relative_to(ROOT).as_posix() in doc or path.name == "tiny.py"
            assert is_named, f"{path}: the command names another file"


def test_nothing_names_a_machine_or_is_left_to_do():
    # Written so that this file does not contain what it looks for.
    machine = re.compile(r"(?<![\w.~}])/(?:hom[e]|roo[t]|wor[k]|User[s]|mn[t])/")
    for path in [*(p for folder in FOLDERS for p in files(folder, ".py", ".cc", ".h", ".sh")), *ROOT.glob("*.*")]:
        if path.is_file():
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
                assert not machine.search(line), f"{path}:{number}: {line.strip()}"
                assert not re.search(r"\b(?:TOD[O]|FIXM[E]|XX[X])\b", line), f"{path}:{number}: {line.strip()}"
