"""Loads the native library and tells XLA about its handlers, once, at first use."""

import ctypes
import functools
import os
import threading

from fef.config import UserError
from fef.native import build

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


@functools.cache
def _load() -> ctypes.CDLL:
    sanitize = _sanitize()
    remedy = "run `python -m fef.native.build" + (f" --sanitize={sanitize}`" if sanitize else "`")
    path = build.library_path(sanitize)
    built = build.built_hash(sanitize)
    if built is None:
        raise NativeError(f"{path} is not built; {remedy}")
    if built != build.source_hash(sanitize):
        raise NativeError(f"{path} is stale: it was built from other sources, flags or versions; {remedy}")
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded ({error}); remove it and {remedy}") from error
    _register(lib)
    return lib


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
