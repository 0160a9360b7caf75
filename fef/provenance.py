"""Where a result comes from: the commit of the sources and the versions of what they ran with."""

import importlib.metadata
import pathlib
import platform
import subprocess

_PACKAGES = ("fef", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "scipy-openblas32")


_SOURCES = (":/", ":(top,exclude)results")


def commit() -> str | None:
    """The commit of the source tree this package runs from, with a + when it has changes; None outside of git.

    Results do not count as changes: a program that measures one table after the other makes them itself.
    """
    here = pathlib.Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout

    try:
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain", "--", *_SOURCES) else "")
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a result."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in _PACKAGES}
