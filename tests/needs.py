"""What some tests need that not every machine has. No test file: tests import it."""

import os
import shutil
import subprocess

import browser
import pytest

# Where the tests marked `ucx` find UCX emulate RDMA, unless the user has chosen a network.
UCX_EMULATED = {} if "UCX_TLS" in os.environ else {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
NETLAB_TOOLS = ("ip", "tc", "unshare")

needs_chromium = pytest.mark.skipif(browser.find() is None, reason="needs Chromium: apt-get install chromium")
needs_lab = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, NETLAB_TOOLS)), reason="needs root, and the programs ip and tc"
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
