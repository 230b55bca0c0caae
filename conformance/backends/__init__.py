"""The built-in backends: one real implementation a module, each offering ``backends() -> Iterable[Backend]``.

A module imports torch, numpy, the standard library, ``references.backend``, ``references.recipes`` and its own library,
so that it runs in an interpreter that has only those; where its library is missing, the import raises ImportError with
the reason. It may set environment variables before it imports its library: every backend has a worker process of its
own. Names that start with an underscore are no backends.
"""
