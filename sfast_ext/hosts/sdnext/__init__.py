"""SD.Next."""
