"""Named variants of one kind (routers, dispatchers), found by scanning their folder."""

import difflib
import importlib
import importlib.util
import pathlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """A table name -> class. Each variant registers itself in its own file with `@REGISTRY.register("name")`."""

    def __init__(self, kind: str):
        self.kind = kind
        self._table: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds a variant; a second variant of the same name is a ValueError."""

        def add(variant: T) -> T:
            if name in self._table:
                raise ValueError(f"{self.kind} {name!r} is registered twice: {self._table[name]} and {variant}")
            self._table[name] = variant
            return variant

        return add

    def get(self, name: str) -> Any:
        """Returns the variant, or raises ValueError with the nearest names."""
        if name not in self._table:
            raise ValueError(f"unknown {self.kind} {name!r}{nearest(name, self.names())}")
        return self._table[name]

    def names(self) -> list[str]:
        return sorted(self._table)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def nearest(name: str, names: list[str]) -> str:
    """The end of an error message: the closest of `names`, or all of them."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; nearest: {close[0]}" if close else f"; known: {', '.join(names)}"


def scan(package: str) -> None:
    """Imports every module of a package, so that each registers itself. Import errors are the caller's to see."""
    module = sys.modules[package]
    for info in pkgutil.iter_modules(module.__path__, package + "."):
        importlib.import_module(info.name)


def load_file(path: str) -> None:
    """Runs a user's .py file (a routing scheme or a dispatcher) once, so that it registers itself."""
    file = pathlib.Path(path).resolve()
    name = "fef_user_" + "_".join(file.with_suffix("").parts[1:])
    if name in sys.modules:
        return
    if not file.is_file():
        raise ValueError(f"{path}: no such file; give the path of a .py file that registers a variant")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: not a Python file; give the path of a .py file that registers a variant")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
