"""Plans: the rewritten graph of a call, and how it runs. Nothing here decides whether it may."""
