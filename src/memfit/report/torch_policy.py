"""A plan as PyTorch's own selective activation checkpointing: a Python file that needs torch and nothing of memfit.

Note [Exported policies]: `torch.utils.checkpoint` asks a policy for every op of a unit's forward whether its results
are saved. Ops have no numbers there, so a saved op of the plan is named by what it is and how many of its kind ran
before it in the unit; the plan has every op of a unit up to the last that is recomputed, and this number of the saved
ones after it. What torch's checkpointing
cannot do is left out, and the file says so: a loss that is recomputed outside of modules, results that leave for the
host, a loss in chunks. The file therefore keeps the plan's bits, and its memory only as far as torch's own bookkeeping
does.
"""

from __future__ import annotations

import pprint
from collections import Counter, defaultdict
from pathlib import Path

from msgspec import UNSET

from memfit._version import __version__
from memfit.errors import InputError
from memfit.files import write_whole
from memfit.plans import Checkpoint, Plan
from memfit.text import counted
from memfit.units import display_bytes

_FILE = '''"""Selective activation checkpointing, written by memfit {version}; needs torch alone.

{summary}

    import policy  # this file
    policy.apply(model)  # before fully_shard, DDP or torch.compile

`context_fn(path)` is what `torch.utils.checkpoint.checkpoint` and `checkpoint_wrapper` take for one module.
"""

import functools
from collections import Counter

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

FINGERPRINT = {fingerprint!r}

# For each checkpointed module, the ops whose results are saved: which of the op's calls in the module's forward.
SAVED = {saved}


def context_fn(path):
    """Return the contexts of one forward of the module, and of its recompute."""
    seen = {{False: Counter(), True: Counter()}}

    def policy(ctx, op, *args, **kwargs):
        name = str(op)
        number = seen[ctx.is_recompute][name]
        seen[ctx.is_recompute][name] += 1
        save = number in SAVED[path].get(name, ())
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    # A result that later ops write to is saved together with these, so that none of them runs again.
    return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)


def apply(model):
    """Checkpoint the modules of the plan; return the model."""
    for path, saved in SAVED.items():
        module = model.get_submodule(path)
        options = {{"context_fn": functools.partial(context_fn, path)}} if saved else {{}}
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, **options)
    return model
'''


def to_torch_policy(plan: Plan) -> str:
    """Return the Python file of a plan's policies (Note [Exported policies])."""
    if plan.predicted is None:
        raise InputError(f"the plan is {plan.status}: there are no policies to export; plan for a larger budget")
    saved: dict[str, dict[str, tuple[int, ...]]] = {}
    for entry in plan.checkpoint:
        if entry.is_loss or entry.stop < 0:
            continue
        policy = _saved_calls(entry)
        if saved.setdefault(entry.module, policy) != policy:
            raise InputError(
                f"calls of {entry.module!r} have different policies in this plan, which torch's checkpointing cannot "
                "tell apart; plan with SolveOptions(micro_batches='same'), or forbid the unit"
            )
    summary = [
        f"{counted(len(saved), 'module')} of a step with a peak of {display_bytes(plan.baseline.peak_bytes)}; planned "
        f"for {display_bytes(plan.budget_bytes)}.",
        *_left_out(plan),
    ]
    return _FILE.format(
        version=__version__,
        summary="\n".join(summary),
        fingerprint=plan.fingerprint,
        saved=pprint.pformat(saved, width=116, sort_dicts=False),
    )


def write_torch_policy(plan: Plan, path: str | Path) -> None:
    """Write the plan's policies as a Python file, whole or not at all."""
    write_whole(Path(path), to_torch_policy(plan).encode(), Path(path).name)


def _saved_calls(entry: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return which calls of each op are saved, numbered among the calls of that op in the unit."""
    saved = {op.offset for op in entry.saved_ops}
    seen: Counter[str] = Counter()
    found: defaultdict[str, list[int]] = defaultdict(list)
    for op in sorted((*entry.saved_ops, *entry.recomputed_ops), key=lambda op: op.offset):
        if op.offset in saved and op.offset <= entry.stop:
            found[op.name].append(seen[op.name])
        seen[op.name] += 1
    after = [op for op in entry.saved_ops if op.offset > entry.stop]
    if after and not isinstance(entry.numbers, tuple):
        raise InputError(
            f"the plan does not number the ops that {entry.unit!r} saves after its recompute ends: it is of an older "
            "memfit; plan the step again"
        )
    for op, number in zip(after, entry.numbers or (), strict=True):
        found[op.name].append(number)
    return {name: tuple(numbers) for name, numbers in found.items()}


def _left_out(plan: Plan) -> list[str]:
    """Say what the plan does that the file does not."""
    left = []
    if any(entry.is_loss for entry in plan.checkpoint):
        left.append("the loss outside of the model is recomputed")
    if any(entry.offload not in (UNSET, ()) for entry in plan.checkpoint):
        left.append("results are offloaded to the host")
    if plan.chunked_loss is not UNSET:
        left.append("the loss is computed in chunks")
    return [f"Left out, so that more memory is used than planned: in the plan {', '.join(left)}."] if left else []
