"""What some tests need that not every machine has. No test file: tests import it."""

import os
import shutil
import subprocess

import pytest

from fef.native import build

NETLAB_TOOLS = ("ip", "tc", "unshare")

needs_lab = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, NETLAB_TOOLS)), reason="needs root, and the programs ip and tc"
)

needs_ucx = pytest.mark.skipif(
    build.UCX not in build.parts(), reason="needs UCX with its headers: pip install libucx-cu12, or set FEF_UCX_DIR"
)


def _can_mount() -> bool:
    """Whether this process may mount file systems in a namespace of its own."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, timeout=10).returncode == 0


needs_mounts = pytest.mark.skipif(
    not _can_mount(), reason="needs root, and the right to mount in a namespace of its own"
)
