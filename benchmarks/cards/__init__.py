"""What GeForce cards can reach at best, from published figures and machine code: a model, not a measurement."""
