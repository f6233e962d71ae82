"""Who owns a session, and where that is kept."""
