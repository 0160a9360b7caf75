"""Compiles the tests of the pool's core, without XLA, and runs them under the thread sanitizer."""

import concurrent.futures
import pathlib
import shlex
import subprocess

from fef.native import build, programs

SOURCES = (*programs.CORE, "liveness.cc", "pool.cc", "task.cc")
TESTS = ("pool_test", "resident_test", "hosts_test", "relay_test", "kill_test")
FOLDER = pathlib.Path(__file__).parents[1] / "native"


def test_domain(tmp_path):
    compiler = [*shlex.split(build.find_compiler()), *build.compile_flags("thread"), "-O0", f"-I{build.FOLDER}"]

    def compile_one(source):
        target = tmp_path / f"{source.stem}.o"
        subprocess.run([*compiler, "-c", source, "-o", target], check=True, timeout=300)
        return target

    sources = [*(FOLDER / f"{name}.cc" for name in TESTS), *(build.FOLDER / name for name in SOURCES)]
    with concurrent.futures.ThreadPoolExecutor() as executor:
        objects = dict(zip((source.stem for source in sources), executor.map(compile_one, sources), strict=True))
    core = [objects[pathlib.Path(name).stem] for name in SOURCES]
    for name in TESTS:
        program = tmp_path / name
        subprocess.run([*compiler, objects[name], *core, "-o", program], check=True, timeout=300)
        done = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
        assert (done.returncode, done.stdout) == (0, "all passed\n"), done.stdout
