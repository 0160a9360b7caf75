"""What the hosts of a job (its JAX processes) say to each other beside the steps. With one host nothing is sent.

All hosts must call these functions in the same order.
"""

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import jax

from fef import compat
from fef.config import UserError

DEADLINE_S = 120.0
own_address: str | None = None  # this host's, on the way to the others; fef.startup learns it when it connects
_numbers = itertools.count()


def is_main() -> bool:
    """Whether this is host 0, which writes the files and speaks to the user."""
    return jax.process_index() == 0


def say(line: str) -> None:
    """Prints a line, once for all hosts."""
    if is_main():
        print(line)


def barrier(what: str) -> None:
    """Waits until all hosts are here.

    Args:
      what: what is then true of them, for the error: "have read the text".

    Raises:
      UserError: not all came within DEADLINE_S; names those that are missing.
    """
    if jax.process_count() > 1:
        key = f"fef/{next(_numbers)}"
        _wait(f"all hosts {what}", lambda deadline_ms: compat.coordination_client().wait_at_barrier(key, deadline_ms))


def from_main(what: str, value: Any) -> Any:
    """Host 0's value (anything JSON can hold) on every host.

    Args:
      what: the value's name, for the error.

    Raises:
      UserError: host 0 did not give it within DEADLINE_S.
    """
    if jax.process_count() == 1:
        return value
    client, key = compat.coordination_client(), f"fef/{next(_numbers)}"
    if is_main():
        client.key_value_set(key, json.dumps(value))
        return value
    return json.loads(
        _wait(f"host 0 gives {what}", lambda deadline_ms: client.blocking_key_value_get(key, deadline_ms))
    )


def gather(what: str, value: Any) -> list[Any]:
    """Every host's value (anything JSON can hold), in the order of the hosts, on every host.

    Args:
      what: the value's name, for the error.

    Raises:
      UserError: a host did not give it within DEADLINE_S.
    """
    if jax.process_count() == 1:
        return [value]
    client, number = compat.coordination_client(), next(_numbers)
    client.key_value_set(f"fef/{number}/{jax.process_index()}", json.dumps(value))

    def value_of(host: int) -> Any:
        key = f"fef/{number}/{host}"
        return _wait(f"host {host} gives {what}", lambda deadline_ms: client.blocking_key_value_get(key, deadline_ms))

    values = [json.loads(value_of(host)) for host in range(jax.process_count())]
    barrier(f"have {what} of all")  # a host that ends because of what it has read may hold what the others read
    return values


def check_same(values: dict[str, Any]) -> None:
    """Compares named values (anything JSON can hold) with those of host 0.

    Raises:
      UserError: one differs; names it, both hosts and both values.
    """
    if jax.process_count() == 1:
        return
    ours = json.loads(json.dumps(values))
    for name, value in from_main("what must be the same on all hosts", ours).items():
        if ours[name] != value:
            raise UserError(
                f"{name}: host {jax.process_index()} has {ours[name]!r}, host 0 has {value!r}; give all hosts the same"
            )


def _wait(what: str, wait: Callable[[int], Any]) -> Any:
    try:
        return wait(int(DEADLINE_S * 1000))
    except jax.errors.JaxRuntimeError as error:
        missing = re.search(r"timed out task names:([\d\s]+)", str(error))
        reason = f"missing: host {', '.join(missing[1].split())}" if missing else str(error).partition("\n")[0]
        raise UserError(
            f"host {jax.process_index()} waited in vain, at most {DEADLINE_S:g} s, until {what}; {reason}"
        ) from error
