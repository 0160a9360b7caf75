"""Loads the native library and tells XLA about its handlers, once, at first use."""

import ctypes
import functools
import os
import threading

from fef.config import UserError
from fef.native import build, ucx_files

_ERROR_BYTES = 512
_lock = threading.Lock()  # functools.cache alone would let two threads load and register at the same time


class NativeError(UserError):
    """The native library cannot be used. The message names the file and the remedy."""


class _Registration(ctypes.Structure):
    """One entry of `fef_registrations` in fef/native/handlers.cc."""

    _fields_ = [("target", ctypes.c_char_p), ("handler", ctypes.c_void_p)]


def is_built() -> bool:
    """Whether there is a library; it may be stale or broken, which `library` says."""
    return build.built_hash(_sanitize()) is not None


def library() -> ctypes.CDLL:
    """Returns the library, with all its handlers registered for XLA's CPU platform.

    Raises:
      NativeError: the library is missing, was built from other sources, or cannot be loaded; the text says what to do.
    """
    with _lock:
        return _load()


def ucx_library() -> ctypes.CDLL:
    """Returns the library of one-sided reads through UCX, with UCX itself.

    Raises:
      NativeError: UCX or the library is missing, or cannot be loaded; the text says what to do.
    """
    with _lock:
        return _load_ucx()


def open_one_sided() -> int:
    """Opens UCX for one-sided reads of other hosts; returns what `fef_pool_open` takes over.

    Raises:
      NativeError: as `ucx_library`, or UCX cannot be opened, with its own reason.
    """
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    opened = ucx_library().fef_ucx_open(error, _ERROR_BYTES)
    if not opened:
        raise NativeError(f"FEF_TRANSPORT=rma: {error.value.decode()}; UCX_TLS={os.environ.get('UCX_TLS', 'all')}")
    return opened


@functools.cache
def _load() -> ctypes.CDLL:
    lib = _load_part("")
    _register(lib)
    return lib


@functools.cache
def _load_ucx() -> ctypes.CDLL:
    try:
        ucx_files.load()
        lib = _load_part(build.UCX)
    except (ucx_files.UcxError, build.BuildError) as error:
        raise NativeError(f"FEF_TRANSPORT=rma: {error}") from None
    lib.fef_ucx_version.restype = ctypes.c_char_p
    lib.fef_ucx_open.restype = ctypes.c_void_p
    lib.fef_ucx_close.argtypes = [ctypes.c_void_p]
    return lib


def _load_part(part: str) -> ctypes.CDLL:
    sanitize = _sanitize()
    remedy = "run `python -m fef.native.build" + (f" --sanitize={sanitize}`" if sanitize else "`")
    path = build.library_path(sanitize, part)
    built = build.built_hash(sanitize, part)
    if built is None:
        raise NativeError(f"{path} is not built; {remedy}")
    if built != build.source_hash(sanitize, part):
        raise NativeError(f"{path} is stale: it was built from other sources, flags or versions; {remedy}")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded ({error}); remove it and {remedy}") from error


def _register(lib: ctypes.CDLL) -> None:
    import jax.ffi

    jax.devices("cpu")  # typed state of a handler can be registered only once the backend exists
    table = ctypes.cast(ctypes.byref(_Registration.in_dll(lib, "fef_registrations")), ctypes.POINTER(_Registration))
    index = 0
    while table[index].target is not None:
        target, handler = table[index].target, table[index].handler
        jax.ffi.register_ffi_target(target.decode(), jax.ffi.pycapsule(handler), platform="cpu")
        index += 1


def _sanitize() -> str:
    return os.environ.get("FEF_SANITIZE", "")
