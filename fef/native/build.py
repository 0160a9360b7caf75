"""Compiles fef's native code: `python -m fef.native.build [--sanitize=address|thread]`.

Every .cc file of this folder goes into lib/libfef.so, linked against the OpenBLAS of the scipy-openblas32 package.
Those of ucx/ go into lib/libfef-ucx.so, which FEF_TRANSPORT=rma needs, when UCX's headers are found (ucx_files.py says
where); libfef.so loads without it. A library carries a hash of all that it was made from; when that is still the same,
nothing is done.

With --sanitize the result is lib/libfef-<sanitizer>.so, which FEF_SANITIZE=<sanitizer> loads in place of the plain one:

    ASAN_OPTIONS=detect_leaks=0 FEF_SANITIZE=address \\
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" python -m pytest tests/ops

Under `thread`, XLA's own pool, which is not instrumented, is reported too; tests/native checks the core without XLA.
"""

import argparse
import concurrent.futures
import fcntl
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from fef.native import ucx_files

FOLDER = pathlib.Path(__file__).parent
SANITIZERS = ("address", "thread")
COMPILERS = ("g++", "clang++", "c++")
COMMAND_TIMEOUT_S = 600
UCX = "ucx"  # the part that is a library of its own
_UCX_USES = ("socket.cc",)  # of libfef.so's files


class BuildError(RuntimeError):
    """Why the native code could not be built, in one line (or the compiler's own words)."""


def library_path(sanitize: str = "", part: str = "") -> pathlib.Path:
    """Where the library lies, built or not."""
    return FOLDER / "lib" / ("-".join(filter(None, ("libfef", part, sanitize))) + ".so")


def source_hash(sanitize: str = "", part: str = "") -> str:
    """Hash of the sources, the compiler flags and the versions of what is compiled in or linked.

    That of UCX is not in it: a library serves with whichever is found when it is loaded.
    """
    digest = hashlib.sha256(repr(compile_flags(sanitize)).encode())
    for package in () if part else ("jaxlib", "scipy-openblas32"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise BuildError(f"the Python package {package} is missing; install fef with its dependencies") from None
        digest.update(f"{package}=={version}\n".encode())
    for path in sorted([*_sources(part), *FOLDER.glob("*.h"), *(FOLDER / part).glob("*.h")]):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def built_hash(sanitize: str = "", part: str = "") -> str | None:
    """The hash inside of the built library, or None when there is no library."""
    try:
        content = library_path(sanitize, part).read_bytes()
    except FileNotFoundError:
        return None
    match = re.search(rb"fef_source_hash=([0-9a-f]{64})", content)
    return match.group(1).decode() if match else ""


def find_compiler() -> str:
    """$CXX (may hold flags) if set, else the first of g++, clang++, c++ on the PATH."""
    chosen = os.environ.get("CXX")
    if chosen:
        if not shutil.which(shlex.split(chosen)[0]):
            raise BuildError(f"the compiler CXX={chosen!r} is not on the PATH; unset CXX or install it")
        return chosen
    for name in COMPILERS:
        if shutil.which(name):
            return name
    raise BuildError(
        f"no C++ compiler found (tried {', '.join(COMPILERS)}); on Debian or Ubuntu: apt-get install g++, or set CXX"
    )


def compile_flags(sanitize: str = "") -> list[str]:
    flags = "-std=c++17 -fPIC -pthread -fvisibility=hidden -Wall -Wextra -Werror".split()
    # Without the last one, compilers do not turn a loop with a clamp into vector code.
    flags += ["-fopenmp-simd", "-fno-trapping-math"]
    if _has_avx2():
        flags += ["-mavx2", "-mfma"]
    if sanitize:
        return [*flags, "-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitize}"]
    return [*flags, "-O3"]


def include_flags(part: str = "") -> list[str]:
    """Folders of other people's headers; as system headers they are exempt from our warnings."""
    if part == UCX:
        return [f"-I{FOLDER}", f"-isystem{_ucx_headers()}"]
    import jax.ffi
    import scipy_openblas32

    return [f"-isystem{folder}" for folder in (jax.ffi.include_dir(), scipy_openblas32.get_include_dir())]


def link_flags(part: str = "") -> list[str]:
    if part == UCX:
        ucx = ucx_files.find()
        return ucx.link_flags if ucx is not None else []
    import scipy_openblas32

    folder = scipy_openblas32.get_lib_dir()
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", f"-l{scipy_openblas32.get_library()}"]


def parts() -> list[str]:
    """The libraries that can be built here: libfef.so, "", and "ucx" where UCX's headers are."""
    ucx = ucx_files.find() if (FOLDER / UCX).is_dir() else None
    return ["", UCX] if ucx is not None and ucx.include is not None else [""]


def build(sanitize: str = "", part: str = "") -> bool:
    """Makes a library current. Returns whether anything had to be done; raises BuildError."""
    if sanitize and sanitize not in SANITIZERS:
        raise BuildError(f"--sanitize={sanitize}: choose one of {', '.join(SANITIZERS)}")
    wanted = source_hash(sanitize, part)
    if built_hash(sanitize, part) == wanted:
        return False
    library = library_path(sanitize, part)
    library.parent.mkdir(exist_ok=True)
    with open(library.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes that find it stale, one compiles
        if built_hash(sanitize, part) == wanted:
            return False
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            result = _compile_and_link(pathlib.Path(scratch), wanted, sanitize, part)
            os.replace(result, library)  # processes that run with the old file keep it
    return True


def _ucx_headers() -> pathlib.Path:
    ucx = ucx_files.find()
    if ucx is None or ucx.include is None:
        raise BuildError("UCX's headers are not found; pip install libucx-cu12, or set FEF_UCX_DIR to UCX's prefix")
    return ucx.include


def _sources(part: str) -> list[pathlib.Path]:
    return sorted([*(FOLDER / part).glob("*.cc"), *(FOLDER / name for name in (_UCX_USES if part == UCX else ()))])


def _compile_and_link(scratch: pathlib.Path, wanted: str, sanitize: str, part: str) -> pathlib.Path:
    compiler = shlex.split(find_compiler())
    flags = [*compile_flags(sanitize), *include_flags(part), f'-DFEF_SOURCE_HASH="{wanted}"']

    def compile_one(source: pathlib.Path) -> str:
        target = scratch / f"{source.stem}.o"
        _run([*compiler, *flags, "-c", str(source), "-o", str(target)], source.name)
        return str(target)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, _sources(part)))
    result = scratch / library_path(sanitize, part).name
    command = [*compiler, *compile_flags(sanitize), "-shared", *objects, *link_flags(part), "-o", str(result)]
    _run(command, result.name)
    return result


def compile_files(words: Sequence[str], target: pathlib.Path, what: str) -> None:
    """Runs the compiler with these words into `target`; raises BuildError."""
    _run([*shlex.split(find_compiler()), *words, "-o", str(target)], what)


def _run(command: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{what}: {command[0]} did not end within {COMMAND_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise BuildError(f"{what}: {command[0]} failed with exit code {done.returncode}\n{done.stderr.strip()}")


def _has_avx2() -> bool:
    """Whether this CPU has AVX2 and FMA, as every x86 server since about 2015. OpenBLAS finds out by itself."""
    if platform.machine() != "x86_64":
        return False
    try:
        cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    match = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return match is not None and {"avx2", "fma"} <= set(match.group(1).split())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fef.native.build", description="Builds fef's native library.")
    parser.add_argument("--sanitize", choices=SANITIZERS, default="", help="build with this sanitizer, unoptimised")
    sanitize = parser.parse_args(argv).sanitize
    try:
        for part in parts():
            is_new = build(sanitize, part)
            print(f"{library_path(sanitize, part)}: {'built' if is_new else 'already current'}")
    except (BuildError, ucx_files.UcxError) as error:
        print(f"fef.native.build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
