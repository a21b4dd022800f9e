"""What the commands and the benchmarks share: models, pipelines, engines, measurements."""


class Unavailable(RuntimeError):
    """What was asked for cannot be had on this machine; the message says why, and what to do."""
