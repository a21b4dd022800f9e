"""Tests that drive real WebUIs."""

import pytest

# their assertions say what they compared
pytest.register_assert_rewrite(f"{__name__}.a1111", f"{__name__}.sdnext")
