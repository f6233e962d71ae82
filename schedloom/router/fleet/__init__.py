"""The engines: which there are, how they are, and who of them may serve."""
