"""Where UCX lies, which RDMA reads and some benchmarks use: $FEF_UCX_DIR, else the system's, else the libucx wheel."""

import ctypes.util
import dataclasses
import importlib.util
import os
import pathlib
import re

SONAMES = ("libucs.so.0", "libucp.so.0")  # in the order of loading
HEADER = "ucp/api/ucp.h"
_SYSTEM_INCLUDES = ("/usr/include", "/usr/local/include")


class UcxError(RuntimeError):
    """UCX is not where it was said to be, or cannot be loaded."""


@dataclasses.dataclass(frozen=True)
class Ucx:
    """One installation.

    Attributes:
      origin: for messages.
      include: folder of the headers; None when it has none.
      lib: folder of the libraries; None when the system's loader knows it.
    """

    origin: str
    include: pathlib.Path | None
    lib: pathlib.Path | None

    @property
    def version(self) -> str:
        """Of the headers, such as "1.22"."""
        text = (self.include / "ucp/api/ucp_version.h").read_text() if self.include else ""
        numbers = re.search(r"UCP_VERSION\((\d+), (\d+)\)", text)
        return f"{numbers[1]}.{numbers[2]}" if numbers else "unknown"

    @property
    def link_flags(self) -> list[str]:
        """By the plain names of the libraries and without rpath, so that another UCX can take its place at run time."""
        folder = [f"-L{self.lib}", f"-Wl,-rpath-link,{self.lib}"] if self.lib else []
        return [*folder, *(f"-l:{name}" for name in reversed(SONAMES))]


def find() -> Ucx | None:
    """The UCX that is used, or None when there is none.

    Raises:
      UcxError: FEF_UCX_DIR holds no UCX; names the folder and what is missing.
    """
    chosen = os.environ.get("FEF_UCX_DIR")
    if chosen:
        folder = pathlib.Path(chosen)
        if not (folder / "lib" / SONAMES[-1]).exists():
            raise UcxError(f"FEF_UCX_DIR={chosen}: has no lib/{SONAMES[-1]}; give UCX's prefix, or unset it")
        return Ucx(f"FEF_UCX_DIR={chosen}", _with_header(folder / "include"), folder / "lib")
    wheel = importlib.util.find_spec("libucx")
    if ctypes.util.find_library("ucp"):
        include = next(filter(None, map(_with_header, map(pathlib.Path, _SYSTEM_INCLUDES))), None)
        return Ucx("the system's UCX", include, None)
    if wheel is None or not wheel.submodule_search_locations:
        return None
    folder = pathlib.Path(wheel.submodule_search_locations[0])
    return Ucx("the Python package libucx", _with_header(folder / "include"), folder / "lib")


def _with_header(folder: pathlib.Path) -> pathlib.Path | None:
    return folder if (folder / HEADER).exists() else None


def settings(deadline_s: float = 10.0) -> dict[str, str]:
    """What UCX reads from the environment when it is loaded; what the user has set there goes first.

    Args:
      deadline_s: after how long a silent connection is broken. UCX's own default is 19 s for a link that is down.
    """
    wanted = {
        "UCX_MEM_EVENTS": "n",  # memory is registered explicitly; its hooks would change mmap for the whole process
        "UCX_HANDLE_ERRORS": "none",  # old versions install signal handlers
        "UCX_TCP_TX_SEG_SIZE": "256K",
        "UCX_TCP_RX_SEG_SIZE": "512K",
        "UCX_TCP_USER_TIMEOUT": f"{deadline_s:g}s",
        "UCX_TCP_KEEPIDLE": "1s",
        "UCX_TCP_KEEPINTVL": "1s",
        "UCX_TCP_MAX_NUM_EPS": "4096",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def load() -> str:
    """Loads UCX's libraries into this process, so that libfef-ucx.so finds them by name; returns where they were.

    Raises:
      UcxError: there is none, or it cannot be loaded.
    """
    ucx = find()
    if ucx is None:
        raise UcxError("UCX is not found; pip install libucx-cu12, or set FEF_UCX_DIR to UCX's prefix")
    os.environ.update(settings())
    for name in SONAMES:
        try:
            ctypes.CDLL(str(ucx.lib / name) if ucx.lib else name, ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise UcxError(f"{ucx.origin}: {name} cannot be loaded ({error})") from None
    return ucx.origin
