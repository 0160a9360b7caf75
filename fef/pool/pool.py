"""The pool: its lifetime and its tables."""

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fef import hosts
from fef.config import ConfigError, PoolConfig
from fef.pool import errors, native, neighbours
from fef.pool.memory import segment_folder
from fef.pool.table import ExpertTable

_ERROR_BYTES = 512
_GRACE_S = 5.0
_NOTICE_S = 2.0
_open_pools: list["Pool"] = []


class Pool:
    """The members' segments as one address space, for the life of a `with` block.

        with fef.Pool(mesh) as pool:
            ...

    Inside of the block, layers built with the `pooled` dispatcher find the pool by themselves. Errors of pool
    operations leave the block as `fef.PoolError` subclasses. At its end programs that publish and still run are waited
    for, what is pending after config.pool.deadline_s fails, and the memory is freed.

    Args:
      mesh: the device mesh (`fef.make_mesh`); every device is a member with a segment of its own.
      config: slots, stages, deadline, transport, relay, memory.

    Attributes:
      transport: how other hosts are reached: local, mmap, tcp, rma, or mmap+tcp.
      host_GR: the host of each member, by data-parallel group and rank.
      leaf_of_host: the number of each host's leaf; [] where hosts do not know theirs.
      relay: whether what crosses from leaf to leaf does so once for all hosts of a leaf.

    Raises:
      ConfigError: a transport or relay that cannot be, or a folder that cannot hold the blocks.
      fef.pool.native.NativeError: the native library is not built; says what to do.
    """

    def __init__(self, mesh: Mesh, config: PoolConfig | None = None):
        self.mesh = mesh
        self.config = config or PoolConfig()
        self._folder = segment_folder(self.config.memory)
        self._library = native.library()
        self._refused = 0
        self._library.fef_pool_refused.restype = ctypes.c_int64
        self._tables: dict[str, int] = {}
        transport = neighbours.chosen_transport(self.config)
        self.incarnation: int = self._library.fef_pool_next_incarnation()
        self.host_GR = np.array([[device.process_index for device in row] for row in mesh.devices], np.int32)
        self.leaf_of_host: list[int] = []
        self.relay = False
        if jax.process_count() == 1:
            if self.config.relay == "on":
                raise ConfigError("pool.relay", "on", "relays between hosts, and the job is one process; use auto")
            self.transport = "local"
            self._open(num_hosts=1, token="")
        else:
            self.transport = self._meet(transport)
        atexit.register(self.close)  # JAX waits for its programs at exit: none of them may wait for the pool

    def _open(self, num_hosts: int, token: str, one_sided: int | None = None) -> None:
        groups, members = self.host_GR.shape
        ints = ctypes.POINTER(ctypes.c_int32)
        leaf_of_host = np.array(self.leaf_of_host, np.int32)
        self._library.fef_pool_open(
            groups, ctypes.c_double(self.config.deadline_s), ctypes.c_int64(_chaos_seed()), self.incarnation,
            jax.process_index(), num_hosts, token.encode(),
            self.host_GR.ctypes.data_as(ints), members, leaf_of_host.ctypes.data_as(ints) if self.relay else None,
            ctypes.c_int64(self.config.window_bytes), ctypes.c_int64(self.config.total_window_bytes),
            self._folder.encode(), ctypes.c_void_p(one_sided),
        )  # fmt: skip

    def _meet(self, transport: str) -> str:
        """Opens this host's part of the pool and connects it to the others'; returns how those are reached."""
        me = jax.process_index()
        records = hosts.gather(
            "its introduction to the pool", neighbours.introduction(self.incarnation, transport, self.config)
        )
        neighbours.check(records)
        is_mapped = neighbours.mapped_hosts(records, me, transport)
        self.leaf_of_host = neighbours.leaf_numbers(records)
        self.relay = neighbours.is_relayed(records, transport)
        address = neighbours.own_address()
        self.incarnation = max(record["incarnation"] for record in records)
        self._open(len(records), records[0]["token"], native.open_one_sided() if transport == "rma" else None)
        port, name = ctypes.c_int32(), ctypes.create_string_buffer(_ERROR_BYTES)
        self._call("fef_pool_listen", address.encode(), ctypes.byref(port), name, _ERROR_BYTES)
        own = {"address": address, "port": port.value, "unix_name": name.value.decode()}
        ends = hosts.gather("the address of its pool", own)
        texts, numbers = ctypes.c_char_p * len(ends), ctypes.c_int32 * len(ends)
        self._call(
            "fef_pool_connect",
            texts(*(end["address"].encode() for end in ends)),
            numbers(*(end["port"] for end in ends)),
            texts(*(end["unix_name"].encode() for end in ends)),
            numbers(*is_mapped),
            len(ends),
        )
        remote = "rma" if transport == "rma" else "tcp"
        return "+".join(sorted({"mmap" if mapped else remote for host, mapped in enumerate(is_mapped) if host != me}))

    def _call(self, name: str, *args: Any) -> None:
        """Calls a function of the native library that can fail."""
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        code = getattr(self._library, name)(ctypes.c_int32(self.incarnation), *args, error, _ERROR_BYTES)
        if code:
            raise errors.from_native(code, error.value.decode())

    @property
    def refused(self) -> int:
        """Reads and connections that this host has refused, until now or until the pool was closed.

        Reads of what is not, or is no longer, there: over TCP the home refuses, otherwise the reader itself.
        """
        count = self._library.fef_pool_refused(self.incarnation)
        return self._refused if count < 0 else count

    def __enter__(self) -> "Pool":
        _open_pools.append(self)
        return self

    def __exit__(self, exc_type: Any, error: BaseException | None, traceback: Any) -> None:
        _open_pools.remove(self)
        self._library.fef_pool_disarm(self.incarnation)
        if error is None:
            hosts.barrier("have done with the pool")  # nobody goes while another still reads from it
        typed = None if error is None else errors.as_pool_error(error) or self._peer_lost(error)
        self.close(grace_s=_GRACE_S if isinstance(typed, errors.PeerLostError) else self.config.deadline_s)
        if typed is not None:
            raise typed from error

    def _peer_lost(self, error: BaseException) -> errors.PeerLostError | None:
        """What a collective's failure means, when it means that a host has died."""
        if "Gloo" not in str(error):
            return None
        text, end = ctypes.create_string_buffer(_ERROR_BYTES), time.monotonic() + _NOTICE_S
        while not text.value and time.monotonic() < end:  # two connections break; this one may be the second
            time.sleep(0.01)
            self._library.fef_pool_dead(self.incarnation, text, _ERROR_BYTES)
        return errors.PeerLostError(f"in a collective: {text.value.decode()}") if text.value else None

    def close(self, grace_s: float = _GRACE_S) -> None:
        """Fails what is pending and frees the memory; closing twice is allowed.

        Args:
          grace_s: how long to wait before for programs that publish and still run, seconds. A program that is cut off
            may leave some of its devices in a collective, waiting for the others.
        """
        cut_off = threading.Timer(grace_s, self._library.fef_pool_close, [self.incarnation])
        cut_off.daemon = True
        try:
            with contextlib.suppress(RuntimeError):  # from Python 3.12 on, no thread starts at exit
                cut_off.start()
                _let_programs_end()
        finally:
            cut_off.cancel()
            self._refused = self.refused
            self._library.fef_pool_close(self.incarnation)
            atexit.unregister(self.close)

    def table(
        self,
        name: str,
        num_layers: int,
        experts: ExpertTable,
        shapes: Sequence[tuple],
        dtype: Any,
        own_elems: int | None = None,
    ) -> "np.ndarray":
        """Makes room for the blocks of some layers.

        Args:
          name: for messages; the same name, layers, experts and shapes give the same table.
          num_layers: layers that are published together.
          experts: homes and places of the experts.
          shapes: the matrices of one block, e.g. ((D, F), (D, F), (F, D)).
          dtype: how a block is stored, float32 or bfloat16.
          own_elems: of a resident table, whose contents stay from version to version and are changed block by block:
            float32 numbers that the home keeps beside each block. None: a table that each program publishes anew.

        Returns:
          handle (2,) int32 for `fef.ops.publish`: the table's number and the pool's incarnation.

        Raises:
          PoolExhaustedError: the memory does not fit; names the bytes asked for and what is free.
          PoolClosedError: after `close`.
          ValueError: the experts are not laid out for this pool's members.
        """
        if experts.num_members != self.mesh.shape["expert"]:
            raise ValueError(
                f"table {name}: its experts have {experts.num_members} members as homes, "
                f"the pool's mesh has {self.mesh.shape['expert']}; make the ExpertTable for this mesh"
            )
        elems = sum(int(np.prod(shape)) for shape in shapes)
        key = f"{name}:{num_layers}x{experts.num_experts}x{elems}x{jnp.dtype(dtype).name}"
        if own_elems is not None:
            key += f"+{own_elems}"
        if key not in self._tables:
            self._tables[key] = self._add_table(name, num_layers, experts, elems, jnp.dtype(dtype).itemsize, own_elems)
        return np.array([self._tables[key], self.incarnation], np.int32)

    def _add_table(
        self,
        name: str,
        num_layers: int,
        experts: ExpertTable,
        block_elems: int,
        elem_bytes: int,
        own_elems: int | None,
    ) -> int:
        ints = ctypes.POINTER(ctypes.c_int32)
        number = ctypes.c_int32()
        home_E, local_E = experts.home_E, experts.local_E
        self._call(
            "fef_pool_add_table", name.encode(), num_layers, experts.num_experts, experts.num_members,
            home_E.ctypes.data_as(ints), local_E.ctypes.data_as(ints), experts.per_member,
            ctypes.c_int64(block_elems), elem_bytes, self.config.slots, self.config.stages,
            ctypes.c_int64(self.config.cache_bytes), int(self.config.fetch_ahead),
            int(own_elems is not None), ctypes.c_int64(own_elems or 0), ctypes.byref(number),
        )  # fmt: skip
        return number.value


def _let_programs_end() -> None:
    """Waits for programs with side effects, which all that publish have."""
    try:
        jax.effects_barrier()
    except Exception:
        # Whoever uses the program's result is told. JAX would tell once more, in a traceback at exit, unless the last
        # program with a side effect on each device is one that succeeded.
        for device in jax.local_devices():
            with contextlib.suppress(Exception), jax.default_device(device):
                jax.jit(lambda: jax.debug.callback(lambda: None))()


def current() -> Pool:
    """The innermost open pool.

    Raises:
      PoolClosedError: outside of a `with fef.Pool(mesh)` block.
    """
    if not _open_pools:
        raise errors.PoolClosedError(
            "the pooled dispatcher needs an open pool: run this inside `with fef.Pool(mesh) as pool:`"
        )
    return _open_pools[-1]


def _chaos_seed() -> int:
    """FEF_CHAOS, the seed of random delays in every operation; -1 for none."""
    text = os.environ.get("FEF_CHAOS", "")
    if text and not text.isdecimal():
        raise ValueError(f"FEF_CHAOS={text!r}: give a seed, a whole number from 0, or unset it")
    return int(text or -1)
