"""What the hosts of a job (its JAX processes) say to each other beside the steps. With one host nothing is sent.

All hosts must call these functions in the same order.
"""

import itertools
import json
from typing import Any

import jax

from fef import compat
from fef.config import UserError

DEADLINE_S = 120.0
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
      what: what they do before, for the error: "have made the folder".

    Raises:
      UserError: not all came within DEADLINE_S.
    """
    if jax.process_count() > 1:
        key = f"fef/{next(_numbers)}"
        _explain(lambda: compat.coordination_client().wait_at_barrier(key, int(DEADLINE_S * 1000)), f"all hosts {what}")


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
    text = _explain(lambda: client.blocking_key_value_get(key, int(DEADLINE_S * 1000)), f"host 0 gives {what}")
    return json.loads(text)


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


def _explain(wait: Any, what: str) -> Any:
    try:
        return wait()
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"host {jax.process_index()} waited in vain until {what}: {reason}") from error
