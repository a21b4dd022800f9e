"""What changes the result of a forward and shows in no argument."""
