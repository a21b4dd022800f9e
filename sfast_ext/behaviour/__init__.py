"""The behaviour key: what changes the result of a forward without being an argument."""
