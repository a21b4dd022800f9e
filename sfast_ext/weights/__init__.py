"""Where the weights that plans read live, and how they follow the module."""
