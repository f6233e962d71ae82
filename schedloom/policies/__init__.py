"""The built-in policies, one folder each, registered through the same entry points as anybody else's."""
