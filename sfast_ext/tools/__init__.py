"""What stands behind the command line: models of random weights, the demonstration, the benchmark, the doctor."""
