"""What the commands and the benchmarks share: models, pipelines, engines, measurements."""
