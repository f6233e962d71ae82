"""What clients ask, who they are, and what of it may reach an engine."""
