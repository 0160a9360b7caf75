"""Command lines of the programs in this folder: absl flags, and a Config overridden by `--config.a.b=value`.

A program is a `main(argv)` that calls `parse` (or `parse_flags`, when it has no Config), started by `run(main)`:
a mistake of the user ends in one line on stderr and exit status 2, and only bugs show a traceback.

How a value is read follows from the type of its field, never from its current value:

    int           2 (not 2.0, not 1e3)            float             0.1, 1e-3, 1 (not nan, not inf)
    int | None    the same, or None               bool              True, False, 1, 0; --config.x, --noconfig.x
    str           the text as it is, even None    tuple[int, ...]   (2,4) or 2,4 or (8,) or ()

The last of repeated flags wins. A word that belongs to no flag is refused: `--config.x False` would switch x on.
"""

import ast
import contextlib
import difflib
import itertools
import math
import os
import pathlib
import re
import runpy
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import flags
from ml_collections import config_flags

import fef.dispatch
import fef.routing
from fef.config import TYPES, Config, UserError, allowed, flatten, freeze, walk
from fef.pool.errors import PeerLostError
from fef.registry import Registry, load_file, scan
from fef.rendezvous import Job
from fef.startup import JOIN_TIMEOUT_S
from fef.validation import validate

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXIT_PEER_LOST = 75  # EX_TEMPFAIL of sysexits.h, as in fef/native/liveness.h: start the job again
Define = Callable[[flags.FlagValues], None]


def run(main: Callable[[list[str]], int | None]) -> None:
    """Runs a program and exits: with its status, with 2 on a UserError, with 130 when interrupted.

    When it fails as one of several hosts, it ends at once: at an orderly exit JAX would wait for the others, which wait
    for this one in a collective.
    """
    try:
        status = main(sys.argv)
    except UserError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:  # the reader of our output has gone, as with `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        lost = re.search(r"Gloo .*", str(error))  # XLA:CPU's connections
        if isinstance(error, PeerLostError):
            print(f"error: host {jax.process_index()}: {error}", file=sys.stderr)
            status = EXIT_PEER_LOST
        elif lost:
            print(f"error: host {jax.process_index()} has lost another host: {lost[0]}", file=sys.stderr)
            status = EXIT_PEER_LOST
        else:
            traceback.print_exc()
            status = 1
    if status and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def exit_on_sigterm() -> None:
    """From now on SIGTERM ends this program by way of all that is to be ended: its processes and temporary files."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def parse(
    argv: list[str], define: Define | None = None, *, doc: str = "", default: str = "configs/tiny.py"
) -> tuple[Config, flags.FlagValues]:
    """Reads the command line of a program that has a Config.

    Args:
      argv: the whole command line, with the program's name first.
      define: adds the program's own flags to a FlagValues.
      doc: the program's docstring, shown by --help.
      default: the config file when there is no --config.

    Returns:
      The validated, frozen Config and the program's flags; `config` among them is the path of the config file.

    Raises:
      UserError: a bad flag, key, value, config file or user module; one line.
      SystemExit: status 0, after --help, --list_routers or --list_dispatchers.
    """

    def define_all(values: flags.FlagValues) -> None:
        flags.DEFINE_string("config", default, "a .py file whose get_config() returns a Config", flag_values=values)
        flags.DEFINE_bool("list_routers", False, "list the routing schemes and exit", flag_values=values)
        flags.DEFINE_bool("list_dispatchers", False, "list the dispatchers and exit", flag_values=values)
        # Two keys of the Config come first, because the modules that they name add keys to it.
        flags.DEFINE_string("config.routing.module", "", "", flag_values=values)
        flags.DEFINE_string("config.dispatch.module", "", "", flag_values=values)
        if define:
            define(values)

    values, overrides = _parse_known(argv, define_all)
    routing_module, dispatch_module = values["config.routing.module"].value, values["config.dispatch.module"].value
    _load_modules([routing_module, dispatch_module])
    if values.help:
        _print_help(doc, values)
        _print_keys(Config())
        raise SystemExit(0)
    if values.list_routers or values.list_dispatchers:
        _print_variants(fef.routing.ROUTERS if values.list_routers else fef.dispatch.DISPATCHERS)
        raise SystemExit(0)
    config = override(load_config(values.config), overrides, list(values))
    config.routing.module = routing_module or config.routing.module
    config.dispatch.module = dispatch_module or config.dispatch.module
    validate(config)
    freeze(config)
    return config, values


def parse_flags(argv: list[str], define: Define, *, doc: str = "") -> flags.FlagValues:
    """Reads the command line of a program without a Config. Raises as `parse` does."""
    values, rest = _parse_known(argv, define)
    if values.help:
        _print_help(doc, values)
        raise SystemExit(0)
    _refuse(rest, list(values))
    return values


def words_first(argv: list[str], most: int | None = None) -> tuple[list[str], list[str]]:
    """The words that stand before the first flag, at most so many, and the command line without them."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), argv[1:]))[:most]
    return words, [argv[0], *argv[1 + len(words) :]]


def dispatcher_words(name: str) -> list[str]:
    """The flags of a dispatcher that is written as NAME or NAME:option=value:option=value.

    An option with a dot is a key of the whole configuration, as pool.fetch_ahead=False.
    """
    dispatcher, *options = name.split(":")
    keys = (text if "." in text.partition("=")[0] else f"dispatch.{dispatcher}.{text}" for text in options)
    return [f"--config.moe.dispatcher={dispatcher}", *(f"--config.{key}" for key in keys)]


def define_job(values: flags.FlagValues) -> None:
    """Adds the flags of a program that several hosts run together, each started by hand."""
    flags.DEFINE_string(
        "coordinator", None, "address:port of host 0; without it a launcher or a cluster says it", flag_values=values
    )
    flags.DEFINE_integer("num_processes", None, "how many hosts there are", flag_values=values, lower_bound=1)
    flags.DEFINE_integer("process_id", None, "number of this host, from 0", flag_values=values, lower_bound=0)
    flags.DEFINE_float(
        "join_timeout_s",
        JOIN_TIMEOUT_S,
        "longest wait for the other hosts, seconds",
        flag_values=values,
        lower_bound=1.0,
    )


def job(values: flags.FlagValues) -> Job | None:
    """What the flags of `define_job` say; None when they say nothing."""
    names = ("coordinator", "num_processes", "process_id")
    missing = [f"--{name}" for name in names if values[name].value is None]
    if len(missing) == len(names):
        return None
    if missing:
        raise UserError(f"--coordinator, --num_processes and --process_id go together; missing: {', '.join(missing)}")
    return Job(values.coordinator, values.num_processes, values.process_id)


def override(config: Any, overrides: list[str], flag_names: list[str] | None = None) -> Any:
    """Returns a copy of a tree of dataclasses made of `fef.config.knob`s, with ["--config.a.b=value", ...] applied.

    Types are settled here; ranges, and None where it is not allowed, by `fef.config.check_fields`.

    Raises:
      UserError: an unknown key or flag (with the nearest of the keys and of `flag_names`), a value of another type, or
        a word that belongs to no flag.
    """
    keys = [f"config.{key}" for key in flatten(config)]
    for word in overrides:
        match = re.match(r"--?(?:no)?(config\.[^=]*)", word)
        if match and match[1] not in keys:
            raise UserError(f"unknown key {match[1]}; nearest: {_nearest(match[1], keys)}")
    argv = ["", *overrides]
    values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dataclass("config", config, flag_values=values, sys_argv=argv)
        rest = values(argv, known_only=True)
    except (flags.Error, ValueError) as error:
        raise UserError(_one_line(error)) from None
    _refuse(rest[1:], keys + (flag_names or []))
    return values.config


def load_config(path: str) -> Config:
    """Calls `get_config()` of a config file, looked for from the current directory, then beside this package."""
    config = _get_config(path)
    modules = [module for module in (config.routing.module, config.dispatch.module) if module]
    _load_modules(modules)
    return _get_config(path) if modules else config  # again, now with the options that the modules have brought


# Reading of words.


def _parse_known(argv: list[str], define: Define) -> tuple[flags.FlagValues, list[str]]:
    """Parses the flags that `define` adds; returns them and the words that belong to none of them."""
    values = flags.FlagValues()
    flags.DEFINE_bool("help", False, "show this help and exit", short_name="h", flag_values=values)
    define(values)
    values.set_gnu_getopt(True)  # go on after a word that is no flag
    try:
        rest = values(argv, known_only=True)
    except (flags.Error, ValueError) as error:
        raise UserError(_one_line(error)) from None
    return values, rest[1:]


def _refuse(rest: list[str], names: list[str]) -> None:
    for word in rest:
        if re.match(r"--?\w", word):
            name = word.lstrip("-").split("=")[0]
            raise UserError(f"unknown flag --{name}; nearest: --{_nearest(name, names)}")
        raise UserError(f"{word!r} belongs to no flag; write --flag=value (and --flag=False, not --flag False)")


def _nearest(name: str, names: list[str]) -> str:
    return difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _read_int(text: str) -> int | None:
    return None if text == "None" else int(text)


def _read_float(text: str) -> float | None:
    if text == "None":
        return None
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _read_bool(text: str) -> bool:
    return bool(flags.BooleanParser().parse(text))


def _read_ints(text: str) -> tuple[int, ...]:
    value = ast.literal_eval(text)
    items = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if any(type(item) is not int for item in items):
        raise ValueError
    return items


class _Reader(flags.ArgumentParser):
    """Reads one type strictly; ml_collections asks it for every field of that type, optional or not."""

    def __init__(self, annotation: Any, read: Callable[[str], Any]):
        self.annotation = annotation
        self.read = read

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str):
            return argument  # the default, which is no text
        try:
            return self.read(argument)
        except (ValueError, SyntaxError):
            raise ValueError(f"must be {TYPES[self.annotation]}") from None


for _annotation, _read in ((int, _read_int), (float, _read_float), (bool, _read_bool), (tuple[int, ...], _read_ints)):
    config_flags.register_flag_parser_for_type(_annotation, _Reader(_annotation, _read))


# Users' files: config files, and modules that register routing schemes and dispatchers.


def _get_config(path: str) -> Config:
    file = _find(path)
    module = types.ModuleType("fef_config_file")
    module.__file__ = str(file)
    with _blame(file):
        exec(compile(file.read_bytes(), file, "exec"), module.__dict__)
        if not hasattr(module, "get_config"):
            raise UserError(f"{path}: has no function get_config(); it must return a fef.config.Config")
        config = module.get_config()
    if not isinstance(config, Config):
        raise UserError(f"{path}: get_config() returned {type(config).__name__}, not a fef.config.Config")
    return config


def from_file(path: pathlib.Path, function: str, cls: type) -> Any:
    """An instance of a dataclass with the fields, a dict, that a function of a file returns.

    Raises:
      UserError: no such function, or a field that is unknown or missing.
    """
    names = runpy.run_path(str(path))
    if function not in names:
        raise UserError(f"{path}: has no function {function}(); it must return a dict of the fields of {cls.__name__}")
    try:
        return cls(**names[function]())
    except TypeError as error:
        raise UserError(f"{path}: {function}(): {error}") from None


def _find(path: str) -> pathlib.Path:
    for folder in (pathlib.Path.cwd(), ROOT):
        if (folder / path).is_file():
            return (folder / path).resolve()
    known = ", ".join(sorted(f"configs/{file.name}" for file in ROOT.glob("configs/[!_]*.py")))
    raise UserError(f"--config={path}: no such file in {pathlib.Path.cwd()} or {ROOT}; there are {known}")


def _load_modules(paths: list[str | None]) -> None:
    scan("fef.routing")  # before the user's, so that a name taken twice is reported in the user's file
    scan("fef.dispatch")
    for path in filter(None, paths):
        file = pathlib.Path(path).resolve()
        if not file.is_file():
            raise UserError(f"{path}: no such file; give the path of a .py file that registers a variant")
        with _blame(file):
            load_file(path)


@contextlib.contextmanager
def _blame(file: pathlib.Path) -> Iterator[None]:
    """Turns an exception raised in a user's file into one line with file, line and error."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines = [error.lineno]
        where = f"{file}:{lines[-1]}" if lines else file
        raise UserError(f"{where}: {type(error).__name__}: {error}") from error


# What --help and the lists print.


def _print_help(doc: str, values: flags.FlagValues) -> None:
    print(doc.strip(), end="\n\nFlags\n")
    for flag in {values[name].name: values[name] for name in values if not name.startswith("config.")}.values():
        print(f"  --{flag.name}={flag.default}  {flag.help}")


def _print_keys(config: Config) -> None:
    print("\nConfiguration (when a run is resumed, [run] keys may change, [model] and [data] keys may not)")
    for key, field, value in walk(config):
        limits = f"; {allowed(field)}" if allowed(field) else ""
        print(f"  --config.{key}={value}  [{field.metadata['scope']}] {field.metadata['doc']}{limits}")


def _print_variants(registry: Registry) -> None:
    for name in registry:
        variant = registry.get(name)
        doc = variant.__doc__ or ""
        if not doc or doc.startswith(f"{variant.__name__}("):  # what @dataclass writes when there is none
            doc = sys.modules[variant.__module__].__doc__ or ""
        print(f"{name:20s} {doc.strip().partition(chr(10))[0]}")
