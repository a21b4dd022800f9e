"""Plans: built, verified, cached and run."""
