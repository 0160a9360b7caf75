"""Compiles pool_test.cc with the pool's core, without XLA, and runs it under the thread sanitizer."""

import concurrent.futures
import pathlib
import shlex
import subprocess

from fef.native import build

SOURCES = (
    "await.cc", "client.cc", "domain.cc", "domain_gradients.cc", "domain_hosts.cc", "fabric.cc", "memory_segment.cc",
    "parallel.cc", "pool.cc", "server.cc", "socket.cc",
)  # fmt: skip
TEST = pathlib.Path(__file__).parents[1] / "native" / "pool_test.cc"


def test_domain(tmp_path):
    compiler = [*shlex.split(build.find_compiler()), *build.compile_flags("thread"), "-O0", f"-I{build.FOLDER}"]

    def compile_one(source):
        target = tmp_path / f"{source.stem}.o"
        subprocess.run([*compiler, "-c", source, "-o", target], check=True, timeout=300)
        return target

    with concurrent.futures.ThreadPoolExecutor() as executor:
        objects = list(executor.map(compile_one, [TEST, *(build.FOLDER / name for name in SOURCES)]))
    program = tmp_path / "pool_test"
    subprocess.run([*compiler, *objects, "-o", program], check=True, timeout=300)
    done = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "all passed\n"), done.stdout
