"""torch's compiler and sympy are loaded by what needs them, not by a command. Each test is a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

START = """
import sys
from memfit.torch_private.deferred_imports import defer_imports, is_loaded
defer_imports()
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
        sys.argv = ["memfit", "plan", "llama3.2-1b", "--target", "h100-sxm", "--batch", "1", "--seq", "64"]
        assert main() == 0
        from memfit.torch_private import deferred_imports
        assert not deferred_imports.is_loaded()
        assert "torch.utils._sympy.functions" not in sys.modules
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


@pytest.mark.parametrize(
    "use",
    [
        "import torch._dynamo.config as own; from torch._dynamo import eval_frame; assert eval_frame.config is own",
        "import sympy.core as core; import sympy; assert sympy.core is core and core.S is sympy.S",
        "import torch.fx.experimental.symbolic_shapes as shapes; assert shapes.ShapeEnv is type(shapes.ShapeEnv())",
    ],
)
def test_a_module_of_a_deferred_package_runs_once(use: str) -> None:
    run(START + use)


@pytest.mark.parametrize(
    "use",
    [
        "import sympy; assert sympy.Symbol('x') + 1 and isinstance(sympy.Integer(1), sympy.Basic)",
        "import sympy; Basic = sympy.Basic; assert not isinstance(1, Basic); assert isinstance(sympy.S.One, Basic)",
        "import sympy\nclass Own(sympy.Basic): pass\nassert issubclass(Own, __import__('sympy').Basic)",
        "from sympy import Basic, S; assert isinstance(S.One, Basic)",
        "import importlib.util; assert importlib.util.find_spec('sympy')",
    ],
)
def test_sympy_behaves_as_itself(use: str) -> None:
    run(START + use)


def test_symbolic_sizes_are_answered_by_torch() -> None:
    program = """
        from torch.fx.experimental import symbolic_shapes as deferred
        asked = [
            ("sym_eq", 2, 2), ("sym_eq", 2, 3), ("sym_eq", (1, 2), [1, 2]), ("sym_eq", (1,), (1, 2)),
            ("sym_eq", (), ()), ("sym_eq", torch.Size([3]), (3,)), ("sym_and", True), ("sym_and", True, False),
            ("sym_or", False, True), ("guard_or_false", True), ("guard_int", 7), ("statically_known_true", False),
            ("is_nested_int", 5),
        ]
        functions = {name: getattr(deferred, name) for name, *_ in asked}
        answers = [functions[name](*values) for name, *values in asked]
        assert type(deferred).__name__ == "_DeferredSymbolicShapes"
        import torch.fx.experimental.symbolic_shapes
        torch.fx.experimental.symbolic_shapes.ShapeEnv  # loads it
        real = torch.fx.experimental.symbolic_shapes
        assert real.__file__
        assert answers == [getattr(real, name)(*values) for name, *values in asked]
        size = real.ShapeEnv().create_unbacked_symint()
        assert functions["statically_known_true"](size == size) is True
        assert functions["guard_or_false"](size == 3) is False
        assert isinstance(functions["sym_eq"](size, 3), torch.SymBool)
    """
    run(START + textwrap.dedent(program))


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
