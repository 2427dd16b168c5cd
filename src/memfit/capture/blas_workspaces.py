"""The workspaces of cuBLAS: memory of the caching allocator that products take and a process never gives back.

Note [cuBLAS workspaces]: torch gives cuBLAS a workspace for each pair of handle and stream, made by the caching
allocator at the first product of that pair and kept until the process ends (ATen/cuda/CublasHandlePool.cpp,
`getCurrentCUDABlasHandle`, `getChosenWorkspaceSize`; torch 2.10 to 2.13). A handle belongs to a thread. A training
process has two threads that run products on a device: the one that runs the forward, the loss and the optimizer, and
the one in which autograd runs the backward, units that are recomputed included. cuBLASLt takes its workspace from the
same buffer (`TORCH_CUBLASLT_UNIFIED_WORKSPACE`, the default since torch 2.7); hipBLASLt has one of its own beside it.

So `torch.cuda.memory_allocated` counts each once a product has run in its thread, and so does a trace: as storages that
are there before the step and stay. A first step makes them at the product (memory/steady_state.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from memfit.capture.trace_types import AFTER_STEP, BEFORE_STEP, NO_INDEX, Category, Op, Phase, Storage
from memfit.hardware import Device

FORWARD_THREAD = 0
"""The thread that runs the forward, the loss and the optimizer's step."""
AUTOGRAD_THREAD = 1
"""The thread in which autograd runs the backward of a device."""

_THREADS = {FORWARD_THREAD: "the forward's thread", AUTOGRAD_THREAD: "autograd's thread"}
_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in (
        "mm.default",
        "addmm.default",
        "_addmm_activation.default",
        "bmm.default",
        "baddbmm.default",
        "addbmm.default",
        "mv.default",
        "addmv.default",
        "dot.default",
        "vdot.default",
        "linear.default",
        "_int_mm.default",
        "_scaled_mm.default",
        "linalg_solve_triangular.default",
    )
)
"""Ops that ask for a cuBLAS handle (cuda/Blas.cpp, cuda/ScaledBlas.cpp, cuda/linalg/BatchLinearAlgebra.cpp)."""


def product_thread(op: Op) -> int:
    """Return the thread in which an op of the step runs a product, `NO_INDEX` where it runs none."""
    if op.name not in _PRODUCTS:
        return NO_INDEX
    return AUTOGRAD_THREAD if op.phase is Phase.BACKWARD else FORWARD_THREAD


def workspace_thread(storage: Storage) -> int:
    """Return the thread whose products use a storage as their workspace, `NO_INDEX` where it is none."""
    if storage.category is not Category.WORKSPACE or storage.alloc_at != BEFORE_STEP:
        return NO_INDEX
    return next((thread for thread, name in _THREADS.items() if storage.name.endswith(name)), NO_INDEX)


def blas_workspaces(ops: Sequence[Op], device: Device) -> tuple[Storage, ...]:
    """Return the workspaces that a process which repeats these ops holds (Note [cuBLAS workspaces])."""
    names = ("hipBLAS", "hipBLASLt") if device.vendor == "AMD" else ("cuBLAS", "cuBLASLt")
    sizes = (device.blas_workspace_bytes, device.blaslt_workspace_bytes)
    threads = sorted({product_thread(op) for op in ops} - {NO_INDEX})
    return tuple(
        Storage(
            bytes=size_bytes,
            category=Category.WORKSPACE,
            alloc_at=BEFORE_STEP,
            free_after=AFTER_STEP,
            released=AFTER_STEP,
            call=NO_INDEX,
            module="",
            name=f"{name} workspace of {_THREADS[thread]}",
            saved_by=(),
        )
        for thread in threads
        for name, size_bytes in zip(names, sizes, strict=True)
        if size_bytes
    )
