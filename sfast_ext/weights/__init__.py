"""The weight arena: memory of the weights that plans read, and its synchronization with the module."""
