"""torch.compile under a memory budget: what the compiled forward saves and its backward recomputes.

compiled = memfit.compiled.compile(model, batch, loss=loss, optimizer=optimizer, budget="200MiB")
print(compiled)
output = compiled.model(**batch)
"""

from memfit.compiled.compiling import Compiled, Round, compile

__all__ = ["Compiled", "Round", "compile"]
