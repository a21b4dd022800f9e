"""Cards of 4 to 12 GB, emulated on a larger GPU: whole images without the extension and with it."""
