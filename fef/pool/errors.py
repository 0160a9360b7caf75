"""Typed errors of pool operations.

XLA hands a failed operation on as text, in which fef/native/handlers.cc puts the name of the type; `as_pool_error`
turns it back into the exception. The text names the operation, table, version, layer, expert and ranks.
"""

import re


class PoolError(RuntimeError):
    """A pool operation failed."""


class StaleVersionError(PoolError):
    """A block was asked for under a version that is no longer, or was never, held. Publish again."""


class PoolTimeoutError(PoolError):
    """A wait ran into config.pool.deadline_s; the text names what it waited for."""


class PoolExhaustedError(PoolError):
    """No slot is free, or the memory does not fit. Raise config.pool.slots or release a version."""


class PoolClosedError(PoolError):
    """The pool was closed while, or before, it was used."""


class PeerLostError(PoolError):
    """Another host is gone, or cannot be reached; the text names it, its ranks, and what was waited for."""


_BY_NATIVE_CODE = {  # Code in fef/native/status.h
    1: PoolError,
    2: StaleVersionError,
    3: PoolTimeoutError,
    4: PoolExhaustedError,
    5: PoolClosedError,
    6: PeerLostError,
}
_BY_NAME = {kind.__name__: kind for kind in _BY_NATIVE_CODE.values()}


def from_native(code: int, text: str) -> PoolError:
    """The typed form of what a C function of the native library returned."""
    return _BY_NATIVE_CODE[code](text)


def as_pool_error(error: BaseException) -> PoolError | None:
    """The typed form of an error raised by JAX, or None when no pool operation is behind it."""
    found = re.search(rf"\b({'|'.join(_BY_NAME)}): ([^\n]*)", str(error))
    return _BY_NAME[found[1]](found[2]) if found else None
