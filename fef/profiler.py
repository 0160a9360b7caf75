"""A trace of some training steps by JAX's profiler.

Only the first host traces: its own devices and Python threads. Evaluation or saving between the traced steps is in the
trace too, as is what runs in the background; each step is marked as "train" with its number.
"""

import os
from collections.abc import Callable
from typing import Any

import jax

from fef import hosts


class Profiler:
    """Traces the steps that it is asked for as `run` comes to them; `close` ends a trace that was broken off.

    Args:
      folder: where traces go, each into a folder of its own below plugins/profile.
      steps: () traces nothing, (step,) one step and (first, last) all from the first to the last, counted from 1 as in
        metrics.jsonl.
      done: steps that earlier parts of the run have done; they cannot be traced any more.
    """

    def __init__(self, folder: str | os.PathLike, steps: tuple[int, ...], done: int):
        self._folder, self._is_open = os.fspath(folder), False
        self._steps = range(max(steps[0], done + 1), steps[-1] + 1) if steps and hosts.is_main() else range(0)
        if steps and steps[-1] <= done:
            hosts.say(f"no trace: config.run.profile_steps={steps} are done, the run goes on at step {done}")

    def run(self, step: int, train_step: Callable[..., Any], state: Any, *inputs: Any) -> Any:
        """What `train_step(state, *inputs)` gives; step `step` of the run, with all its results if it is traced."""
        if step not in self._steps:
            return train_step(state, *inputs)
        if step == self._steps[0]:
            jax.block_until_ready((state, inputs))  # what is still computed belongs to the step before
            jax.profiler.start_trace(self._folder)
            self._is_open = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            results = jax.block_until_ready(train_step(state, *inputs))
        if step == self._steps[-1]:
            self.close()
            hosts.say(
                f"trace of steps {self._steps[0]} to {step}: {self._folder}; pip install xprof and "
                f"xprof --logdir={self._folder}, or open its .trace.json.gz in https://ui.perfetto.dev"
            )
        return results

    def close(self) -> None:
        """Ends and writes the trace that is open, if one is."""
        if self._is_open:
            self._is_open = False
            jax.profiler.stop_trace()
