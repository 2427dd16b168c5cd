"""What fills the memory when Llama 3 8B trains on one H100, and the fastest plan that fits, without one: `make demo`.

python examples/demo.py --layers 16 --length 4096 --target a100-sxm-80gb --budget 40GiB
"""

from __future__ import annotations

import argparse
import time

from llama import Shape, training_step
from rich.console import Console

import memfit
from memfit.cost import Roofline, Runtime
from memfit.memory import summarize
from memfit.report import print_memory, print_time
from memfit.tradeoff import frontiers
from memfit.units import display_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100-sxm", help="a device: h100-sxm, a100-sxm-80gb, b200, …")
    parser.add_argument("--layers", type=int, default=Shape().layers)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=1, help="devices that the step is fully sharded over")
    parser.add_argument("--budget", help="what tensors of one device may take, such as 40GiB; all of it unless given")
    options = parser.parse_args()
    console = Console()
    shape = Shape(layers=options.layers)
    step = training_step(shape, batch=options.batch, length=options.length)
    what = f"{options.layers} layers, batch {options.batch}, {options.length} tokens"

    began = time.perf_counter()
    with console.status(f"capturing one training step: {what} …"):
        trace = memfit.trace(step, target=options.target)
    captured = time.perf_counter()
    with console.status("working out the timeline, the allocator, the times and the frontiers …"):
        summary = summarize(trace)
        runtime = Runtime.of(trace, Roofline())
        found = frontiers(trace, runtime.op_ms)
    done = time.perf_counter()
    with console.status("solving for the fastest plan that fits …"):
        plan = memfit.plan(trace, ranks=options.ranks, budget=options.budget, progress=False)
    solved = time.perf_counter()

    elements = sum(_elements(parameter.shape) for parameter in trace.parameters)
    console.print(f"Llama: {what}, {elements / 1e9:.2f} billion parameters in bfloat16, AdamW")
    print_memory(summary, console)
    print_time(runtime, found, console)
    console.rule("[bold]the plan: what to keep for backward and what to recompute")
    console.print(plan)
    times = [display_ms((end - begin) * 1e3) for begin, end in ((began, captured), (captured, done), (done, solved))]
    console.print(f"\n{len(trace.ops)} ops captured in {times[0]} without a GPU, weights or data", highlight=False)
    console.print(f"memory, time and frontiers worked out in {times[1]}, the plan in {times[2]}", highlight=False)
    console.print("plan.save('plan.json') keeps it; other budgets: --budget 60GiB, --ranks 8", highlight=False)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


if __name__ == "__main__":
    main()
