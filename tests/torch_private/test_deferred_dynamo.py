"""torch's compiler is loaded by what compiles, not by a command that never does. Each test is a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

START = """
import sys
from memfit.torch_private.deferred_dynamo import defer_dynamo, is_loaded
defer_dynamo()
import torch
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_command_that_captures_does_not_load_the_compiler() -> None:
    program = """
        import sys
        from memfit.cli import main
        sys.argv = ["memfit", "plan", "gpt2", "--target", "h100-sxm", "--batch", "1", "--seq", "64"]
        assert main() == 0
        from memfit.torch_private import deferred_dynamo
        assert not deferred_dynamo.is_loaded()
    """
    assert run(textwrap.dedent(program))


@pytest.mark.parametrize(
    "use",
    [
        "assert torch._dynamo.config.suppress_errors in (True, False)",
        "import torch._dynamo.eval_frame",
        "from torch._dynamo import reset; reset()",
        "torch._dynamo.config.error_on_nested_fx_trace = False",
        "torch.compiler.set_stance('force_eager')",
        "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))",
    ],
)
def test_anything_that_needs_the_compiler_loads_it(use: str) -> None:
    run(START + "assert not is_loaded()\n" + use + "\nassert is_loaded()\nassert torch._dynamo.__file__\n")


def test_what_was_kept_out_of_graphs_stays_out_when_the_compiler_comes() -> None:
    program = """
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not is_loaded()
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        def step():
            weight.square().sum().backward()
            optimizer.zero_grad()

        torch.compile(step, backend=backend)()
        assert is_loaded() and weight.grad is None
    """
    run(START + textwrap.dedent(program))


def test_a_function_that_a_step_compiles_is_captured_eagerly() -> None:
    program = """
        import memfit

        class Compiles(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(8, 8)

            def forward(self, x):
                return torch.compile(lambda y: self.linear(y).relu())(x).sum()

        trace = memfit.trace(memfit.Step(Compiles(), torch.ones(2, 8)), target="h100-sxm")
        assert is_loaded()
        names = [op.name for op in trace.ops]
        assert "aten.addmm.default" in names and "aten.relu.default" in names, names
    """
    run(START + textwrap.dedent(program))
