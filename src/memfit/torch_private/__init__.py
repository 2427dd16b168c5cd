"""Every private symbol of torch that memfit uses, one file a subject.

Each name says what memfit needs it for, where torch defines it, and what happens in a torch without it. Names that any
supported torch must have are read when their file is imported, so that a torch without one fails at the import and not
in the middle of a step. `tests/torch_private` checks that each is there, and that no other room touches a
private symbol.
"""
