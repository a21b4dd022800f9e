"""The commands: doctor, demo and bench."""
