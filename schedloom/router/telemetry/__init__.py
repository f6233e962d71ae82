"""What the router tells of itself: figures and traces."""
