"""Cards of 4 to 12 GB, emulated on a larger GPU: whole pictures without the extension and with it."""
