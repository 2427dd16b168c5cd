"""Capture of one training step on meta tensors, faithful to the target's kernels."""

import memfit.torch_private.version  # noqa: F401  first, so that a torch which does not work is refused with the reason

# isort: split
from memfit.capture.arguments import GENERATOR, call_of, dataclass_values, real_tensor
from memfit.capture.blas_workspaces import AUTOGRAD_THREAD, product_thread, workspace_thread
from memfit.capture.call_stack import is_container, is_trained
from memfit.capture.capture import trace
from memfit.capture.chunked_loss import (
    CHUNKS,
    ChunkedLoss,
    chunked_cross_entropy,
    chunked_losses,
    find_chunkable,
    find_copies,
    find_logits,
    find_softmaxes,
    is_chunked,
)
from memfit.capture.divided_batch import batch_rows, divide_batch, divide_step
from memfit.capture.environment import (
    cheap_collections,
    is_capturing,
    neutral_modes,
    no_garbage_collection,
    same_attributes,
)
from memfit.capture.errors import CaptureError
from memfit.capture.fake_ranks import Mesh, RankLike, resolve_mesh, resolve_rank
from memfit.capture.kernels import AllocatorEvent, allocations
from memfit.capture.optimizers import (
    Implementation,
    implementations,
    implementations_of_step,
    set_flags,
    set_implementation,
    step_with,
)
from memfit.capture.parameter_cast import ParameterCast
from memfit.capture.random_numbers import held_generators, host_state, with_host_state
from memfit.capture.random_paths import SEVERAL_PATHS
from memfit.capture.replacements import patched
from memfit.capture.rules.base import fills_its_memory
from memfit.capture.scaling import ScaledTraces, fit_traces, is_same_step
from memfit.capture.step import Companions, Step, call_model, find_step, find_variables, spec
from memfit.capture.trace_file import check_trace, load_trace, save_trace
from memfit.capture.trace_types import (
    AFTER_STEP,
    BEFORE_STEP,
    NO_INDEX,
    CapturedOn,
    Category,
    CollectiveCall,
    Module,
    ModuleCall,
    Op,
    Parameter,
    Phase,
    PipelineAction,
    PipelineRun,
    Storage,
    TensorRef,
    Trace,
    short,
)
from memfit.capture.wrapped_models import innermost, names_of_wrappers, own_modules

__all__ = [
    "AFTER_STEP",
    "AUTOGRAD_THREAD",
    "BEFORE_STEP",
    "CHUNKS",
    "GENERATOR",
    "NO_INDEX",
    "SEVERAL_PATHS",
    "AllocatorEvent",
    "CaptureError",
    "CapturedOn",
    "Category",
    "ChunkedLoss",
    "CollectiveCall",
    "Companions",
    "Implementation",
    "Mesh",
    "Module",
    "ModuleCall",
    "Op",
    "Parameter",
    "ParameterCast",
    "Phase",
    "PipelineAction",
    "PipelineRun",
    "RankLike",
    "ScaledTraces",
    "Step",
    "Storage",
    "TensorRef",
    "Trace",
    "allocations",
    "batch_rows",
    "call_model",
    "call_of",
    "cheap_collections",
    "check_trace",
    "chunked_cross_entropy",
    "chunked_losses",
    "dataclass_values",
    "divide_batch",
    "divide_step",
    "fills_its_memory",
    "find_chunkable",
    "find_copies",
    "find_logits",
    "find_softmaxes",
    "find_step",
    "find_variables",
    "fit_traces",
    "held_generators",
    "host_state",
    "implementations",
    "implementations_of_step",
    "innermost",
    "is_capturing",
    "is_chunked",
    "is_container",
    "is_same_step",
    "is_trained",
    "load_trace",
    "names_of_wrappers",
    "neutral_modes",
    "no_garbage_collection",
    "own_modules",
    "patched",
    "product_thread",
    "real_tensor",
    "resolve_mesh",
    "resolve_rank",
    "same_attributes",
    "save_trace",
    "set_flags",
    "set_implementation",
    "short",
    "spec",
    "step_with",
    "trace",
    "with_host_state",
    "workspace_thread",
]
