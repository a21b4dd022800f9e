"""What the user sees in a WebUI: the settings, and the report over HTTP."""
