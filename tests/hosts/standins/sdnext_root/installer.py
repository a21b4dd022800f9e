"""What the host knows of its release."""

version = {"commit": "058a7f0c"}
