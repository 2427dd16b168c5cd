"""PyTorch's own planner: its trackers, `sac_milp`, the policy per module, and selective checkpointing to run it.

Its trackers know no CPU, so they are given the times that memfit's cost model has for the same ops. Its memory has no
optimizer state and no batch: these are taken off the budget first. Where its trackers fail on a model, its solvers get
the statistics of memfit's, which say the same in the same form.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memfit.compat import module_info, sac_stats
from memfit.compat import parse_module_info as memfit_graph
from memfit.cost import Runtime
from memfit.tradeoff import find_units
from memfit.units import GiB

from .models import Case

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What PyTorch's solvers decided at a budget: for each module whether each of its ops is saved (1)."""

    saved: dict[str, list[int]]
    ratios: dict[str, float]
    recompute_ms: float
    peak_bytes: int
    seconds: float


class Planner:
    """PyTorch's planner for one model. `source` says whose statistics it works on, and why."""

    def __init__(self, case: Case, runtime: Runtime, cache: Path) -> None:
        self._case, self._runtime = case, runtime
        self._cache = cache
        self._graph: Any = None
        self._stats: dict[str, Any] = {}
        self.source = ""

    def decide(self, budget_bytes: int) -> Decision | None:
        """The decision at a budget, in the planner's own terms; None when it finds none."""
        known = json.loads(self._cache.read_text()) if self._cache.exists() else {}
        key = f"{self._case.name} {self._case.size} {budget_bytes}"
        if key not in known:
            decision = self._decide(budget_bytes)
            known[key] = {"source": self.source, "decision": None if decision is None else asdict(decision)}
            self._cache.write_text(json.dumps(known))
        self.source = known[key]["source"]
        found = known[key]["decision"]
        return None if found is None else Decision(**found)

    def _decide(self, budget_bytes: int) -> Decision | None:
        with _quiet():
            from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

            began = time.perf_counter()
            self._collect()
            ratios, recompute_ms, peak_bytes = sac_milp(self._graph, budget_bytes / GiB)
            if peak_bytes < 0:
                return None
            saved = {}
            for name, ratio in ratios.items():
                saved[self._path(name)] = get_optimal_checkpointing_policy_per_module(
                    self._stats[name], max(0.0, 1.0 - ratio)
                )
            seconds = time.perf_counter() - began
        return Decision(
            saved=saved, ratios=dict(ratios), recompute_ms=recompute_ms, peak_bytes=peak_bytes, seconds=seconds
        )

    def _path(self, name: str) -> str:
        """A module's path; PyTorch's names begin with the class of the model."""
        root = self._case.build().__class__.__name__
        return "" if name == root else name.removeprefix(f"{root}.")

    def _collect(self) -> None:
        if self._graph is not None:
            return
        try:
            self._graph, self._stats = self._their_statistics()
            self.source = "its own statistics"
        except Exception as error:  # whatever its trackers raise on a model
            reason = f"{type(error).__name__} {error}".strip().splitlines()[0][:120]
            self._graph, self._stats = self._our_statistics()
            self.source = f"memfit's statistics, its own trackers failed: {reason}"

    def _their_statistics(self) -> tuple[Any, dict[str, Any]]:
        from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
        from torch.distributed._tools.mem_tracker import MemTracker
        from torch.distributed._tools.runtime_estimator import RuntimeEstimator
        from torch.distributed._tools.sac_estimator import SACEstimator

        estimate = _measured_times(self._runtime)
        with FakeTensorMode() as mode:
            step = self._case.step()
            model = step.model
            assert isinstance(model, nn.Module)
            step = step.with_batch(tree_map_only(torch.Tensor, mode.from_tensor, self._case.batch))
            optimizer = step.build_optimizer(model)
            step.execute(model, optimizer, "cpu")
            memory = MemTracker()
            memory.track_external(model, optimizer, *tree_leaves(step.batch))
            with memory:
                step.execute(model, optimizer, "cpu")
            runtime = RuntimeEstimator()("operator-level-cost-model")
            runtime._estimate = estimate  # type: ignore[method-assign]
            with runtime:
                step.execute(model, optimizer, "cpu")
            sac = SACEstimator()
            sac._estimate_runtime = estimate  # type: ignore[method-assign]
            with sac:
                model(**step.batch)
        graph = parse_module_info(aggregate_stats(model, memory, runtime, sac, CPU))
        return graph, sac.sac_mod_stats

    def _our_statistics(self) -> tuple[Any, dict[str, Any]]:
        graph = memfit_graph(module_info(self._runtime))
        for node in graph.nodes:
            node["is_leaf"] = node["is_leaf"] or not node["sac_memory"]  # its solver divides by it
        trace, times = self._runtime.trace, self._runtime.op_ms
        return graph, {unit.name: sac_stats(trace, times, unit) for unit in find_units(trace)}


def _measured_times(runtime: Runtime) -> Callable[..., tuple[Any, float]]:
    """An op's time by its name and the shapes of its inputs, as the trace of the same step has it; else nothing."""
    found: dict[Any, list[float]] = defaultdict(list)
    for op, op_ms in zip(runtime.trace.ops, runtime.op_ms.tolist(), strict=True):
        found[op.name, tuple(tuple(ref.shape) for ref in op.inputs)].append(op_ms)

    def estimate(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        kwargs = kwargs or {}
        shapes = tuple(tuple(t.shape) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        times = found.get((str(func), shapes), [0.0])
        return func(*args, **kwargs), sum(times) / len(times)

    return estimate


def apply_decision(model: nn.Module, decision: Decision) -> None:
    """Checkpoint the decision's modules with its policies."""
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    for path, saved in decision.saved.items():
        module = model.get_submodule(path)
        module.forward = partial(_selective, module.forward, saved, OPS_TO_ALWAYS_SKIP)  # type: ignore[method-assign]


def _selective(forward: Callable[..., Any], saved: list[int], skipped: set[Any], *args: Any, **kwargs: Any) -> Any:
    """Ops are counted as PyTorch's estimator counts them; its solver saves written tensors along with their writers."""
    counts = {False: -1, True: -1}

    def policy(context: Any, func: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if func in skipped:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute] += 1
        place = counts[context.is_recompute]
        save = place < len(saved) and saved[place]
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy, allow_cache_entry_mutation=True)
    more = {"context_fn": contexts} if any(saved) else {}
    return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The prototypes print, log at import and use what pulp deprecates."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
