"""C++ programs that stand beside the library: built when they are needed, and spoken to in lines."""

import hashlib
import os
import pathlib
import select
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType

from fef.config import UserError
from fef.native import build, ucx_files

BENCH = build.FOLDER / "bench"
# What a host of a pool is made of, without XLA and BLAS.
CORE = (
    "client.cc", "domain.cc", "domain_gradients.cc", "domain_hosts.cc", "domain_one_sided.cc", "domain_relay.cc",
    "domain_resident.cc", "domain_tokens.cc", "fabric.cc", "flight.cc", "host_cache.cc", "memory_segment.cc",
    "one_sided_reads.cc", "parallel.cc", "server.cc", "socket.cc",
)  # fmt: skip


def make(source: pathlib.Path, others: Sequence[pathlib.Path] = (), ucx: ucx_files.Ucx | None = None) -> pathlib.Path:
    """Builds a program beside the library, unless it is there already, and returns its path.

    Args:
      source: the file with `main`.
      others: the further sources.
      ucx: what it is linked with, if anything.

    Raises:
      fef.native.build.BuildError: no compiler, or it failed.
    """
    flags = [*build.compile_flags(), f"-I{build.FOLDER}"]
    if ucx is not None:
        flags += [f"-isystem{ucx.include}", *([f"-Wl,-rpath,{ucx.lib}"] if ucx.lib else [])]
    link_flags = ucx.link_flags if ucx is not None else []
    digest = hashlib.sha256(repr((flags, link_flags)).encode())
    for path in sorted({*others, source, *source.parent.glob("*.h"), *build.FOLDER.glob("*.h")}):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    program = build.FOLDER / "lib" / f"{source.stem}-{digest.hexdigest()[:16]}"
    if not program.exists():
        program.parent.mkdir(exist_ok=True)
        for old in program.parent.glob(f"{source.stem}-{'?' * 16}"):
            old.unlink()
        unfinished = program.with_suffix(f".{os.getpid()}")
        build.compile_files([*flags, str(source), *map(str, others), *link_flags], unfinished, source.name)
        os.replace(unfinished, program)
    return program


class Program:
    """A running program; from `with` to its end.

    Args:
      name: for messages.
      command: what runs.
      environment: in addition to this process's own.
    """

    def __init__(self, name: str, command: Sequence[str | pathlib.Path], environment: dict[str, str] | None = None):
        self.name = name
        self._process = subprocess.Popen(
            list(map(str, command)), env=os.environ | (environment or {}), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._text = b""

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def say(self, *words: object) -> None:
        """Gives it a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((" ".join(map(str, words)) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def hear(self, first: str, timeout_s: float = 60.0) -> list[str]:
        """The words of its next line behind the first one.

        Raises:
          UserError: it has ended, or says nothing in time, or something else; with its own words.
        """
        assert self._process.stdout is not None
        end = time.monotonic() + timeout_s
        while b"\n" not in self._text:
            if not select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                raise UserError(f"{self.name}: says nothing within {timeout_s:.0f} s, where {first!r} should come")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                self._fail()
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        words = line.decode().split()
        if words[:1] != [first]:
            raise UserError(f"{self.name}: says {line.decode()!r}, where {first!r} should come")
        return words[1:]

    def _fail(self) -> None:
        self._process.kill()
        error = self._process.communicate()[1].decode(errors="replace").strip()
        raise UserError(f"{self.name}: ended with status {self._process.returncode}: {error or 'without a word'}")
