"""Plans: how they are built, verified, kept and run."""
