"""Process groups whose connections are cut and made anew: torch can abort a group, and has no way to go on with it.

Note [Backends in place]: a `ProcessGroup` (torch/csrc/distributed/c10d/ProcessGroup.hpp) finds a backend for the device
of a tensor in a table, and everybody who communicates, FSDP2, DDP's reducer in C++, DTensor's meshes, the user, holds
the group and not the backend. `setBackend` writes into that table; only for a type of backend that it knows already
does it take the old one again. So another backend is registered under a number that no type has, and all who hold the
group go on with it. The old one stays in a second table until the group is destroyed, with its threads and without
connections. Where a later torch refuses such a number, `_replace` raises, and the guard tells that no step is repeated.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

_UNUSED_TAG = 1 << 27
"""No collective of torch or memfit has it."""
_FIRST_NUMBER, _LAST_NUMBER = 100, 255
"""Of types of backends, one byte in C++; torch's own end below 10."""
_STACK_BYTES = 512 << 10
"""Of a thread that moves and adds buffers; 8 MiB are usual, which count where addresses are limited (RLIMIT_AS)."""
_PTHREAD_ATTR_BYTES = 64
"""More than glibc's pthread_attr_t has on any machine that torch runs on (56)."""
_IN_VAIN = timedelta(milliseconds=1)
_numbers: dict[str, int] = {}
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[str | int | None, ...]]] = WeakKeyDictionary()
"""By the group of all ranks: how many groups of some ranks were made."""
_aborted: dict[tuple[str, int], Any] = {}
"""By the name of a group and its refusing backend: the backend whose place that has taken."""
_Gloo: Any = getattr(c10d, "ProcessGroupGloo", None)
_Nccl: Any = getattr(c10d, "ProcessGroupNCCL", None)


def own_groups() -> list[dist.ProcessGroup]:
    """Return all groups that this rank is in, in the order in which they were made, which ranks have in common.

    `_world.pg_map` (torch/distributed/distributed_c10d.py).
    """
    return list(dist.distributed_c10d._world.pg_map)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long ranks of a group wait for each other; a group made beside it would take torch's half hour."""
    return next((backend.options._timeout for backend in _backends(group) if hasattr(backend, "options")), None)


def group_of(
    ranks: Sequence[int], *, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Make a group of some ranks, called by these only and in one order; by default with the world's backend.

    `new_group(use_local_synchronization=True)` names a group by its ranks and by the number of groups that the rank is
    in (`_hash_ranks_to_str`): ranks that do not have it in common look for each other under different names, for half
    an hour. So the name is our own; the rest is as in `_new_group_with_tag` (torch/distributed/distributed_c10d.py).
    """
    c10d_module: Any = dist.distributed_c10d
    world = c10d_module._world
    whole = c10d_module._get_default_group()
    made = _made.setdefault(whole, Counter())
    key = (backend, *ranks)
    name = f"memfit/{backend}/{'_'.join(map(str, ranks))}/{made[key]}"
    made[key] += 1
    world_backend, store = world.pg_map[whole]
    group, _ = c10d_module._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend or world_backend),
        store,
        name,
        timeout=timeout or timeout_of(whole),
        device_id=whole.bound_device_id,
    )
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    assert isinstance(group, dist.ProcessGroup)
    return group


def unsupported_backend(group: dist.ProcessGroup) -> str | None:
    """Name a backend of a group that cannot be cut or made anew: one that is neither Gloo nor NCCL, or is wrapped."""
    for backend in _backends(group):
        if not _is_gloo(backend) and not _is_nccl(backend):
            return str(backend.name())
    return None


def waits_on_device(group: dist.ProcessGroup) -> bool:
    """Return whether a rank may wait for this group inside a kernel, where no closed connection ends it."""
    return any(_is_nccl(backend) for backend in _backends(group))


def cut(group: dist.ProcessGroup) -> None:
    """End this rank's collectives of a group, begun or not: they raise, and so do those of ranks that wait for it.

    Gloo closes all connections of a rank that waited in vain. NCCL's are aborted, after a backend that refuses
    everything has taken its place: else a later collective would make a communicator, and wait for all ranks. A group
    that is cut may be cut again.
    """
    for backend in _backends(group):
        if group.size() == 1:
            continue
        if _is_gloo(backend):
            with contextlib.suppress(RuntimeError):
                peer = (group.rank() + 1) % group.size()
                backend.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(_IN_VAIN)
        elif _is_nccl(backend):
            refusing = _refusing(group)
            _replace(group, backend, refusing)
            _aborted[(group.group_name, id(refusing))] = backend
            backend.abort()


def renewal_bytes(group: dist.ProcessGroup) -> int:
    """Return about what new connections of a group take on the host: the stacks of Gloo's threads."""
    return sum((backend.options._threads + 1) * _STACK_BYTES for backend in _backends(group) if _is_gloo(backend))


def connect(group: dist.ProcessGroup, generation: str) -> list[Any]:
    """Return backends with new connections between the ranks of a group, for `replace_backends`; on all of them.

    `generation` is a name that all ranks give, another one each time.
    """
    if group.size() == 1:
        return []
    store = dist.PrefixStore(f"memfit/renewed/{generation}", group.get_group_store())
    made = []
    for place, present in enumerate(_backends(group)):
        old = _aborted.get((group.group_name, id(present)), present)
        kind = _Gloo if _is_gloo(old) else _Nccl
        with _small_stacks():
            new = kind(dist.PrefixStore(str(place), store), group.rank(), group.size(), _options(old))
        new._set_sequence_number_for_group()
        made.append(new)
    return made


def replace_backends(group: dist.ProcessGroup, backends: list[Any]) -> None:
    """Let a group that was cut go on with other backends (Note [Backends in place]); one rank alone has none."""
    if group.size() == 1:
        return
    for present, new in zip(_backends(group), backends, strict=True):
        _aborted.pop((group.group_name, id(present)), None)
        _replace(group, present, new)
    # `setGroupName` and `setGroupDesc` pass the names on to the backends.
    group._set_group_name(group.group_name)
    group._set_group_desc(group.group_desc)


@contextlib.contextmanager
def _small_stacks() -> Iterator[None]:
    """Let threads that are made inside the block have small stacks (glibc's `pthread_setattr_default_np`)."""
    usual, small = (ctypes.create_string_buffer(_PTHREAD_ATTR_BYTES) for _ in range(2))
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "pthread_setattr_default_np"):  # another C library: stacks are as large as usual
        yield
        return
    refused = libc.pthread_getattr_default_np(usual) or libc.pthread_getattr_default_np(small)
    refused = refused or libc.pthread_attr_setstacksize(small, ctypes.c_size_t(_STACK_BYTES))
    refused = refused or libc.pthread_setattr_default_np(small)
    try:
        yield
    finally:
        if not refused:
            libc.pthread_setattr_default_np(usual)


def _refusing(group: dist.ProcessGroup) -> Any:
    """Return a backend whose collectives raise (torch/csrc/distributed/c10d/FakeProcessGroup.hpp)."""
    fake: Any = c10d.FakeProcessGroup
    options = fake.Options()
    options.error_on_collective = True
    return fake._create_internal(group.rank(), group.size(), options)


def _options(backend: Any) -> Any:
    options = backend.options
    if hasattr(options, "split_from"):  # of a communicator that is gone
        options.split_from = None
    return options


def _replace(group: dist.ProcessGroup, old: Any, new: Any) -> None:
    number = _FIRST_NUMBER + _numbers.get(group.group_name, 0)
    if number > _LAST_NUMBER:
        raise RuntimeError(
            f"the connections of group {group.group_name!r} were made anew {number - _FIRST_NUMBER} times"
        )
    _numbers[group.group_name] = _numbers.get(group.group_name, 0) + 1
    kind = dist.ProcessGroup.BackendType(number)
    for device in group._device_types:
        if group._get_backend(device) is old:
            group._register_backend(device, kind, new)
            if group._get_backend(device) is not new:
                raise RuntimeError(f"torch {torch.__version__} does not take another backend for {device}")


def _backends(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of a group, each once; those of devices that are not there raise when they are asked for."""
    found: dict[int, Any] = {}
    for device in sorted(group._device_types, key=str):
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(device)
            found[id(backend)] = backend
    return list(found.values())


def _is_gloo(backend: Any) -> bool:
    return _Gloo is not None and isinstance(backend, _Gloo)


def _is_nccl(backend: Any) -> bool:
    return _Nccl is not None and isinstance(backend, _Nccl)


def reset_reducer(model: Any) -> None:
    """Let DDP forget a backward that did not end: its next forward would refuse otherwise.

    `Reducer._reset_state` (torch/csrc/distributed/c10d/reducer.cpp), as `DistributedDataParallel._update_process_group`
    calls it; the buckets are built anew after the next backward, the same ones again.
    """
    model._has_rebuilt_buckets = False
    model.reducer._reset_state()


def along(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the mesh of one dimension whose ranks are those along all of these dimensions of a mesh.

    `DeviceMesh._flatten` (torch/distributed/device_mesh.py), which torchtitan calls for `fully_shard` over `dp`
    and `cp`.
    """
    return mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten()
