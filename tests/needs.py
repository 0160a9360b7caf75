"""What some tests need that not every machine has. No test file: tests import it."""

import os
import shutil

import pytest

NETLAB_TOOLS = ("ip", "tc", "unshare")

needs_lab = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, NETLAB_TOOLS)), reason="needs root, and the programs ip and tc"
)
