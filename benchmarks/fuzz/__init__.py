"""Long runs of random events on one model, each output checked."""
