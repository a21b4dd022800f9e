"""A stand-in of xformers 0.0.23.post1 for tests: the names that hosts use, its order of calls, and operators that are
registered as its own are, without fake implementations. They run on a CPU too."""

__version__ = "0.0.23.post1"
