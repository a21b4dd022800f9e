"""What the user sees in a host: the settings, and the status over HTTP."""
