"""Errors by their text: XLA hands on no more than that."""

import pytest

from fef.pool import errors

KINDS = {
    1: errors.PoolError,
    2: errors.StaleVersionError,
    3: errors.PoolTimeoutError,
    4: errors.PoolExhaustedError,
    5: errors.PoolClosedError,
}


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize(
    "frame", ["{}", "NOT_FOUND: {}", "INTERNAL: Error dispatching computation: {}\nand more lines"]
)
@pytest.mark.parametrize("raised", [RuntimeError, ValueError])
def test_as_pool_error(kind, frame, raised):
    error = errors.as_pool_error(raised(frame.format(f"{kind.__name__}: get: table t, version (1,2): rank 0")))
    assert type(error) is kind and str(error) == "get: table t, version (1,2): rank 0"


@pytest.mark.parametrize(
    "text", ["", "INTERNAL: something else", "INVALID_ARGUMENT: fef_grouped_matmul: segment", "MyPoolError: x"]
)
def test_errors_of_others(text):
    assert errors.as_pool_error(ValueError(text)) is None


@pytest.mark.parametrize(("code", "kind"), KINDS.items())
def test_from_native(code, kind):
    error = errors.from_native(code, "table t: no")
    assert type(error) is kind and isinstance(error, errors.PoolError) and str(error) == "table t: no"
