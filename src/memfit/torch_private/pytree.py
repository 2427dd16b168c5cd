"""Trees of containers (torch/utils/_pytree.py), walked as torch's own functions walk them.

It is what `functional_call`, hooks and `checkpoint` flatten with; any other library would take other containers apart.
"""

from __future__ import annotations

from torch.utils._pytree import PyTree, TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = ["PyTree", "TreeSpec", "tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten"]
