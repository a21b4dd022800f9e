"""The kernels against their references in float64; see conftest.py for where each test runs."""
