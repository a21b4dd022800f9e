"""What stands behind the command line: models of random weights, the demonstration, the benchmark, the doctor."""


class Unavailable(RuntimeError):
    """What was asked for cannot be had on this machine; the message says why, and what to do."""
