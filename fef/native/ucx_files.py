"""Where UCX lies, which RDMA reads and some benchmarks use: $FEF_UCX_DIR, else the system's, else the libucx wheel."""

import ctypes.util
import dataclasses
import importlib.util
import os
import pathlib

from fef.config import UserError

SONAMES = ("libucs.so.0", "libucp.so.0")  # in the order of loading
HEADER = "ucp/api/ucp.h"
_SYSTEM_INCLUDES = ("/usr/include", "/usr/local/include")


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
    def link_flags(self) -> list[str]:
        """By the plain names of the libraries and without rpath, so that another UCX can take its place at run time."""
        folder = [f"-L{self.lib}", f"-Wl,-rpath-link,{self.lib}"] if self.lib else []
        return [*folder, *(f"-l:{name}" for name in reversed(SONAMES))]


def find() -> Ucx | None:
    """The UCX that is used, or None when there is none.

    Raises:
      UserError: FEF_UCX_DIR holds no UCX; names the folder and what is missing.
    """
    chosen = os.environ.get("FEF_UCX_DIR")
    if chosen:
        folder = pathlib.Path(chosen)
        if not (folder / "lib" / SONAMES[-1]).exists():
            raise UserError(f"FEF_UCX_DIR={chosen}: has no lib/{SONAMES[-1]}; give UCX's prefix, or unset it")
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
