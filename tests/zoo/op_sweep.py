"""Judges captures of single ops against this machine's allocator.

`make ops` runs this file: it writes `src/memfit/capture/certified.txt` and `docs/ops.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import math
import multiprocessing
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import memfit
from memfit.capture import Phase, Step, Trace, check_trace
from memfit.capture.autograd_engine import SCATTERS
from memfit.capture.environment import no_garbage_collection
from memfit.errors import MemfitError
from memfit.memory import Timeline, measured
from tests.zoo.op_cases import BACKWARD, Case, cases, op_database
from tests.zoo.op_kernels import KernelCall, check_kernels, kernel_calls

ROOT = Path(__file__).parents[2]
CERTIFIED = ROOT / "src/memfit/capture/certified.txt"
PAGE = ROOT / "docs/ops.md"
CUDA = "h100-sxm"


class Verdict(Enum):
    """How a capture compares with the allocator, best first."""

    INVALID = "not valid in PyTorch"
    EXACT = "exact"
    NOTED = "with a note"
    REFUSED = "refused"
    WRONG = "wrong without a note"
    RAW = "raw exception"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on one case.

    Bytes are those of the highest point of the forward, of its end and of the highest point of the backward, above the
    start of the step.
    """

    op: str
    case: str
    verdict: Verdict
    reason: str = ""
    captured_bytes: tuple[int, int, int] = (0, 0, 0)
    measured_bytes: tuple[int, int, int] = (0, 0, 0)

    def __str__(self) -> str:
        bytes_ = f" captured {self.captured_bytes}, measured {self.measured_bytes}"
        return f"{self.op}: {self.verdict.value}: {self.case}:{bytes_} {self.reason}"


@contextlib.contextmanager
def quiet_heap() -> Iterator[None]:
    """Keep the op database's hundred thousands of objects out of every search through the heap."""
    op_database()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def judge(case: Case) -> Judgement:
    """Run a case for real, capture it for the CPU, and compare."""
    answer = functools.partial(Judgement, op=case.op, case=case.label)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            measured_bytes = _measure(case)
        except Exception as error:
            return answer(verdict=Verdict.INVALID, reason=_first_line(error))
        trace = _capture(case, "cpu")
        if isinstance(trace, tuple):
            return answer(verdict=trace[0], reason=trace[1])
    captured_bytes = _captured(trace)
    if captured_bytes == measured_bytes:
        verdict = Verdict.EXACT
    else:
        verdict = Verdict.NOTED if trace.notes else Verdict.WRONG
    return answer(
        verdict=verdict,
        reason="; ".join(trace.notes),
        captured_bytes=captured_bytes,
        measured_bytes=measured_bytes,
    )


def judge_cuda(case: Case) -> Judgement:
    """Capture a case for a GPU, where there is nothing to compare with: no exception but memfit's own may come out."""
    answer = functools.partial(Judgement, op=case.op, case=case.label)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case.run(case.model)
        except Exception as error:
            return answer(verdict=Verdict.INVALID, reason=_first_line(error))
        trace = _capture(case, CUDA)
    if isinstance(trace, tuple):
        return answer(verdict=trace[0], reason=trace[1])
    return answer(verdict=Verdict.EXACT, reason="; ".join(trace.notes))


def _capture(case: Case, target: str) -> Trace | tuple[Verdict, str]:
    try:
        trace = memfit.trace(Step(case.model, run=case.run, optimizer=None), target=target)
        check_trace(trace)
    except MemfitError as error:
        return Verdict.REFUSED, f"{getattr(error, 'op', '')}: {_first_line(error)}"
    except Exception as error:
        return Verdict.RAW, f"{type(error).__name__}: {_first_line(error)}"
    return trace


def _measure(case: Case) -> tuple[int, int, int]:
    """Highest point of the forward, bytes at its end, and highest point of the backward, above the start."""
    case.run(case.model)
    with no_garbage_collection(), measured() as truth:
        case.run(case.model)
    level = forward = at_end = backward = 0
    for event in truth.events:
        level += event.bytes
        if BACKWARD in event.ops:
            backward = max(backward, level)
        elif not backward:
            forward, at_end = max(forward, level), level
    return forward, at_end, max(backward, at_end)


def _captured(trace: Trace) -> tuple[int, int, int]:
    timeline = Timeline.of(trace)
    before, during, start = timeline.before_bytes, timeline.during_bytes, timeline.start_bytes
    begin = next((i for i, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD), len(trace.ops))
    forward = int(during[:begin].max(initial=start)) - start
    return forward, int(before[begin]) - start, int(during[begin:].max(initial=start)) - start


def _first_line(error: BaseException) -> str:
    return (str(error).strip().split("\n") or [""])[0][:160]


# -- certified.txt ----------------------------------------------------------------------------------------------------


Facts = dict[tuple[str, str], Counter[str]]
"""How often each op on each kind of operands was as captured, `exact`, or not, `wrong`."""


def certify(name: str, samples: int = 2) -> Facts:
    """The facts of all kernels that the cases of an op call, in forward and backward."""
    calls: dict[Any, KernelCall] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases(name, samples=samples):
            with contextlib.suppress(Exception):  # a case that PyTorch itself does not run
                calls |= kernel_calls(functools.partial(case.run, case.model))
        facts: Facts = defaultdict(Counter)
        listed = list(calls.values())
        for begin in range(0, len(listed), 400):
            part = listed[begin : begin + 400]
            for call, problem in zip(part, check_kernels(part), strict=True):
                verdict = "unknown" if problem is None else "wrong" if problem else "exact"
                facts[call.name, call.kind][verdict] += 1
    return facts


_HEADER = """\
# Ops of which every call of the sweep (`make ops`) was captured to the byte by rules and meta kernels alone, and the
# kinds of operands in those calls (kernels.py, Note [Certified]). Written by tests/zoo/op_sweep.py.
"""


_LIBRARY = ("aten.gelu", "aten._prelu_kernel", "aten.mv", "aten.addmv")
"""Ops that oneDNN or BLAS may run, as the instruction set allows: in low precision they are always measured."""


_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
"""Met in composite functions only, where no mode sees it; its rule does not hold in low precision on every machine."""


def write_certified(facts: Facts) -> None:
    """Write the table; an op that was met and is certified for nothing has a line without kinds."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for (op, kind), counts in sorted(facts.items()):
        listed = kinds[op]
        library = op.startswith(_LIBRARY) and kind.endswith("-mixed")
        if counts["exact"] and not counts["wrong"] and not library:
            listed.append(kind)
    kinds.setdefault(_FLASH, ["channels-last", "contiguous", "empty", "strided"])
    for functional, in_place in SCATTERS.items():  # a mode sees the first where a real run has the second
        if in_place in kinds:
            kinds[in_place] = [kind for kind in kinds[in_place] if kind in kinds.get(functional, ())]
    lines = [" ".join([op, *listed]) for op, listed in sorted(kinds.items()) if op.startswith("aten.")]
    CERTIFIED.write_text(_HEADER + "\n".join(lines) + "\n", "utf-8")


def gradient_nodes(name: str) -> set[str]:
    """The autograd nodes in the backward of an op's cases."""
    names: set[str] = set()
    for case in cases(name, quick=True):
        with contextlib.suppress(Exception):  # a case that PyTorch itself does not run
            stack = [output.grad_fn for output in case.model() if output.requires_grad]
            while stack:
                node = stack.pop()
                if node is not None:
                    names.add(node.name())
                    stack += [each for each, _ in node.next_functions]
    return names


_OWN_PREFIX = ("linalg", "fft", "special")

Found = list[tuple[str, list[Judgement], list[Judgement]]]


def blame(found: Found, nodes: dict[str, set[str]]) -> dict[str, tuple[int, int]]:
    """Functions and gradients that get a note, each with the range of its errors in per cent.

    An op that is wrong in any case is to blame, and so are its gradients that no op has without being wrong.
    """
    wrong = {name: [each for each in on_cpu if _is_off(each)] for name, on_cpu, _ in found}
    innocent = {node for name, offs in wrong.items() if not offs for node in nodes.get(name, ())}
    ranges: dict[str, tuple[int, int]] = {}
    for name, offs in wrong.items():
        if not offs:
            continue
        errors = [100 * (max(each.captured_bytes) / max(1, *each.measured_bytes) - 1) for each in offs]
        low, high = min(0, math.floor(min(errors))), max(0, math.ceil(max(errors)))
        function = _function_name(op_database()[name].name)
        if all(", bfloat16, " in each.case for each in offs):
            function = f"low:{function}"
        for blamed in (function, *(nodes.get(name, set()) - innocent)):
            known = ranges.get(blamed, (0, 0))
            ranges[blamed] = min(low, known[0]), max(high, known[1])
    return ranges


def _function_name(op: str) -> str:
    """The name of the torch function that an op calls: `torch.linalg.vander` calls itself `linalg_vander`."""
    *module, name = op.split(".")
    return f"{module[0]}_{name}" if module and module[0] in _OWN_PREFIX else name


def _is_off(judgement: Judgement) -> bool:
    """Whether it is wrong without a note, or with no other note than the one that `blame` is for."""
    noted = judgement.verdict is Verdict.NOTED and all("docs/ops.md" in note for note in judgement.reason.split("; "))
    return judgement.verdict is Verdict.WRONG or noted


def write_inexact(ranges: dict[str, tuple[int, int]]) -> None:
    """Put the notes into the table of certified kernels, in place of those of the sweep before."""
    kept = [line for line in CERTIFIED.read_text("utf-8").splitlines() if not line.startswith("inexact ")]
    lines = [f"inexact {name} {low} {high}" for name, (low, high) in sorted(ranges.items())]
    CERTIFIED.write_text("\n".join([*kept, *lines]) + "\n", "utf-8")


# -- docs/ops.md ------------------------------------------------------------------------------------------------------


def judge_op(name: str) -> tuple[str, list[Judgement], list[Judgement]]:
    """The judgements of all cases of an op, for the CPU and for a GPU."""
    on_cpu = [judge(case) for case in cases(name)]
    on_cuda = [judge_cuda(case) for case in cases(name, quick=True)]
    return name, on_cpu, on_cuda


def verdict_of(judgements: Iterable[Judgement]) -> Verdict:
    """The worst of them."""
    order = list(Verdict)
    return max((each.verdict for each in judgements), key=order.index, default=Verdict.INVALID)


def write_page(found: Found) -> None:
    """Write the notes that the capture needs, and the table of ops with its counts."""
    ranges = blame(found, {name: gradient_nodes(name) for name, *_ in found})
    write_inexact(ranges)
    found = [(name, [_noted(each, ranges) for each in on_cpu], on_cuda) for name, on_cpu, on_cuda in found]
    rows, counts, cuda_counts = [], Counter[str](), Counter[str]()
    trained = 0
    for name, on_cpu, on_cuda in sorted(found):
        verdict, cuda = verdict_of(on_cpu), verdict_of(on_cuda)
        derivative = op_database()[name].supports_autograd
        trained += derivative
        if derivative:
            counts[verdict.value] += 1
            cuda_counts[cuda.value] += 1
        rows.append(
            f"| `{name}` | {'yes' if derivative else 'no'} | {verdict.value} | {_tally(on_cpu)} | {cuda.value} | "
            f"{_reason(on_cpu, on_cuda)} |"
        )
    tally = [f"| {each.value} | {counts[each.value]} | {cuda_counts[each.value]} |" for each in Verdict]
    page = _PAGE.format(
        trained=trained,
        exact=counts[Verdict.EXACT.value],
        counts="\n".join(tally),
        rows="\n".join(rows),
        torch=str(torch.__version__).split("+")[0],
    )
    PAGE.write_text(page, "utf-8")


def _noted(judgement: Judgement, ranges: dict[str, tuple[int, int]]) -> Judgement:
    """The judgement as it is from now on, when the capture has a note."""
    name = op_database()[judgement.op].name.split(".")[-1]
    if judgement.verdict is not Verdict.WRONG or (name not in ranges and f"low:{name}" not in ranges):
        return judgement
    low, high = ranges.get(name) or ranges[f"low:{name}"]
    reason = f"{low} % to {high} % off: {judgement.case}"
    return dataclasses.replace(judgement, verdict=Verdict.NOTED, reason=reason)


def _tally(judgements: list[Judgement]) -> str:
    valid = [each for each in judgements if each.verdict is not Verdict.INVALID]
    return f"{sum(each.verdict is Verdict.EXACT for each in valid)} of {len(valid)}"


def _reason(*lists: list[Judgement]) -> str:
    for judgements in lists:
        for verdict in (Verdict.RAW, Verdict.WRONG, Verdict.REFUSED, Verdict.NOTED):
            for each in judgements:
                if each.verdict is verdict:
                    text = each.case if verdict is Verdict.WRONG else each.reason
                    return text.replace("|", "/").replace("<", "&lt;")[:200]
    return ""


_PAGE = """\
# Ops

Every op of PyTorch's OpInfo database (torch {torch}), each as a training step of its own: sample inputs whose
operands are dense, transposed, sliced, expanded, zero-strided, broadcast, channels-last, empty and of mixed dtypes,
and gradients that are dense, expanded, transposed, sliced and channels-last. Each step is captured for
`target="cpu"` and compared with the allocator's events of a real run: the highest point of the forward, the bytes at
its end, and the highest point of the backward. For a GPU there is nothing to compare with here; there an op is
captured, or refused with what to do instead.

`make ops` runs the sweep and writes this page and the table of certified kernels; `make zoo` fails when an op is
wrong without a note. How the capture knows what a kernel allocates is in [design/capture.md](design/capture.md).

Of {trained} ops with a derivative, **{exact} are captured to the byte on the CPU in all cases**.

| worst case | ops on the CPU | ops on a GPU |
|---|---|---|
{counts}

"exact" on a GPU means captured. Cases that PyTorch itself does not run are not counted.

| op | derivative | CPU | cases exact | GPU | reason |
|---|---|---|---|---|---|
{rows}
"""


def main() -> None:
    """Write the table of certified kernels, then the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("certify", "page"))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    names = list(op_database())
    torch.set_num_threads(1)
    op_database()
    gc.freeze()  # the children search their heaps for optimizers
    for task in ("certify", "page") if options.only is None else (options.only,):
        if task == "certify":
            facts: Facts = defaultdict(Counter)
            for _, found in _shown(each_in_a_process(certify, names, options.processes), len(names), task):
                for key, counts in (found or {}).items():
                    facts[key] += counts
            write_certified(facts)
        else:
            results = _shown(each_in_a_process(judge_op, names, options.processes), len(names), task)
            write_page([judge_one_by_one(name) if found is None else found for name, found in results])


def each_in_a_process(
    function: Callable[[Any], Any], arguments: Iterable[Any], processes: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Call a function on each argument in a process of its own; a process that a kernel crashes answers None."""
    context = multiprocessing.get_context("fork")
    waiting, running = iter(arguments), dict[Connection, tuple[multiprocessing.process.BaseProcess, Any]]()
    more = True
    while more or running:
        while more and len(running) < processes:
            argument = next(waiting, None)
            if argument is None:
                more = False
                break
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=lambda pipe, given: pipe.send(function(given)), args=(theirs, argument))
            process.start()
            theirs.close()
            running[ours] = process, argument
        for pipe in wait(list(running)):
            assert isinstance(pipe, Connection)
            process, argument = running.pop(pipe)
            try:
                yield argument, pipe.recv()
            except EOFError:
                yield argument, None
            pipe.close()
            process.join()


def judge_one_by_one(name: str) -> tuple[str, list[Judgement], list[Judgement]]:
    """Judge every case of an op in a process of its own, to tell crashes of PyTorch's kernels from others."""

    def crashed(case: Case, verdict: Verdict) -> Judgement:
        return Judgement(op=name, case=case.label, verdict=verdict, reason="the process crashes")

    def judged(quick: bool, judge_case: Callable[[Case], Judgement]) -> list[Judgement]:
        found = []
        for case, judgement in each_in_a_process(judge_case, cases(name, quick=quick)):
            if judgement is None:
                plain = next(each_in_a_process(_runs_in_pytorch, [case]))[1]
                judgement = crashed(case, Verdict.INVALID if plain is None else Verdict.RAW)
            found.append(judgement)
        return found

    return name, judged(False, judge), judged(True, judge_cuda)


def _runs_in_pytorch(case: Case) -> bool:
    try:
        case.run(case.model)
    except Exception:
        return False
    return True


def _shown(results: Iterable[Any], count: int, task: str) -> Iterator[Any]:
    for number, result in enumerate(results, 1):
        print(f"\r{task}: {number} of {count} ops", end="", file=sys.stderr, flush=True)
        yield result
    print(file=sys.stderr)


if __name__ == "__main__":
    main()
