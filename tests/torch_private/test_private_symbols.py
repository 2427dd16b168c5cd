"""Private symbols of torch are in one room, each with the place that defines it."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import memfit
from memfit import torch_private

ROOT = Path(memfit.__file__).parent
SUBJECTS = [module.name for module in pkgutil.iter_modules(torch_private.__path__) if module.name != "version"]
ATTRIBUTES = frozenset({"_cdata", "_version", "_base", "_schema", "_use_count", "_view_func_unsafe", "_sequence_nr"})
MEMBERS = frozenset({"_local_tensor", "_get_fsdp_state", "_fsdp_param_groups", "_comm_ctx", "_active_ddp_module"})
"""Of DTensor, `fully_shard` and DDP."""
TABLES = frozenset({"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"})


def uses_of(source: str) -> list[str]:
    """Return every private symbol of torch that a file names in code."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [f"from {node.module}: {part}" for part in parts if part.startswith("_")]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            chain = ast.unparse(node)
            of_torch = chain.startswith(("torch.", "nn.Module.", "dist.")) and not chain.startswith("torch.ops.")
            of_a_module = node.attr in TABLES and not chain.startswith("self._")
            if of_torch or node.attr in ATTRIBUTES | MEMBERS or of_a_module:
                found.append(chain)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            replaces = node.func.id in ("patched", "replaced")
            asks = node.func.id in ("getattr", "hasattr")
            found += [
                ast.unparse(node)
                for name in names
                if (replaces and name.startswith("_") and not name.endswith("__")) or (asks and name in MEMBERS)
            ]
    return found


@pytest.mark.parametrize(
    ("source", "symbols"),
    [
        ("import torch\ntorch._C.x", ["torch._C"]),
        ("from torch.utils._pytree import tree_leaves", ["from torch.utils._pytree: _pytree"]),
        ("tensor.untyped_storage()._cdata", ["tensor.untyped_storage()._cdata"]),
        ("module._parameters", ["module._parameters"]),
        ("group._comm_ctx", ["group._comm_ctx"]),
        ("hasattr(x, '_local_tensor')", ["hasattr()"]),
        ("patched(Reducer, '_rebuild_buckets', f)", ["patched()"]),
        ("patched(torch.Tensor, 'data_ptr', f); patched(Kind, '__init__', f); getattr(x, '_fields')", []),
        ("torch.ops.aten._to_copy; self._parameters; torch.__version__", []),
    ],
)
def test_private_symbols_are_seen(source: str, symbols: list[str]) -> None:
    parts = [each if each.startswith("from") else re.sub(r"\(.*\)", "()", each) for each in uses_of(source)]
    assert [each for each in parts if each in symbols] == symbols
    assert bool(parts) is bool(symbols)


def test_no_other_room_names_a_private_symbol() -> None:
    files = [path for path in ROOT.rglob("*.py") if "torch_private" not in path.parts]
    assert len(files) > 100
    assert {str(path.relative_to(ROOT)): uses for path in files if (uses := uses_of(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_each_symbol_is_there_and_says_where_torch_defines_it(subject: str) -> None:
    module = importlib.import_module(f"memfit.torch_private.{subject}")
    source = Path(str(module.__file__)).read_text("utf-8")
    tree = ast.parse(source)
    said = ast.get_docstring(tree) or ""
    for before, node in zip([None, *tree.body], [*tree.body, None], strict=True):
        name = _assigned(before)
        if name is not None and not name.startswith("_"):
            assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant), f"{name} has no reason"
            said += str(node.value.value)
            assert getattr(module, name) is not None
    said += "".join(ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef))
    said += "".join(line for line in source.splitlines() if line.startswith("#"))
    assert re.search(r"\b(torch|aten)/[\w/]+\.(py|cpp|h|pyi)\b|sys\._getframe", said), f"{subject}: defined where?"


def _assigned(node: ast.stmt | None) -> str | None:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id != "__all__":
        return node.targets[0].id
    return None
