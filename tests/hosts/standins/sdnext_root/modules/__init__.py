"""A stand-in for SD.Next's `modules`: the order of events that an extension meets."""
