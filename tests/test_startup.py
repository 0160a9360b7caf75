"""What happens before JAX starts, in processes of their own."""

import os
import subprocess
import sys

PRELUDE = """
import os, socket, sys

def refuse(*args):
    raise AssertionError("no network")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
"""


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_starts_no_backend_loads_no_native_code_and_needs_no_network():
    code = """
import fef
assert "jax" not in sys.modules
import importlib, pkgutil
for module in pkgutil.walk_packages(fef.__path__, "fef."):
    importlib.import_module(module.name)
import experiments.train
for name in fef.__all__:
    getattr(fef, name)
from jax._src import xla_bridge
assert not xla_bridge._backends
loaded = open("/proc/self/maps").read()
assert "libfef" not in loaded and "openblas32" not in loaded.lower().replace("_", ""), loaded
"""
    run(code)


def test_prepare_sets_devices_and_threads_and_leaves_what_is_set():
    code = """
from fef import startup
startup.prepare(num_devices=6)
import jax
names = "PJRT_NPROC", "TF_CPP_MIN_LOG_LEVEL", "XLA_FLAGS"
print(jax.device_count(), *(os.environ[name] for name in names), sep="\\n")
"""
    clean = {"PJRT_NPROC": "", "TF_CPP_MIN_LOG_LEVEL": "", "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    code = "import os\nfor k in ('PJRT_NPROC', 'TF_CPP_MIN_LOG_LEVEL'): os.environ[k] or os.environ.pop(k)\n" + code
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds"
    assert run(code, **clean) == ["6", "24", "2", f"{flag}=180"]
    own = {"PJRT_NPROC": "40", "TF_CPP_MIN_LOG_LEVEL": "0", "XLA_FLAGS": f"{flag}=7"}
    assert run(code, **clean | own) == ["6", "40", "0", f"{flag}=7"]


def test_prepare_after_the_backend_has_started_is_refused():
    code = """
import jax
jax.devices()
from fef import startup
try:
    startup.prepare(num_devices=6)
except RuntimeError as error:
    print("refused:", error)
"""
    assert run(code, JAX_PLATFORMS="cpu")[0] == "refused:"
