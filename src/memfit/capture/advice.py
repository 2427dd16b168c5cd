"""What a step does about its memory by itself, and what to do instead: said in the notes of its trace."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from memfit.paths import alike, folded


@dataclass(slots=True)
class Advice:
    """Filled while the step runs. Modules are paths; a line is `file:line function`."""

    checkpointing: dict[str, None] = field(default_factory=dict)
    run_again: dict[str, None] = field(default_factory=dict)
    retaining: dict[str, None] = field(default_factory=dict)

    def checkpoint(self, module: str) -> None:
        """Note that `torch.utils.checkpoint` is called in a module."""
        self.checkpointing[module] = None

    def again(self, module: str) -> None:
        """Note a module that backward runs again: what a checkpoint holds, unless it holds no modules."""
        self.run_again[module] = None

    def retain(self, line: str) -> None:
        """Note a backward that keeps its graph."""
        self.retaining[line] = None

    def notes(self) -> list[str]:
        """The advice in words."""
        found = []
        if self.checkpointing:
            found.append(
                f"this model checkpoints {self._modules()} by itself (torch.utils.checkpoint), which no plan can "
                "change; turn that off (transformers: model.gradient_checkpointing_disable()) and plan again: memfit "
                "chooses better what to drop"
            )
        found += [
            f"backward(retain_graph=True) at {line} keeps everything that autograd saved while the loss lives; "
            "leave it out, unless another backward goes over the same graph"
            for line in self.retaining
        ]
        return found

    def _modules(self) -> str:
        modules = [module for module in self.run_again or self.checkpointing if module]
        if not modules:
            return "a part of itself"
        groups: dict[str, list[str]] = defaultdict(list)
        for module in modules:
            groups[alike(module)].append(module)
        return f"module{'s' if len(modules) > 1 else ''} {', '.join(map(folded, groups.values()))}"
