"""Models of the built-in shapes, in plain torch.

Note [Precision]: they compute as FSDP2's mixed precision does, which is how torchtitan trains on several ranks. All
parameters are used in the compute dtype (autocast's), norms and embeddings too, and what flows between layers has it.
Plain autocast would leave embeddings and norms in float32, and hold twice the bytes for them.
"""
